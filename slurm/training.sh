# shellcheck shell=bash
# What the job scripts that train share: one segment of a run, with its preflight and its decision. Sourced after lib.sh,
# whose head lists the settings.

ORA_END_WORDS=(--kill-on-bad-exit=1 --wait=60) # a rank that fails ends the others

# ora_overrides WORD…: ORA_OVERRIDE_WORDS, of settings and the script's arguments; the later wins.
ora_overrides() {
  local words
  read -r -a words <<<"${ORA_OVERRIDES:-}"
  # fall_back first, so that others win: nobody is there at night to set it, and the run says what it did.
  ORA_OVERRIDE_WORDS=(checkpoint.fall_back=true ${words[@]+"${words[@]}"} "$@")
  [ -z "${ORA_TIMEOUT_SECONDS:-}" ] ||
    ORA_OVERRIDE_WORDS=("parallel.timeout_seconds=$ORA_TIMEOUT_SECONDS" ${ORA_OVERRIDE_WORDS[@]+"${ORA_OVERRIDE_WORDS[@]}"})
}

# ora_pretrain CONFIG [section.key=value]…: one segment of one run. 0: the run is finished; else it stays as it is, or the job
# is requeued, which ends the script.
ora_pretrain() {
  local answer verdict run logs code ORA_USED_NODES ORA_USED_PER_NODE
  answer=$(ora_python -m pretrain.job begin-training --nodes "$SLURM_JOB_NUM_NODES" \
    --ranks-per-node "$ORA_RANKS_PER_NODE" -- "$@") || return
  read -r verdict ORA_USED_NODES ORA_USED_PER_NODE run logs <<<"$answer"
  [ "$verdict" = run ] || return 0
  ora_say "run $run, $((ORA_USED_NODES * ORA_USED_PER_NODE)) ranks, logs in $logs"
  ora_meeting_point
  ora_doctor "$run" "$logs" "$@"
  code=$?
  if [ "$code" = 0 ] && ! ora_asked_to_end; then
    # What all ranks refuse alike they also write there: which exit code srun returns is a race among them.
    ORA_REFUSAL=$logs/refused ora_ranks "$logs/rank_%3t-%N.log" -m pretrain train "$@"
    code=$?
    # Not by rank 0: srun ends all ranks a minute after the first has ended, and an export takes longer.
    [ "$code" != 0 ] || ora_python -m pretrain.job export-at-end "$run"
  fi
  ora_after "$run" "$code"
}

# Ranks per node, as many as there may be, and threads per rank. The shipped scripts leave --ntasks-per-node out: a job that
# has it, and a range of nodes, wants as many nodes as it had when Slurm requeues it.
ora_shape() {
  local tasks=${SLURM_NTASKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
  ORA_RANKS_PER_NODE=${ORA_RANKS_PER_NODE:-${tasks%%(*}}
  export OMP_NUM_THREADS=${ORA_THREADS_PER_RANK:-${SLURM_CPUS_PER_TASK:-1}}
}

# Where the ranks meet: the head node's address as Slurm knows it, which also holds where names do not resolve.
ora_meeting_point() {
  local head address
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
  address=$(ora_scontrol show node -o "$head" | tr ' ' '\n' | sed -n 's/^NodeAddr=//p')
  export MASTER_ADDR=${address:-$head}
  # Below the ports that the system gives away; another one after a requeue, should something hold this one.
  export MASTER_PORT=$((10000 + (SLURM_JOB_ID + 7919 * ${SLURM_RESTART_COUNT:-0}) % 20000))
  if [ -n "${ORA_INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$ORA_INTERFACE NCCL_SOCKET_IFNAME=$ORA_INTERFACE
  fi
}

# ora_ranks LOG ARGUMENTS…: Python with ARGUMENTS on every rank that the run uses, one log each. A rank that fails ends the
# others.
ora_ranks() {
  local log=$1
  shift
  # From node 0 on, where the ranks meet, node after node whatever SLURM_DISTRIBUTION says: tensor-parallel ranks are
  # neighbours. A rank ignores SIGUSR1 until its own handler is in place: the shell passes it on again later.
  # shellcheck disable=SC2016
  srun --nodes="$ORA_USED_NODES" --relative=0 --distribution=block --ntasks="$((ORA_USED_NODES * ORA_USED_PER_NODE))" \
    --ntasks-per-node="$ORA_USED_PER_NODE" "${ORA_END_WORDS[@]}" --open-mode=append --output="$log" \
    ${ORA_SRUN_WORDS[@]+"${ORA_SRUN_WORDS[@]}"} \
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
  ora_stop_passing
  state=$(ora_job_field JobState) || state=UNKNOWN
  preempted=$(ora_job_field PreemptTime)
  [ "${preempted:-None}" = None ] || options+=(--preempted)
  [ "$ORA_CONTINUE" = 0 ] || options+=(--asked)
  answer=$(ora_python -m pretrain.job end-training "$1" --exit-code "$2" --job-state "$state" ${options[@]+"${options[@]}"}) ||
    ora_fail "no decision about $1: submit again to go on"
  ora_conclude "$answer"
}
