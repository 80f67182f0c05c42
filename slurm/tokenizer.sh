#!/usr/bin/env bash
# Train the tokenizer ORA_TOKENIZER (PREFIX.model) on ORA_CORPUS.
#   ORA_CORPUS=data/slimpajama-text ORA_TOKENIZER=data/slimpajama.model sbatch slurm/tokenizer.sh [option of train-tokenizer]...
#SBATCH --job-name=ora-tokenizer
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
ora_need ORA_CORPUS ORA_TOKENIZER
[ "${ORA_TOKENIZER%.model}" != "$ORA_TOKENIZER" ] || ora_fail "ORA_TOKENIZER=$ORA_TOKENIZER must end in .model"
read -r -a inputs <<<"$ORA_CORPUS"
ora_work -m data_pipeline train-tokenizer "${inputs[@]}" --out "${ORA_TOKENIZER%.model}" "$@"
