"""Downstream tasks by lm-evaluation-harness, for `evaluate tasks`.

harness   the harness on one model: tasks, `simple_evaluate`, scores and items of its results
report    gaps by seed and by item; report.md, report.json
"""
