#!/usr/bin/env bash
# Every run of a grid file: array task I trains the runs I, I + ORA_NUM_TASKS, ... of the grid, each in its own directory.
# `python -m pretrain sweep GRID --dry-run` lists them. A task requeues itself until its runs are finished.
#   export ORA_GRID=a1_init ORA_NUM_TASKS=10
#   job=$(sbatch --parsable --array=0-9%4 slurm/sweep.sh [section.key=value]...)
#   ORA_RUNS=runs/a1 sbatch --dependency=afterany:$job --kill-on-invalid-dep=yes slurm/compare.sh
#SBATCH --job-name=ora-sweep
#SBATCH --array=0-9%4
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm/logs/%x-%A_%a.log
ORA_ROOT=${ORA_ROOT:-${SLURM_SUBMIT_DIR:-.}}
# shellcheck source=slurm/lib.sh
. "$ORA_ROOT/slurm/lib.sh" || {
  echo "error: $ORA_ROOT is no checkout of ora-pretrain: call sbatch in its root, or set ORA_ROOT" >&2
  exit 2
}
ora_start
ora_need ORA_GRID ORA_NUM_TASKS
ora_shape
ora_overrides "$@"
ora_sweep "$ORA_GRID" ${ORA_OVERRIDE_WORDS[@]+"${ORA_OVERRIDE_WORDS[@]}"}
