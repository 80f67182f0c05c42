#!/usr/bin/env bash
# 335.4 M parameters, 100 B tokens of SlimPajama, on two nodes of 8 GPUs:
#   sbatch slurm/pretrain_large.sh [section.key=value]...
#   sbatch --nodes=1-2 slurm/pretrain_large.sh: on what there is, and on fewer after a loss
# The job requeues itself until the run is finished. Settings: slurm/lib.sh; what the log says: docs/operations.md.
#SBATCH --job-name=ora-large
#SBATCH --nodes=2
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm/logs/%x-%j.log
ORA_ROOT=${ORA_ROOT:-${SLURM_SUBMIT_DIR:-.}}
# A copy of the code, made when this was submitted or at the first start: a restart runs what the first start ran.
ora_pinned=$ORA_ROOT/slurm/code/job-${SLURM_JOB_ID:-}
if [ -z "${SLURM_RESTART_COUNT:-}" ] || [ ! -e "$ora_pinned" ]; then
  : "${ORA_CODE:=$(bash "$ORA_ROOT/slurm/pin.sh" "${SLURM_JOB_ID:-}")}"
fi
: "${ORA_CODE:=$ora_pinned}"
# shellcheck source=slurm/lib.sh
. "$ORA_CODE/slurm/lib.sh" || {
  echo "error: $ORA_ROOT is not a checkout of ora-pretrain, or has no copy $ORA_CODE: call sbatch in its root, or set ORA_ROOT" >&2
  exit 2
}
# shellcheck source=slurm/training.sh
. "$ORA_CODE/slurm/training.sh"
ora_start
ora_shape
ora_overrides ${ORA_RUN_DIRECTORY:+"run.directory=$ORA_RUN_DIRECTORY"} "$@"
ora_pretrain "${ORA_CONFIG:-large}" ${ORA_OVERRIDE_WORDS[@]+"${ORA_OVERRIDE_WORDS[@]}"}
