"""Fine-tuning of exported models with the Trainer of transformers, for `evaluate`.

verbs                `evaluate glue` and `evaluate translation`
report               report of fine-tuned models beside a baseline
glue, translation    the two tasks: encoding, loading, scoring
plan                 models, seeds and settings that both have in common
trials               the one procedure of a fine-tuning, and the loop that keeps each result on disk
training             the Trainer, early stopping, the best weights
frozen_rows          Q and K that stay frozen, and the proof that they did
pretrained           models to fine-tune: exports of runs, their groups
models               loading: with a new head, or as a language model
encoding             texts to ids, ids to padded batches, examples set aside
classification_data  GLUE's tasks, and examples of a task from files
translation_data     pairs of texts from files
translating          prompts, greedy translations, BLEU
metrics              GLUE's metrics and their standard errors
records              rows of TSV, JSONL and parquet files
packages             optional packages
bert                 the head-wise test on BERT
"""
