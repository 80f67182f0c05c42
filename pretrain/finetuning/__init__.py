"""Training an exported model further on a task, with the Trainer of transformers: for `evaluate`.

pretrained           the models: exports of runs, what was frozen of them, which are seeds of one method
plan, settings       what is trained, and how
records              rows of TSV, JSONL and parquet files, each with its place
classification_data  GLUE's tasks, and examples of a task from files
metrics              what GLUE asks of each task, and how far chance alone moves it
translation_data     pairs of texts from files
bleu                 sacreBLEU
encoding             texts to ids, ids to padded batches
translating          prompts, and greedy translations of many at once
models               an export with a new head, or as the language model it is
frozen_rows          Q and K that stay frozen, and the proof that they did
training             the Trainer, early stopping, the best weights
trials               finished trainings, kept as files
packages             optional packages, and none of their chatter
"""
