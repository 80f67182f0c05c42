# shellcheck shell=bash
# What is particular to a cluster. Copy to slurm/site.sh and change; every job script and slurm/submit.py read it.
# `: "${VAR:=value}"` leaves VAR alone where the command line has set it. All settings: slurm/lib.sh.

# --- for sbatch: read by slurm/submit.py, and by sbatch itself after `. slurm/site.sh` in your shell ---------------------
# export SBATCH_PARTITION=gpu
# export SBATCH_ACCOUNT=my-project
# export SBATCH_QOS=normal

# --- the environment: one of these three ---------------------------------------------------------------------------------
# 1. A virtual environment on a file system that all nodes see (`make` puts one into .venv, which is the default).
# : "${ORA_PYTHON:=$ORA_ROOT/.venv/bin/python}"
#
# 2. Modules or conda. Called once in every job, before anything else.
# ora_environment() {
#   module load cuda/12.6 && . "$HOME/miniconda3/bin/activate" ora
# }
# : "${ORA_PYTHON:=python}"
#
# 3. A container: Apptainer, which the job calls, or an image that srun starts (pyxis).
# : "${ORA_PREFIX:=apptainer exec --nv $ORA_ROOT/slurm/ora.sif}"
# : "${ORA_SRUN_OPTIONS:=--container-image=$HOME/ora.sqsh --container-mounts=$ORA_ROOT,/scratch}"
# : "${ORA_PYTHON:=python3}"

# --- the network ---------------------------------------------------------------------------------------------------------
# Where nodes have several interfaces, or a node's own name resolves to 127.0.1.1:
# : "${ORA_INTERFACE:=ib0}"
# export NCCL_IB_HCA=mlx5
# A collective that takes longer has lost a rank (seconds; NCCL's watchdog ends the ranks then):
# : "${ORA_TIMEOUT_SECONDS:=600}"

# --- the nodes -----------------------------------------------------------------------------------------------------------
# : "${ORA_THREADS_PER_RANK:=8}"
# : "${ORA_DOCTOR_OPTIONS:=}"
