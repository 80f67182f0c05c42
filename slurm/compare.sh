#!/usr/bin/env bash
# Compare finished runs. A directory in ORA_RUNS that is not a run stands for the runs in it.
#   ORA_RUNS="runs/vanilla runs/orthogonal" ORA_OUT=runs/comparison sbatch slurm/compare.sh [option of `pretrain compare`]...
#SBATCH --job-name=ora-compare
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
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

# The runs that the given directories are, or hold: one per line.
ora_runs_in() {
  local directory inside
  for directory in "$@"; do
    if [ -f "$directory/config.yaml" ]; then
      echo "$directory"
    else
      for inside in "$directory"/*/config.yaml; do
        [ ! -f "$inside" ] || dirname "$inside"
      done
    fi
  done
}

ora_start
ora_need ORA_RUNS
read -r -a given <<<"$ORA_RUNS"
mapfile -t runs < <(ora_runs_in "${given[@]}")
[ ${#runs[@]} -gt 0 ] || ora_fail "no run in ORA_RUNS=$ORA_RUNS"
ora_work -m pretrain compare "${runs[@]}" --baseline "${ORA_BASELINE:-vanilla}" --out "${ORA_OUT:-comparison}" "$@"
