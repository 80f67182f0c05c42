"""Packages of the extra `compare`: importing this module without them raises UserError.

Modules of studies that need them import this one first. It is not in `__init__`, because `sweep`
seals hypotheses without them.
"""

from importlib.util import find_spec

from data_pipeline.errors import how_to_install
from pretrain.errors import UserError

for _package in ("matplotlib", "scipy"):
    if find_spec(_package) is None:
        raise UserError(
            f"compare and evaluate need the package {_package}, which is not installed: "
            f"{how_to_install('compare')}"
        )
