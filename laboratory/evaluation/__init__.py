"""Experiments of `python -m pretrain evaluate`.

What trains models further is in laboratory/finetuning.

heads      diversity of heads, other lengths, function approximation
tasks      downstream tasks by lm-evaluation-harness
toy_tasks  tasks that a model learns in a minute
verbs      command line
"""
