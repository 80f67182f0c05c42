"""The program: configuration, training loop, checkpoints and telemetry of a pretraining run."""

# Here and not in the package's metadata: jobs on a cluster run a checkout that nobody installed.
__version__ = "0.2.0"
