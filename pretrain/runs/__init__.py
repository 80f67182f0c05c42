"""The run directory on disk: what `train` writes, and how every other verb reads it back, without torch.

directory     names of the files, states, complete checkpoints, atomic writes
environment   what environment.json records
position      how far a run has come
tags          every metric of a run: tag, unit, when it is there, its TensorBoard chart
metrics_file  metrics.jsonl: append, cut back at a resume, read
curves        metrics.jsonl as arrays
summary       the result of a finished run, as summary.json has it
finished      a finished run as one record
"""
