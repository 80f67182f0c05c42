# shellcheck shell=bash
# What every job script of this directory shares. Sourced, never run; decisions are Python's (pretrain/job/segments.py).
#
# Settings are environment variables, from `VAR=… sbatch …`, or from the site file (slurm/site.sh, see site.example.sh; a
# variable that is already set wins over the site file if the site file writes it as `: "${VAR:=value}"`). A list is
# words parted by blanks, so a path in it must have none.
#
#   for every script
#   ORA_ROOT                  checkout of ora-pretrain, the same on every node           directory where sbatch was called
#   ORA_SITE                  site file                                                  $ORA_ROOT/slurm/site.sh if it exists
#   ORA_PYTHON                Python of the environment                                  $ORA_ROOT/.venv/bin/python
#   ORA_PREFIX                words put before ORA_PYTHON: "apptainer exec --nv ora.sif" none
#   ORA_SRUN_OPTIONS          words for every srun: "--container-image=… --mpi=none"     none; if set, all Python runs by srun
#   ORA_MAX_STALLED_SEGMENTS  segments in a row without progress after which it stops    3
#
#   pretrain_small.sh, pretrain_base.sh, pretrain_large.sh; their arguments are more `section.key=value`
#   ORA_CONFIG                config name or YAML file                                   small, base, large
#   ORA_OVERRIDES             `section.key=value` words, before the script's arguments   none
#   ORA_RUN_DIRECTORY         directory that holds the runs: run.directory=…             the config's
#   ORA_RANKS_PER_NODE        ranks on every node: one per GPU                           sbatch --ntasks-per-node
#   ORA_THREADS_PER_RANK      OMP_NUM_THREADS of a rank                                  sbatch --cpus-per-task, or 1
#   ORA_INTERFACE             network interface of gloo and NCCL: ib0, eth0              they choose
#   ORA_TIMEOUT_SECONDS       a collective may take: parallel.timeout_seconds=…          the config's
#   ORA_DOCTOR                0: no preflight on the nodes                               1
#   ORA_DOCTOR_OPTIONS        words for `python -m pretrain doctor`                      none
#   ORA_MAX_EXCLUDED_NODES    bad nodes the job leaves out before it gives up            4
#
#   download.sh               ORA_SOURCE (slimpajama, openwebtext, tinystories, or demo: the built-in corpus), ORA_CORPUS (its
#                             directory); arguments go to `data_pipeline download` or `demo-corpus`
#   tokenizer.sh              ORA_CORPUS, ORA_TOKENIZER (PREFIX.model); arguments go to `data_pipeline train-tokenizer`
#   tokenize.sh (array)       ORA_CORPUS, ORA_TOKENIZER, ORA_SHARDS (shard directory), ORA_NAME (first part of the shards'
#                             names), ORA_NUM_TASKS (all tasks share the work; the array must be 0 … ORA_NUM_TASKS-1),
#                             ORA_WORKERS (processes of a task; default: --cpus-per-task); arguments go to `data_pipeline tokenize`
#   merge.sh                  ORA_SHARDS: merge-manifests, then verify; arguments go to `data_pipeline verify`
#   sweep.sh (array)          ORA_GRID (grid file), ORA_NUM_TASKS, and all that the pretrain scripts read but ORA_CONFIG
#   compare.sh                ORA_RUNS (run directories), ORA_BASELINE (vanilla), ORA_OUT (comparison); arguments go to
#                             `pretrain compare`
#
# sbatch itself reads SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_QOS, SBATCH_TIMELIMIT … from the environment.

set -uo pipefail

ORA_SIGNALS=0   # how many signals this shell has handled: `wait` returns early at each
ORA_END_WORDS=(--kill-on-bad-exit=1 --wait=60) # a rank that fails ends the others
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
  cd "$ORA_ROOT" || ora_fail "ORA_ROOT=$ORA_ROOT is not a directory on $(hostname)"
  local site=${ORA_SITE:-$ORA_ROOT/slurm/site.sh}
  if [ -e "$site" ]; then # /dev/null: none
    # shellcheck source=slurm/site.example.sh
    . "$site" || ora_fail "the site file $site failed"
  elif [ -n "${ORA_SITE:-}" ]; then
    ora_fail "ORA_SITE=$site does not exist"
  fi
  if declare -F ora_environment >/dev/null; then
    ora_environment || ora_fail "ora_environment of $site failed"
  fi
  # A path is made absolute, so that srun's shells find it; a bare name is looked up in PATH.
  ORA_PYTHON=${ORA_PYTHON:-$ORA_ROOT/.venv/bin/python}
  read -r -a ORA_PREFIX_WORDS <<<"${ORA_PREFIX:-}"
  read -r -a ORA_SRUN_WORDS <<<"${ORA_SRUN_OPTIONS:-}"
  ORA_COMMAND=(${ORA_PREFIX_WORDS[@]+"${ORA_PREFIX_WORDS[@]}"} "$ORA_PYTHON")
  if [ ${#ORA_SRUN_WORDS[@]} -eq 0 ] && ! command -v "${ORA_COMMAND[0]}" >/dev/null; then
    ora_fail "${ORA_COMMAND[0]} is not on $(hostname): run 'make' once, or set ORA_PYTHON in $site"
  fi
  export ORA_MAX_STALLED_SEGMENTS=${ORA_MAX_STALLED_SEGMENTS:-3}
  export ORA_MAX_EXCLUDED_NODES=${ORA_MAX_EXCLUDED_NODES:-4}
  # srun does not take this over from sbatch.
  if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
  # The raw number of an array's last task is also the name of the whole array.
  ORA_JOB=$SLURM_JOB_ID
  [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || ORA_JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  trap ora_on_usr1 USR1
  trap ora_on_term TERM
  ora_say "$SLURM_JOB_NAME: job $ORA_JOB, restart ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-?}"
}

# One Python process on this node. Where Python is in a container that only srun can start, srun starts it.
ora_python() {
  if [ ${#ORA_SRUN_WORDS[@]} -gt 0 ]; then
    srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --quiet "${ORA_SRUN_WORDS[@]}" "${ORA_COMMAND[@]}" "$@"
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

# A field of `scontrol show job`; asked again if slurmctld does not answer.
ora_job_field() {
  local try line
  for try in 1 2 3 4 5; do
    [ "$try" = 1 ] || sleep 5
    line=$(scontrol show job -o "$ORA_JOB" 2>/dev/null) || continue
    tr ' ' '\n' <<<"$line" | sed -n "s/^$1=//p" | head -1
    return
  done
  ora_say "slurmctld does not answer"
  return 1
}

# Ends this script. The nodes given as $1 are left out from now on.
ora_requeue() {
  trap '' TERM USR1 # Slurm ends this shell as soon as it has requeued the job
  [ "$(ora_job_field JobState)" = RUNNING ] || {
    ora_say "not requeued: the job is no longer running"
    exit 1
  }
  scontrol requeue "$ORA_JOB" || ora_fail "scontrol requeue failed: submit again to go on"
  if [ -n "${1:-}" ]; then
    scontrol update "JobId=$ORA_JOB" "ExcNodeList=$1" || ora_say "could not exclude $1"
  fi
  ora_say "requeued${1:+ without $1}"
  exit 0
}

# What Python decided: 0 finished, 1 stop; a requeue ends this script.
ora_conclude() {
  case $1 in
    finished) return 0 ;;
    requeue) ora_requeue ;;
    *) return 1 ;;
  esac
}

# --- training ---------------------------------------------------------------------------------------------------------

# ora_overrides WORD…: ORA_OVERRIDE_WORDS, of settings and the script's arguments; the later wins.
ora_overrides() {
  local words
  read -r -a words <<<"${ORA_OVERRIDES:-}"
  ORA_OVERRIDE_WORDS=(${words[@]+"${words[@]}"} "$@")
  [ -z "${ORA_TIMEOUT_SECONDS:-}" ] ||
    ORA_OVERRIDE_WORDS=("parallel.timeout_seconds=$ORA_TIMEOUT_SECONDS" ${ORA_OVERRIDE_WORDS[@]+"${ORA_OVERRIDE_WORDS[@]}"})
}

# ora_pretrain CONFIG [section.key=value]…: one segment of one run. 0: the run is finished; else it stays as it is, or the job
# is requeued, which ends the script.
ora_pretrain() {
  local answer verdict run logs code
  answer=$(ora_python -m pretrain.job begin-training --world-size "$ORA_WORLD_SIZE" -- "$@") || return
  read -r verdict run logs <<<"$answer"
  [ "$verdict" = run ] || return 0
  ora_say "run $run, $ORA_WORLD_SIZE ranks, logs in $logs"
  ora_meeting_point
  ora_doctor "$run" "$logs" "$@"
  code=$?
  if [ "$code" = 0 ] && [ "$ORA_CONTINUE$ORA_STOPPED" = 00 ]; then
    # What all ranks refuse alike they also write there: which exit code srun returns is a race among them.
    ORA_REFUSAL=$logs/refused ora_ranks "$logs/rank_%3t-%N.log" -m pretrain train "$@"
    code=$?
  fi
  ora_after "$run" "$code"
}

# ora_sweep GRID [section.key=value]…: the runs of this task, one after the other. One that fails does not stop the next.
ora_sweep() {
  local answer line words failed=0
  answer=$(ora_python -m pretrain.job sweep-runs --task "$SLURM_ARRAY_TASK_ID" --num-tasks "$ORA_NUM_TASKS" \
    --world-size "$ORA_WORLD_SIZE" -- "$@") || return
  while read -r line; do
    [ -n "$line" ] || continue
    IFS=$'\t' read -r -a words <<<"$line"
    ora_pretrain "${words[@]}" </dev/null || failed=1
    [ "$failed" = 0 ] || [ "$(ora_job_field JobState)$ORA_STOPPED" = RUNNING0 ] || return 1
  done <<<"$answer"
  return "$failed"
}

# Ranks per node and threads per rank.
ora_shape() {
  local tasks=${SLURM_NTASKS_PER_NODE:-1}
  ORA_RANKS_PER_NODE=${ORA_RANKS_PER_NODE:-${tasks%%(*}}
  ORA_WORLD_SIZE=$((ORA_RANKS_PER_NODE * SLURM_JOB_NUM_NODES))
  export OMP_NUM_THREADS=${ORA_THREADS_PER_RANK:-${SLURM_CPUS_PER_TASK:-1}}
}

# Where the ranks meet: the head node's address as Slurm knows it, which also holds where names do not resolve.
ora_meeting_point() {
  local head address
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
  address=$(scontrol show node -o "$head" | tr ' ' '\n' | sed -n 's/^NodeAddr=//p')
  export MASTER_ADDR=${address:-$head}
  export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that the system gives away
  if [ -n "${ORA_INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$ORA_INTERFACE NCCL_SOCKET_IFNAME=$ORA_INTERFACE
  fi
}

# ora_ranks LOG ARGUMENTS…: Python with ARGUMENTS on every rank, one log each. A rank that fails ends the others.
ora_ranks() {
  local log=$1
  shift
  # A rank ignores SIGUSR1 until its own handler is in place: the shell passes it on again later.
  # shellcheck disable=SC2016
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$ORA_WORLD_SIZE" --ntasks-per-node="$ORA_RANKS_PER_NODE" \
    "${ORA_END_WORDS[@]}" --open-mode=append --output="$log" ${ORA_SRUN_WORDS[@]+"${ORA_SRUN_WORDS[@]}"} \
    bash -c 'trap "" USR1; exec "$@"' rank "${ORA_COMMAND[@]}" "$@" &
  ora_wait $!
}

# The preflight, whose ranks report one another: one that fails must not take them along. 0: go on. A bad node: the job goes
# on without it, which ends this script.
ora_doctor() {
  local run=$1 logs=$2 code words answer
  local ORA_END_WORDS=(--kill-on-bad-exit=0 --wait=900)
  shift 2
  [ "${ORA_DOCTOR:-1}" != 0 ] || return 0
  read -r -a words <<<"${ORA_DOCTOR_OPTIONS:-}"
  ora_ranks "$logs/doctor_%3t-%N.log" -m pretrain doctor --report "$logs/doctor.json" ${words[@]+"${words[@]}"} -- "$@"
  code=$?
  [ "$code" != 0 ] && [ "$ORA_CONTINUE" = 0 ] || return "$code"
  [ "$(ora_job_field JobState)" = RUNNING ] || return "$code"
  answer=$(ora_python -m pretrain.job after-doctor "$run" "$logs/doctor.json" --already "$(ora_excluded)") || exit 1
  [ -z "$answer" ] || ora_requeue "$answer"
  return "$code" # it ended without a report: a crash like any other
}

# The nodes that the job leaves out now.
ora_excluded() {
  local nodes
  nodes=$(ora_job_field ExcNodeList)
  [ -z "$nodes" ] || [ "$nodes" = "(null)" ] || scontrol show hostnames "$nodes" | paste -sd,
}

# ora_after RUN EXIT_CODE: finished, requeue or stop.
ora_after() {
  local answer state preempted options=()
  [ -z "$ORA_PASSING" ] || kill "$ORA_PASSING" 2>/dev/null
  state=$(ora_job_field JobState) || state=UNKNOWN
  preempted=$(ora_job_field PreemptTime)
  [ "${preempted:-None}" = None ] || options+=(--preempted)
  [ "$ORA_CONTINUE" = 0 ] || options+=(--asked)
  answer=$(ora_python -m pretrain.job end-training "$1" --exit-code "$2" --job-state "$state" ${options[@]+"${options[@]}"}) ||
    ora_fail "no decision about $1: submit again to go on"
  ora_conclude "$answer"
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

# ora_tokenize [OPTION]…: this task's share. It loses the unit at hand when it is ended, and goes on after a requeue.
ora_tokenize() {
  local index=$SLURM_ARRAY_TASK_ID inputs answer code state options=()
  [ "$index" -lt "$ORA_NUM_TASKS" ] || ora_fail "array task $index of ORA_NUM_TASKS=$ORA_NUM_TASKS: give --array=0-$((ORA_NUM_TASKS - 1))"
  read -r -a inputs <<<"$ORA_CORPUS"
  ora_python -m pretrain.job begin-tokenizing "$ORA_SHARDS" "$index" "$ORA_NUM_TASKS" >/dev/null || return
  code=1 # if it was asked to stop before it began
  [ "$ORA_CONTINUE$ORA_STOPPED" != 00 ] || {
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
