"""Fine-tuning of models by the Trainer of transformers: GLUE, and the reservoir test.

verbs      `evaluate glue`, `evaluate reservoir`
report     report of fine-tunings beside a baseline
training   arms and seeds, each result kept on disk; encoding, the Trainer, the best epoch
models     models to fine-tune or to evaluate: their groups, loading with a new head
query_key  query and key projections by name: replaced, frozen, and the proof that they stayed so
glue_data  GLUE's tasks, their splits by `datasets`, their metrics
"""
