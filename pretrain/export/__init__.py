"""Out of the run directory: a trained model as a Hugging Face directory, and text from it.

export         the whole of it, in order; nothing half-written
trained_run    which weights of which run, checked
projections    query, key and value rows of a layer, adapters folded in
architectures  the stock class that a run's model is, its config.json and its weights by name
weight_files   safetensors, one parameter in memory at a time
tokenizer      tokenizer.json from the run's tokenizer, and where it differs
agreement      the exported model's logits beside our own
card           README.md of the export
hub            sending an export to the hub
"""
