"""Needs of a run by formulas, before a GPU is touched: memory, time, energy, money.

workload     model, layout and micro batch of a rank; all below reads only this
activations  storages that autograd keeps for backward: within 5 % of what is measured
horizon      tokens, batch and rate by published rules
memory       states of DeepSpeed at each ZeRO stage, exact; all memory by kind, and the peak
products     FLOPs of a token that hardware executes, recomputation included
roofline     the cards, and how long a step takes on one, part by part: an estimate
advice       what fits, and which switch brings how much if a run does not
estimate     everything for one configuration, beside the same run with other attention
report       the plan as text and as JSON
verb         the command line
"""
