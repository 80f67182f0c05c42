"""Studies over seeds: what `compare`, `evaluate` and fine-tuning share.

seeds    groups of runs that are seeds of one another, and the group that each is compared with
gaps     gaps paired by seed: interval, tests, effect size, Holm's correction, and the scale of the values
tables   tables and sentences of gaps, with one policy for p values
cache    results on disk, found by what they were made of
models   identity of a model directory, and the refusal to run its code unasked
report   Markdown page, JSON, plots and terminal output of one study

Needs the packages of the extra `compare`: importing this package without them raises UserError.
"""

from importlib.util import find_spec

from pretrain.errors import UserError

for _package in ("matplotlib", "scipy"):
    if find_spec(_package) is None:
        raise UserError(
            f"compare and evaluate need the package {_package}, which is not installed: "
            "pip install 'ora-pretrain[compare]'"
        )
