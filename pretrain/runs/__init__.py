"""The run directory on disk: what `train` writes, and how every other verb reads it back, without torch.

directory     the files, atomic writes, the state, complete checkpoints
metrics_file  metrics.jsonl: append, cut back at a resume, read
curves        metrics.jsonl as arrays
finished      a finished run as one record
"""
