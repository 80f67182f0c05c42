"""What the Slurm scripts ask Python: `python -m pretrain.job`.

__main__  the command line of the scripts
segments  whether a job goes on, is finished, or is given up, after each of its segments
shape     how many of the job's ranks a run can use
work      what it works at: a training run, or a task of a tokenize array
"""
