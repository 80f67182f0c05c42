#!/usr/bin/env bash
# Copy the code of this checkout into slurm/code, unless this state of it is there already, and print the copy's path. Jobs
# run the copy, so nothing that is edited or pulled later reaches them or their restarts. slurm/submit.py calls this for
# the whole chain. With sbatch alone the first start of each job does, unless you pin when you submit:
#   export ORA_CODE=$(bash slurm/pin.sh)
#
#   pin.sh          print the copy's path
#   pin.sh JOB_ID   link to it as slurm/code/job-JOB_ID too, for the job's restarts
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# = 0 ] || [ -n "$1" ] || { # no job, of which the script will complain
  echo "$PWD"
  exit
}
new=slurm/code/new-$(uname -n)-$$
trap 'rm -rf "$new"' EXIT
mkdir -p "$new" || {
  echo "error: $PWD/slurm/code cannot be written: work in a clone of your own, or set ORA_CODE=$PWD to run the checkout itself" >&2
  exit 2
}
# What a run records as its commit; + stands for uncommitted changes.
git describe --always --abbrev=40 --dirty=+ '--exclude=*' >"$new/git_commit" 2>/dev/null || :
find pretrain laboratory megatron_patches data_pipeline ds_configs slurm/*.py slurm/*.sh -type f ! -name '*.pyc' ! -name site.sh -print0 |
  tar --create --null --files-from=- | tar --extract --directory="$new"
digest=$(cd "$new" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
code=slurm/code/$digest
# Another may have made it meanwhile, and files as equal as their digest.
[ -d "$code" ] || mv --no-target-directory "$new" "$code" 2>/dev/null || [ -d "$code" ]
[ $# = 0 ] || ln --symbolic --force --no-dereference "$digest" "slurm/code/job-$1"
echo "$PWD/$code"
