"""Conversion of a trained model to a Hugging Face directory, text from it, and the way back.

export             the whole conversion, in order; a directory that is complete or absent
trained_run        the run, its checkpoint and its model, checked; texts of its model
projections        query, key and value rows of a layer, adapters folded in
names              classes of transformers: names of weights and settings, read both ways
architectures      a run's model as one of these classes: its config.json, its weights by name
modeling_ora       code that is copied into an export with adapters that rows cannot hold
weight_files       safetensors, one parameter in memory at a time
directories        output directories that are complete or absent
tokenizer          tokenizer.json from the run's tokenizer, and a comparison of the two
agreement          the exported model's logits compared with the run's own
card               README.md of the export
run_exports        exports kept in the run directory
sampling           text from an exported model, token by token
source_model       the way back: initial weights and a configuration from such a directory
verb               `python -m pretrain export|import|sample`, and the upload to the hub
models          model directories of transformers: identity, loading, trust in their code
"""
