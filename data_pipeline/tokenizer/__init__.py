"""Tokenizers: training, loading, and encoding to ids.

tokenizer  SentencePiece models and tokenizer.json files: load, identify, encode, decode, lost text
identity   identity of a tokenizer, as a shard directory states it
encoder    encoders of batches: the tokenizer's own program, or gigatoken
train      training of a lossless SentencePiece model
"""
