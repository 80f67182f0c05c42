#!/usr/bin/env bash
# Text to shards: an array whose tasks share the work, then slurm/merge.sh.
# A task requeues itself at its time limit and after a crash.
#   export ORA_CORPUS=data/slimpajama-text ORA_TOKENIZER=data/slimpajama.model ORA_SHARDS=data/slimpajama ORA_NAME=slimpajama
#   job=$(sbatch --parsable slurm/tokenize.sh)
#   sbatch --dependency=afterok:$job --kill-on-invalid-dep=yes slurm/merge.sh
#SBATCH --job-name=ora-tokenize
#SBATCH --array=0-63%16
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm/logs/%x-%A_%a.log
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

# ora_tokenize [OPTION]…: this task's share. It loses the unit at hand when it is ended, and goes on after a requeue.
ora_tokenize() {
  local index=$SLURM_ARRAY_TASK_ID inputs answer code state options=()
  [ "$index" -lt "$ORA_NUM_TASKS" ] || ora_fail "array task $index of ORA_NUM_TASKS=$ORA_NUM_TASKS: give --array=0-$((ORA_NUM_TASKS - 1))"
  read -r -a inputs <<<"$ORA_CORPUS"
  ora_python -m pretrain.job begin-tokenizing "$ORA_SHARDS" "$index" "$ORA_NUM_TASKS" >/dev/null || return
  code=1 # if it was asked to stop before it began
  ora_asked_to_end || {
    ora_work -m data_pipeline tokenize "${inputs[@]}" --tokenizer "$ORA_TOKENIZER" --out "$ORA_SHARDS" --name "$ORA_NAME" \
      --workers "${ORA_WORKERS:-${SLURM_CPUS_PER_TASK:-1}}" --task "$index" --num-tasks "$ORA_NUM_TASKS" "$@"
    code=$?
  }
  state=$(ora_job_field JobState) || state=UNKNOWN
  [ "$ORA_CONTINUE" = 0 ] || options+=(--asked)
  answer=$(ora_python -m pretrain.job end-tokenizing "$ORA_SHARDS" "$index" "$ORA_NUM_TASKS" --exit-code "$code" \
    --job-state "$state" ${options[@]+"${options[@]}"}) || return 1
  ora_conclude "$answer"
}

# Huge pages for the encoder's tables of tens of MB: some 10 % less time (glibc from 2.35 on; others ignore it).
[[ ${GLIBC_TUNABLES:-} == *glibc.malloc.hugetlb* ]] ||
  export GLIBC_TUNABLES="${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1"

ora_start
ora_need ORA_CORPUS ORA_TOKENIZER ORA_SHARDS ORA_NAME
ORA_NUM_TASKS=${ORA_NUM_TASKS:-64} # not Slurm's count of array tasks, which is 2 for --array=3,5
ora_tokenize "$@"
