#!/usr/bin/env bash
# Every run of a grid file: array task I trains the runs I, I + ORA_NUM_TASKS, ... of the grid, each in its own directory.
# `python -m pretrain sweep GRID --dry-run` lists them. A task requeues itself until its runs are finished.
#   export ORA_GRID=a1_init ORA_NUM_TASKS=10
#   job=$(sbatch --parsable --array=0-9%4 slurm/sweep.sh run.directory=runs/a1 [section.key=value]...)
#   ORA_RUNS=runs/a1 sbatch --dependency=afterany:$job --kill-on-invalid-dep=yes slurm/compare.sh
# With ORA_QUESTION=better, worse or within (and ORA_MARGIN, percent) it is a trial's: it ends when the question is answered.
# Give a trial as many tasks as run at once (ORA_NUM_TASKS=4 sbatch --array=0-3): the first pairs decide what the others train.
#SBATCH --job-name=ora-sweep
#SBATCH --array=0-9%4
#SBATCH --nodes=1
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@600
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
# shellcheck source=slurm/training.sh
. "$ORA_CODE/slurm/training.sh"

# ora_sweep GRID [section.key=value]…: the runs of this task, one after the other. One that fails does not stop the next.
# With ORA_QUESTION the next run is asked for when one is finished, until there is none, because the answer is there.
ora_sweep() {
  local answer line words failed=0
  while
    answer=$(ora_python -m laboratory.slurm sweep-runs --task "$SLURM_ARRAY_TASK_ID" --num-tasks "$ORA_NUM_TASKS" \
      --nodes "$SLURM_JOB_NUM_NODES" --ranks-per-node "$ORA_RANKS_PER_NODE" \
      ${ORA_QUESTION:+--question "$ORA_QUESTION" --margin "${ORA_MARGIN:-2}"} -- "$@") || return
    [ -n "$answer" ]
  do
    while read -r line; do
      IFS=$'\t' read -r -a words <<<"$line"
      ora_pretrain "${words[@]}" </dev/null || failed=1
      [ "$failed" = 0 ] || [ "$(ora_job_field JobState)$ORA_STOPPED" = RUNNING0 ] || return 1
    done <<<"$answer"
    if [ -z "${ORA_QUESTION:-}" ] || [ "$failed" = 1 ]; then break; fi
  done
  return "$failed"
}

ora_start
ora_need ORA_GRID ORA_NUM_TASKS
ora_shape
ora_overrides ${ORA_RUN_DIRECTORY:+"run.directory=$ORA_RUN_DIRECTORY"} "$@"
ora_sweep "$ORA_GRID" ${ORA_OVERRIDE_WORDS[@]+"${ORA_OVERRIDE_WORDS[@]}"}
