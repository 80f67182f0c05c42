"""Fine-tuning of exported models with the Trainer of transformers, for `evaluate`.

verbs                `evaluate glue`
report               report of fine-tuned models beside a baseline
glue                 the fine-tunings, and the loop that keeps each result on disk
training             the Trainer, early stopping, the best weights
frozen_rows          Q and K that stay frozen, and the proof that they did
models               models to fine-tune: their groups, loading with a new head
encoding             texts to ids, examples set aside
classification_data  GLUE's tasks, and examples of a task from files
records              rows of JSONL and parquet files
metrics              GLUE's metrics and their standard errors
"""
