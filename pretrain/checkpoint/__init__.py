"""Saving a run so that it goes on as if it had never stopped.

checkpoints  save, commit, find, load, remove
identity     whether a checkpoint belongs to this run
weights      the full weights of a checkpoint of any layout, for evaluation
"""
