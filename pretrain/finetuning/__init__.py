"""Training an exported model further on a task, with the Trainer of transformers: for `evaluate`.

records              rows of TSV, JSONL and parquet files, each with its place
classification_data  GLUE's tasks, and examples of a task from files
metrics              what GLUE asks of each task, and how far chance alone moves it
encoding             texts to ids, ids to padded batches
frozen_rows          Q and K that stay frozen, and the proof that they did
training             the Trainer, early stopping, the best weights
settings             how it is trained
packages             optional packages, and none of their chatter
"""
