# shellcheck shell=bash
# What every job script of this directory shares: settings, signals, and how a job is requeued. Sourced, never run.
# What is shared by those that train is in training.sh. Decisions are Python's (pretrain/job/segments.py).
#
# Settings are environment variables, from `VAR=… sbatch …`, or from the site file (slurm/site.sh, see site.example.sh; a
# variable that is already set wins over the site file if the site file writes it as `: "${VAR:=value}"`). A list is
# words separated by blanks, so no path in it may contain one.
#
#   for every script
#   ORA_ROOT                  checkout of ora-pretrain, the same on every node           directory where sbatch was called
#   ORA_CODE                  copy of the checkout's code that the job runs: what         a copy that slurm/submit.py makes, else the
#                             $(bash slurm/pin.sh) prints; $ORA_ROOT: the checkout       job's first start (slurm/code)
#                             itself, whose edits reach the job's restarts
#   ORA_SITE                  site file                                                  $ORA_ROOT/slurm/site.sh if it exists
#   ORA_PYTHON                Python of the environment                                  $ORA_ROOT/.venv/bin/python
#   ORA_PREFIX                words put before ORA_PYTHON: "apptainer exec --nv ora.sif" none
#   ORA_SRUN_OPTIONS          words for every srun: "--container-image=… --mpi=none"     none; if set, all Python runs by srun
#   ORA_MAX_STALLED_SEGMENTS  segments in a row without progress after which it stops    3
#
#   pretrain_small.sh, pretrain_base.sh, pretrain_large.sh; their arguments are more `section.key=value`
#   ORA_CONFIG                config name (large_modern, say) or YAML file               small, base, large
#   ORA_OVERRIDES             `section.key=value` words, before the script's arguments   none
#   ORA_RUN_DIRECTORY         directory that holds the runs: run.directory=…             the config's or grid's
#   ORA_RANKS_PER_NODE        ranks on every node                                        --ntasks-per-node, else one per GPU
#   ORA_THREADS_PER_RANK      OMP_NUM_THREADS of a rank                                  sbatch --cpus-per-task, or 1
#   ORA_INTERFACE             network interface of gloo and NCCL: ib0, eth0              they choose
#   ORA_TIMEOUT_SECONDS       a collective may take: parallel.timeout_seconds=…          the config's
#   ORA_DOCTOR                0: no preflight on the nodes                               1
#   ORA_DOCTOR_OPTIONS        words for `python -m pretrain doctor`                      none
#   ORA_MAX_EXCLUDED_NODES    bad nodes the job leaves out before it gives up            4
#
#   download.sh               ORA_SOURCE (a name that `data_pipeline download` knows, or demo: the built-in corpus), ORA_CORPUS
#                             (its directory); arguments go to `data_pipeline download` or `demo-corpus`
#   tokenizer.sh              ORA_CORPUS, ORA_TOKENIZER (PREFIX.model); arguments go to `data_pipeline train-tokenizer`
#   tokenize.sh (array)       ORA_CORPUS, ORA_TOKENIZER, ORA_SHARDS (shard directory), ORA_NAME (first part of the shards'
#                             names), ORA_NUM_TASKS (all tasks share the work; the array must be 0 … ORA_NUM_TASKS-1),
#                             ORA_WORKERS (processes of a task; default: --cpus-per-task); arguments go to `data_pipeline tokenize`
#   merge.sh                  ORA_SHARDS: merge-manifests, then verify; arguments go to `data_pipeline verify`
#   sweep.sh (array)          ORA_GRID (grid file), ORA_NUM_TASKS, and all that the pretrain scripts read but ORA_CONFIG;
#                             ORA_QUESTION (better, worse or within) and ORA_MARGIN (percent, 2) make it a trial
#   compare.sh                ORA_RUNS (run directories), ORA_BASELINE (vanilla), ORA_OUT (comparison); arguments go to
#                             `pretrain compare`
#
# sbatch itself reads SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_QOS, SBATCH_TIMELIMIT … from the environment.

set -uo pipefail

ORA_SIGNALS=0   # how many signals this shell has handled: `wait` returns early at each
ORA_CONTINUE=0  # 1: the time limit or a preemption is near (SIGUSR1)
ORA_PASSING=    # process that passes SIGUSR1 on
ORA_STOPPED=0   # 1: somebody wants this to end (SIGTERM)
ORA_WORKER=     # process group of a command that runs beside srun

ora_say() { echo "$(date +%FT%T) $*" >&2; }

ora_fail() {
  echo "error: $*" >&2
  exit 2
}

# Working directory, site file, environment; traps. Called once by every script.
ora_start() {
  [ -n "${SLURM_JOB_ID:-}" ] || ora_fail "no Slurm job: submit this script with sbatch"
  # The raw number of an array's last task is also the name of the whole array.
  ORA_JOB=$SLURM_JOB_ID
  [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || ORA_JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  # Before what the site does, which may take minutes: without a trap a signal ends this shell.
  trap ora_on_usr1 USR1
  trap ora_on_term TERM
  trap ora_stop_passing EXIT
  # The ranks need all that is exported here, also in a job of `sbatch --export=NONE` or `--export=VAR=…`.
  export SLURM_EXPORT_ENV=ALL
  local code site=${ORA_SITE:-$ORA_ROOT/slurm/site.sh}
  code=$(cd "$ORA_CODE" && pwd) || ora_fail "ORA_CODE=$ORA_CODE is not a directory on $(hostname)"
  ORA_CODE=$code
  cd "$ORA_ROOT" || ora_fail "ORA_ROOT=$ORA_ROOT is not a directory on $(hostname)"
  if [ -e "$site" ]; then # /dev/null: none
    # shellcheck source=slurm/site.example.sh
    . "$site" || ora_fail "the site file $site failed"
  elif [ -n "${ORA_SITE:-}" ]; then
    ora_fail "ORA_SITE=$site does not exist"
  fi
  if declare -F ora_environment >/dev/null; then
    ora_environment || ora_fail "ora_environment of $site failed"
  fi
  if declare -F ora_every_node >/dev/null; then
    ora_on_every_node || ora_fail "ora_every_node of $site failed: a node's own words are above"
  fi
  # A path is made absolute, so that srun's shells find it; a bare name is looked up in PATH.
  ORA_PYTHON=${ORA_PYTHON:-$ORA_ROOT/.venv/bin/python}
  read -r -a ORA_PREFIX_WORDS <<<"${ORA_PREFIX:-}"
  read -r -a ORA_SRUN_WORDS <<<"${ORA_SRUN_OPTIONS:-}"
  ORA_COMMAND=(${ORA_PREFIX_WORDS[@]+"${ORA_PREFIX_WORDS[@]}"} "$ORA_PYTHON" "$ORA_CODE/slurm/run.py")
  # For the Python processes that those of the job start: the copy before the working directory (Python 3.11 and later).
  export PYTHONSAFEPATH=1 PYTHONPATH="$ORA_CODE${PYTHONPATH:+:$PYTHONPATH}"
  if [ ${#ORA_SRUN_WORDS[@]} -eq 0 ] && ! command -v "${ORA_COMMAND[0]}" >/dev/null; then
    ora_fail "${ORA_COMMAND[0]} is not on $(hostname): run 'make' once, or set ORA_PYTHON in $site"
  fi
  export ORA_MAX_STALLED_SEGMENTS=${ORA_MAX_STALLED_SEGMENTS:-3}
  export ORA_MAX_EXCLUDED_NODES=${ORA_MAX_EXCLUDED_NODES:-4}
  # srun does not take this over from sbatch.
  if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
  ora_say "$SLURM_JOB_NAME: job $ORA_JOB, restart ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-?}"
  ora_say_code
}

# Which code this job runs; + after a commit stands for uncommitted changes.
ora_say_code() {
  local commit
  if [ "$ORA_CODE" -ef . ]; then
    ora_say "code: the checkout itself, whose edits reach this job's restarts"
  else
    commit=$(cat "$ORA_CODE/git_commit" 2>/dev/null)
    ora_say "code: copy $ORA_CODE${commit:+, commit $commit}"
  fi
}

# The site file's ora_every_node, once on every node of the job.
ora_on_every_node() {
  export ORA_ROOT
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap --kill-on-bad-exit=0 \
    bash -c "$(declare -f ora_every_node); ora_every_node"
}

# One Python process on this node. Where Python is in a container that only srun can start, srun starts it; the SIGUSR1 that
# is passed on to all steps is not for this one.
ora_python() {
  if [ ${#ORA_SRUN_WORDS[@]} -gt 0 ]; then
    # shellcheck disable=SC2016
    srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --quiet "${ORA_SRUN_WORDS[@]}" \
      bash -c 'trap "" USR1; exec "$@"' python "${ORA_COMMAND[@]}" "$@"
  else
    "${ORA_COMMAND[@]}" "$@"
  fi
}

# --- signals ----------------------------------------------------------------------------------------------------------

# The ranks get the signal again and again, because one that comes while a rank is still starting is lost.
ora_on_usr1() {
  ORA_SIGNALS=$((ORA_SIGNALS + 1))
  [ "$ORA_CONTINUE" = 1 ] && return
  ORA_CONTINUE=1
  ora_say "SIGUSR1: the time limit or a preemption is near; the ranks finish their step and save"
  ora_pass_on USR1 &
  ORA_PASSING=$!
}

ora_on_term() {
  ORA_SIGNALS=$((ORA_SIGNALS + 1))
  ORA_STOPPED=1
  [ -z "$ORA_WORKER" ] || kill -TERM -- "-$ORA_WORKER" 2>/dev/null
  ora_say "SIGTERM: cancelled, or ended by Slurm; the ranks save if there is time"
  # For a SIGTERM to this shell alone. Not waited for: to a job that is ending, scancel would try for minutes.
  timeout 10 scancel --quiet --signal=TERM "$ORA_JOB" 2>/dev/null &
}

# Whether somebody wants this script to end, now or at the next good moment.
ora_asked_to_end() { [ "$ORA_CONTINUE$ORA_STOPPED" != 00 ]; }

# Once the ranks have ended, there is nobody left to pass a signal on to.
ora_stop_passing() { [ -z "$ORA_PASSING" ] || kill "$ORA_PASSING" 2>/dev/null; }

# Until it is ended, or this shell is. To the job's steps only, not to this shell.
ora_pass_on() {
  trap - TERM USR1
  while kill -0 $$ 2>/dev/null; do
    timeout 10 scancel --quiet --signal="$1" "$ORA_JOB" 2>/dev/null
    [ -z "$ORA_WORKER" ] || kill -TERM -- "-$ORA_WORKER" 2>/dev/null
    sleep 5
  done
}

# The exit code of a child, however many signals this shell handles meanwhile.
ora_wait() {
  local before code
  while :; do
    before=$ORA_SIGNALS
    wait "$1"
    code=$?
    [ "$ORA_SIGNALS" != "$before" ] || return "$code"
  done
}

# --- Slurm ------------------------------------------------------------------------------------------------------------

# scontrol ARGUMENTS…, until slurmctld answers: it may be away for a quarter of an hour. What it refuses is refused.
ora_scontrol() {
  local try answer
  for ((try = 0; try < 180; try++)); do
    answer=$(scontrol "$@" 2>&1) && {
      printf '%s\n' "$answer"
      return
    }
    case $answer in *'not found'* | *[Ii]nvalid* | *[Dd]enied* | *disabled* | *already*) break ;; esac
    [ "$try" != 2 ] || ora_say "slurmctld does not answer ($answer); waiting for it"
    sleep 5
  done
  ora_say "scontrol $*: $answer"
  return 1
}

# A field of `scontrol show job`.
ora_job_field() {
  local line
  line=$(ora_scontrol show job -o "$ORA_JOB") || return
  tr ' ' '\n' <<<"$line" | sed -n "s/^$1=//p" | head -1
}

# Ends this script. The nodes in $1, a list with commas that may be empty, are left out from now on.
ora_requeue() {
  trap '' TERM USR1 # Slurm ends this shell as soon as it has requeued the job
  [ "$(ora_job_field JobState)" = RUNNING ] || {
    ora_say "not requeued: the job is no longer running"
    exit 1
  }
  ora_scontrol requeue "$ORA_JOB" || ora_fail "scontrol requeue failed: submit again to go on"
  if [ -n "$1" ]; then
    scontrol update "JobId=$ORA_JOB" "ExcNodeList=$1" || ora_say "could not exclude $1"
  fi
  ora_say "requeued${1:+ without $1}"
  exit 0
}

# What Python decided: 0 finished, 1 stop; a requeue ends this script.
ora_conclude() {
  case $1 in
    finished) return 0 ;;
    requeue) ora_requeue "" ;;
    *) return 1 ;;
  esac
}

# --- work without ranks -----------------------------------------------------------------------------------------------

# ora_need NAME…: settings without a default.
ora_need() {
  local name
  for name in "$@"; do
    [ -n "${!name:-}" ] || ora_fail "$name is not set: see slurm/lib.sh"
  done
}

# ora_work ARGUMENTS…: Python with ARGUMENTS, in a process group of its own, so that all of it can be ended.
ora_work() {
  set -m
  ora_python "$@" &
  ORA_WORKER=$!
  set +m
  ora_wait "$ORA_WORKER"
}
