# shellcheck shell=bash
# What is particular to a cluster. Copy to slurm/site.sh and change; every job script and slurm/submit.py read it.
# `: "${VAR:=value}"` leaves VAR alone where the command line has set it. All settings: slurm/lib.sh. The numbers are those
# of docs/operations.md.

# --- 1. account, partition, QOS: for slurm/submit.py, and for sbatch itself after `. slurm/site.sh` in your shell ---------
# export SBATCH_ACCOUNT=my-project
# export SBATCH_PARTITION=gpu
# export SBATCH_QOS=normal

# --- the environment: one of 2, 3, 4 and 5 --------------------------------------------------------------------------------
# 2. A virtual environment on a file system that all nodes see (`make` puts one into .venv, which is the default).
# : "${ORA_PYTHON:=$ORA_ROOT/.venv/bin/python}"
#
# 3. Modules or conda. Called once in every job, before anything else; what it exports reaches the ranks.
# ora_environment() {
#   module load python/3.11 && . "$HOME/miniconda3/bin/activate" ora
# }
# : "${ORA_PYTHON:=python}"
#
# 4. Apptainer, which the job calls: one container per rank.
# : "${ORA_PREFIX:=apptainer exec --nv --bind /scratch $ORA_ROOT/slurm/ora.sif}"
# : "${ORA_PYTHON:=python3}"
#
# 5. An image that srun starts (pyxis and enroot).
# : "${ORA_SRUN_OPTIONS:=--container-image=$HOME/ora.sqsh --container-mounts=$ORA_ROOT,/scratch --container-workdir=$ORA_ROOT}"
# : "${ORA_PYTHON:=python3}"

# --- 6. the network -------------------------------------------------------------------------------------------------------
# Where nodes have several interfaces, or a node's own name resolves to 127.0.1.1 (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME):
# : "${ORA_INTERFACE:=ib0}"
# InfiniBand: the adapters that NCCL may use. EFA and Slingshot: fail rather than fall back to TCP without the plugin.
# export NCCL_IB_HCA=mlx5
# export NCCL_NET="AWS Libfabric"
# For one short run, where all-reduce is slow: the ranks' logs then say which network NCCL took.
# export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET

# A collective that takes longer has lost a rank (seconds; the ranks end then, and the job goes on):
# : "${ORA_TIMEOUT_SECONDS:=600}"

# --- 7. node-local scratch: called once on every node, outside containers, before Python starts ----------------------------
# ora_every_node() {
#   [ -e "/local/$USER/venv/whole" ] ||
#     { mkdir -p "/local/$USER" && tar -xf "$ORA_ROOT/venv.tar" -C "/local/$USER" && touch "/local/$USER/venv/whole"; }
# }
# : "${ORA_PYTHON:=/local/$USER/venv/bin/python}"

# --- 8. several users: a clone of the checkout each, one environment for all -----------------------------------------------
# : "${ORA_PYTHON:=/shared/ora/.venv/bin/python}"

# --- 9. where runs are, with the logs of their ranks (those of the jobs: slurm/logs of the clone) --------------------------
# : "${ORA_RUN_DIRECTORY:=/scratch/$USER/runs}"

# --- 10. the code: nothing to set here. A job runs a copy; `ORA_CODE=$PWD sbatch …` runs the checkout, whose edits reach restarts

# --- the nodes ------------------------------------------------------------------------------------------------------------
# : "${ORA_RANKS_PER_NODE:=8}"
# : "${ORA_THREADS_PER_RANK:=8}"
# : "${ORA_DOCTOR_OPTIONS:=}"
# Where Slurm gives an exclusive job a part of the nodes' memory (ranks end with exit code 137), ask for all of it:
#   sbatch --mem=0 slurm/pretrain_large.sh        python slurm/submit.py large --sbatch pretrain="--mem=0"
