"""Text to tokens: sources -> tokenizer -> Megatron shards -> deterministic training samples.

__main__     command line `python -m data_pipeline VERB`
demo_corpus  corpus of English prose from this Python installation
tokenizing   documents to shards: plan, units of work, assembly, tasks of many machines
shards       shard directories: format, manifest, checks, samples in a reproducible order, blends
tokenizer    SentencePiece and Hugging Face tokenizers: training, identity, encoders
sources      inputs: files and data sets; formats, records, samples of documents; downloads
io           files, leases, worker processes, progress
errors       the error that this package raises for what its user can fix
"""
