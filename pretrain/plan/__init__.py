"""Needs of a run by formulas, before a GPU is touched: memory, time, energy, money.

workload     a micro batch of a rank; memory and time read only this
products     FLOPs of a token that hardware executes, recomputation included
activations  what autograd keeps for backward, one number per part
horizon      tokens, batch and rate by published rules
memory       states of DeepSpeed at each ZeRO stage, exact; all memory by kind, and the peak
cards        GPUs by name or from a user's file
duration     how long a step takes: compute, memory traffic, communication
advice       what fits, and which switch brings how much if a run does not
estimate     everything for one configuration, beside the same run with other attention
report       the plan as text and as JSON
verb         the command line
"""
