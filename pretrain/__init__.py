"""The program: configuration, training loop, checkpoints and telemetry of a pretraining run."""
