"""Downstream tasks by lm-evaluation-harness, for `evaluate tasks`.

report       report.md, report.json, tables on the terminal
statistics   gaps over pairs of seeds, McNemar's test over items
run          models on tasks; results on disk are kept
harness      interface to lm-eval: tasks, data, models
scores       scores of a task and of a group of tasks
"""
