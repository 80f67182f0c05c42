"""Saving a run so that it goes on as if it had never stopped, on these ranks or on others.

checkpoints  save, commit, keep the last few
saving       one save on a thread behind the training
trouble      what one rank alone could not write, and all must stop for
resuming     find the newest, prove it whole and the run's own
format       the files, and every way in which they can be wrong
writing      snapshot in host memory, then files, without collectives
reading      any range of any block of any parameter
state        a checkpoint into a model and an engine
weights      the weights of a checkpoint, without an engine
blocks       where a rank's parameters lie in the whole model's
slices       what a rank's optimizer holds of them (DeepSpeed's internals)
verify       sizes and SHA-256
listing      what a run has saved, for people
verb         `python -m pretrain checkpoint list|verify`
bank         digests of the frozen bank
identity     whether a checkpoint belongs to this run
layout       by which layout it was written
health       whether weights are fit to be saved
"""
