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
# shellcheck source=slurm/lib.sh
. "$ORA_ROOT/slurm/lib.sh" || {
  echo "error: $ORA_ROOT is no checkout of ora-pretrain: call sbatch in its root, or set ORA_ROOT" >&2
  exit 2
}
ora_start
ora_need ORA_CORPUS ORA_TOKENIZER ORA_SHARDS ORA_NAME
ORA_NUM_TASKS=${ORA_NUM_TASKS:-64} # not Slurm's count of array tasks, which is 2 for --array=3,5
ora_tokenize "$@"
