"""What the Slurm scripts ask Python: `python -m pretrain.job`.

__main__  the command line of the scripts
segments  whether a run goes on, is finished, or is given up, after each job
"""
