"""Run a function on several real processes (gloo ranks) and get rank 0's answer back.

    answer = run_ranks(4, "tests.distributed.parity_worker:losses", {"layouts": [...]})

The processes are started by the product's own launcher in a child of the test: when the test times out or is
killed, the kernel takes the ranks with it. Also usable by hand: `python -m tests.ranks 2 module:function
'{"key": 1}'`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run_ranks(ranks: int, target: str, payload: dict[str, Any], timeout: float = 500) -> Any:
    """Call `module:function(payload)` on `ranks` processes; returns what rank 0 returned (JSON types)."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", "tests.ranks", str(ranks), target, json.dumps(payload), str(result)]
        process = subprocess.run(
            command, cwd=ROOT, env=rank_environment(), capture_output=True, text=True, timeout=timeout
        )
        assert process.returncode == 0, (
            f"{target} on {ranks} ranks failed:\n{process.stdout}\n{process.stderr}"
        )
        return json.loads(result.read_text())


def rank_environment() -> dict[str, str]:
    """One thread a rank, and no launcher's variables inherited from outside."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TORCHELASTIC"))
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    return inherited | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _main() -> None:
    if len(sys.argv) == 5:
        ranks, target, payload, result = sys.argv[1:]
        from pretrain.ranks.launch import launch_local_ranks

        command = [sys.executable, "-m", "tests.ranks", target, payload, result]
        sys.exit(launch_local_ranks(command, int(ranks)))
    target, payload, result = sys.argv[1:]
    module, function = target.split(":")
    import torch.distributed as dist

    from megatron_patches.compat import silence_expected_warnings

    silence_expected_warnings()
    dist.init_process_group(
        "gloo", timeout=timedelta(seconds=300)
    )  # once, for all the runs that the function makes
    answer = getattr(importlib.import_module(module), function)(json.loads(payload))
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":
    _main()
