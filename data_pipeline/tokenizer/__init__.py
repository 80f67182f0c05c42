"""Tokenizers: training, loading, and encoding to ids.

tokenizer    SentencePiece models: load, identify, encode, decode, find lost text
huggingface  the same for a Hugging Face tokenizer.json
identity     identity of a tokenizer, as a shard directory states it
encoder      encoders of batches: the tokenizer's own program, or gigatoken
train        training of a lossless SentencePiece model
"""
