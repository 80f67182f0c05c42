"""What a run will need, before a GPU is touched: memory, time, energy, money. Formulas; no model is built.

tensors      every tensor that one rank trains or holds frozen, by name and size: exact
states       what DeepSpeed makes of them at each ZeRO stage, in bytes: exact
activations  what autograd keeps between forward and backward: within 5 % of what is measured; `queries` of
             attention's operands
memory       all of it by kind, and the peak
devices      the cards, and what is assumed of each
roofline     how long a step takes, part by part: an estimate
advice       what fits, and which switch brings how much if it does not
saving       checkpoints: size, seconds, how often they pay
estimate     all of it for one configuration, beside the same run with other attention
report       as text, `as_json` as JSON; `verb` is the command line
"""
