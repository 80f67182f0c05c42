"""Decisions of the Slurm scripts: `python -m pretrain.job`.

__main__   the command line for the scripts, and the part of a job's ranks that a run can use
segments   continuation, end or refusal of a job after each of its segments
job_kinds  kinds of job: a training run, or a task of a tokenize array
shape      the largest part of a job's ranks that a run can use
"""
