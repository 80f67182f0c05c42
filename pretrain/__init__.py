"""The trainer: from a configuration to a run directory. Read `training.loop` first.

api         the public Python interface
export      trained models as Hugging Face directories, and back; text from them
training    a run, from opening to its last step
optimizer   AdamW, Muon and rules of your own for DeepSpeed; gradients summed over ranks
job         answers to the Slurm scripts
checkpoint  save, verify, resume at any layout
doctor      the preflight of every node
telemetry   metrics.jsonl, TensorBoard, console, profiles
model       configuration to model, and its loss
data        configuration to samples
plan        memory, time and cost before a run
config      one typed tree of settings, checked
reporting   numbers, tables and texts
runs        the run directory on disk
ranks       process groups, devices, signals
configs     shipped configurations
errors      the error that a user can fix

What begins at run directories (`compare`, `sweep`, `try`, …) is in the package `laboratory`.
"""

# Here and not in the package's metadata: jobs on a cluster run a checkout that nobody installed.
__version__ = "0.6.0"
