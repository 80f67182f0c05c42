#!/usr/bin/env bash
# Fetch a corpus into ORA_CORPUS, or build the demo corpus there. After a time limit, submit again: it goes on.
#   ORA_SOURCE=slimpajama ORA_CORPUS=data/slimpajama-text sbatch slurm/download.sh [option of `data_pipeline download`]...
#SBATCH --job-name=ora-download
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=48:00:00
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
ora_need ORA_SOURCE ORA_CORPUS
if [ "$ORA_SOURCE" = demo ]; then
  ora_work -m data_pipeline demo-corpus "$ORA_CORPUS" "$@"
else
  ora_work -m data_pipeline download "$ORA_SOURCE" --out "$ORA_CORPUS" "$@"
fi
