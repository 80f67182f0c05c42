# shellcheck shell=bash
# What every job script of this directory shares. Sourced, never run; decisions are Python's (pretrain/segments.py).
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
