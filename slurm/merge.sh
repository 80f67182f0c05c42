#!/usr/bin/env bash
# Finish the shard directory ORA_SHARDS that tokenize tasks have filled, then verify it.
#   ORA_SHARDS=data/slimpajama sbatch slurm/merge.sh [option of `data_pipeline verify`]...
#SBATCH --job-name=ora-merge
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
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
ora_start
ora_need ORA_SHARDS
ora_work -m data_pipeline merge-manifests "$ORA_SHARDS" --workers "${SLURM_CPUS_PER_TASK:-1}" &&
  ora_work -m data_pipeline verify "$ORA_SHARDS" "$@"
