"""Shipped grids of `python -m pretrain sweep`, one YAML each.

ablations  the questions A1 to A9 of the method's design notes
studies    what pages of docs/results compare beyond them
rates      searches of learning rates for the studies
"""
