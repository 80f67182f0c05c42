"""Shipped grids of `python -m pretrain sweep`, one YAML each."""
