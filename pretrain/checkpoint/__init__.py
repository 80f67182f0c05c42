"""Saving a run so that it resumes exactly where it stopped, on any number of ranks.

checkpoints     the checkpoints of a run: save, commit, keep the last few
deferred_error  an error of one rank that all raise together
saving          one rank's save, on a thread in the background of training
resuming        the newest checkpoint, verified, as the start of a run
branching       a trunk's checkpoints that a branch may start from, and the records it takes over
format          files, their content, and checks of it
damage          errors for damaged checkpoints, and their remedies
writing         snapshot in host memory, then files, without collectives
loading         a checkpoint of any layout into a model and an engine, or as plain tensors
blocks          this rank's parameters as blocks of the whole model's
slices          this rank's slices in the optimizer (DeepSpeed's internals)
verify          sizes and SHA-256 of the files
listing         a run's checkpoints and their states, without torch
verb            `python -m pretrain checkpoint list|verify`
identity        settings, data and bank that tie a checkpoint to its run; the layout that wrote it
"""
