"""The run directory on disk: written by `train`, read back by every other verb, without torch.

directory     names of the files, states, complete checkpoints, atomic writes
seals         files of seals beside runs, as far as a run has to know them
lock          one training at a time in a run directory
storage       sentences about a file system that refuses writes
environment   environment.json: versions, commit, host, command
position      progress of a run, and running statistics of its loss and gradient norm
tags          every metric of a run: tag, unit, records that have it, its TensorBoard chart
metrics_file  metrics.jsonl: append, cut back at a resume, read
curves        metrics.jsonl as arrays
facts         the files that describe a run, read back and checked for their types
removal       the removal of checkpoints and files, by one set of rules
"""
