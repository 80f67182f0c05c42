"""The instruments: they begin at the run directories that `pretrain` writes.

grids          shipped grids of `sweep`, one YAML file each
reporting      form of reports: HTML pages, plots, progress
runs           finished runs, read back and judged
study          statistics over seeds, hypotheses, seals: what all comparisons share
compare        statistics over runs of this program, and over losses of anybody's
sweep          many runs from one grid; a trial that stops early
evaluation     experiments on trained models; downstream tasks
finetuning     a model trained on a task with its Q and K frozen
replay         a step repeated; two runs' first difference
compare_verbs  the verbs `compare` and `compare-losses`
quickstart     the verbs `try` and `demo`
slurm          runs of one task of a sweep, for the job scripts
api            comparisons from Python, which `pretrain.api` names
results        figures and numbers of docs/results, derived from the tables beside them

The command line finds the verbs in `pretrain.__main__.LABORATORY`. What these modules may import of
`pretrain` is listed in tests/test_architecture.py.
"""
