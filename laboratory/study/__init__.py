"""Studies over seeds: what `compare`, `evaluate` and fine-tuning share.

seeds     groups of runs that are seeds of one another, and the group that each is compared with
gaps      gaps paired by seed: interval, tests, effect size, Holm's correction, scale of the values
tables    tables and sentences of gaps, with one policy for p values
cache     results on disk, found by what they were made of
packages  check that the extra `compare` is installed
sequential  a paired t-test that may be looked at after every pair
hypothesis  claims about a variant against a baseline, and their answers
sealed    content of a seal: hypotheses, measure, settings, seeds and data of the runs
seal      its hashed file, written before the first run, and what has changed since
verdict   what the sealed runs, and they alone, say of sealed hypotheses
report    Markdown page, JSON, plots and terminal output of one study
"""
