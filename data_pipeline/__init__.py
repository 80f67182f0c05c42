"""Text to tokens: sources -> tokenizer -> Megatron shards and manifest -> deterministic training samples."""
