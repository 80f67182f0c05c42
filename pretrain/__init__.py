"""The program: a pretraining run from configuration to comparison. Read `training.loop` first.

api          the public Python interface
evaluation   experiments on trained models: heads, lengths, approximation, downstream tasks
finetuning   trained models fine-tuned on tasks with frozen rows
compare_verbs  the verbs of comparisons
export       trained models as Hugging Face directories, and back; text from them
replay       steps of a run made again; the first difference between two runs
training     a run, from opening to its last step
job          answers to the Slurm scripts
quickstart   text to two trained models and their comparison, in one command
checkpoint   save, verify, resume at any layout
doctor       the preflight of every node
sweep        many runs from one grid
telemetry    metrics.jsonl, TensorBoard, console, profiles
model        configuration to model, and its loss
data         configuration to samples
compare      paired statistics over runs
plan         memory, time and cost before a run
study        seeds, gaps, tables, reports and caches that all comparisons share
config       one typed tree of settings, checked
reporting    tables, plots and texts
runs         the run directory on disk
ranks        process groups, devices, signals
configs      shipped configurations
errors       the error that a user can fix
"""

# Here and not in the package's metadata: jobs on a cluster run a checkout that nobody installed.
__version__ = "0.5.0"
