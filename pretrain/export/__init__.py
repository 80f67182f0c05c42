"""Out of the run directory: a trained model as a Hugging Face directory, text from it, and the way back.

export         the whole of it, in order; nothing half-written
trained_run    which weights of which run, checked
projections    query, key and value rows of a layer, adapters folded in
architectures  the stock class that a run's model is, its config.json and its weights by name
weight_files   safetensors, one parameter in memory at a time
tokenizer      tokenizer.json from the run's tokenizer, and where it differs
agreement      the exported model's logits beside our own
card           README.md of the export
hub            sending an export to the hub
at_end         the export of a finished run, where its config asks for it
cache          the export of a checkpoint that is kept in the run directory
sampling       text, token by token
source_model   a directory of transformers read as a model of this program
importing      initial weights and a configuration from it
modeling_ora   goes along with an export whose queries and keys are normalised
directories, packages, choice, verb, sample_verb: places, optional packages, checkpoints, the command line
"""
