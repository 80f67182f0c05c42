"""Decisions of the Slurm scripts: `python -m pretrain.job`.

__main__   the command line for the scripts
segments   continuation, end or surrender of a job after each of its segments
shape      largest part of a job's ranks that a run can use
job_kinds  kinds of job: a training run, or a task of a tokenize array
"""
