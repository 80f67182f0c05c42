"""The experiments of `python -m pretrain evaluate`: head diversity, length generalisation, approximation."""
