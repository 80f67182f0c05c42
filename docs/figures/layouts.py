"""One training under eight layouts, one of them killed and resumed: docs/figures/layouts.json.

The demo's frozen model for 60 steps, by the real command, on the text that `make demo` gathers.
draw.py draws what it writes. About five minutes on two cores:

    python docs/figures/layouts.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STEPS, KILLED_AFTER = 60, 30
RATE = 3e-4
"""A tenth of the demo's, with which the loss jumps near step 20 and rounding grows to 0.9 nats."""
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 rank": (1, ("parallel.tensor_model_parallel_size=1",)),
    "TP 2": (2, ()),
    "TP 2, sequence parallel": (2, ("parallel.sequence_parallel=true",)),
    "DP 2, ZeRO-1": (2, ("parallel.tensor_model_parallel_size=1", "deepspeed.config=zero1")),
    "DP 2, ZeRO-2": (2, ("parallel.tensor_model_parallel_size=1", "deepspeed.config=zero2")),
    "DP 2, ZeRO-3": (2, ("parallel.tensor_model_parallel_size=1", "deepspeed.config=zero3")),
    "TP 2 × DP 2, ZeRO-3, sequence parallel": (
        4,
        ("parallel.sequence_parallel=true", "deepspeed.config=zero3"),
    ),
    "TP 2 × DP 2, ZeRO-1, killed and resumed": (4, ("deepspeed.config=zero1",)),
}
"""{name: (ranks, settings)}; data-parallel ranks are those that tensor parallelism leaves."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", default="demo/shards", help="what `make demo` has made")
    parser.add_argument("--runs", type=Path, default=Path("demo/layouts"), help="where the runs go")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("layouts.json"))
    options = parser.parse_args()
    curves = {}
    for name, (ranks, settings) in LAYOUTS.items():
        run = options.runs / name.replace(" × ", "x").replace(", ", "-").replace(" ", "_")
        command = [sys.executable, "-m", "pretrain", "train", "demo", f"--local-ranks={ranks}"]
        command += [
            f"run.directory={run.parent}",
            f"run.name={run.name}",
            f"data.directory={options.data}",
        ]
        command += [
            f"schedule.steps={STEPS}",
            f"optimizer.learning_rate={RATE}",
            "checkpoint.every=20",
        ]
        command += settings
        print(f"{name}: {run}", flush=True)
        if "killed" in name:
            kill_after(command, run / "metrics.jsonl", KILLED_AFTER)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
        curves[name] = losses(run / "metrics.jsonl")
    options.out.write_text(
        json.dumps({"killed_after": KILLED_AFTER, "losses": curves}, indent=1) + "\n"
    )
    print(f"largest spread of a step: {spread(list(curves.values())):.1e} nats")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def kill_after(command: Sequence[str], metrics: Path, step: int) -> None:
    """Start a training and SIGKILL it at `step` unless it is past; the kernel ends its ranks."""
    if metrics.is_file() and len(losses(metrics)) >= step:
        return
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
    while not (metrics.is_file() and len(losses(metrics)) >= step):
        assert training.poll() is None, f"the training ended before step {step}"
        time.sleep(0.05)
    training.kill()
    training.wait()
    time.sleep(2)  # until the ranks are gone


def losses(metrics: Path) -> list[float]:
    """Return the training loss of each step in metrics.jsonl, without a torn last line."""
    return [json.loads(line)["loss/train"] for line in metrics.read_text().split("\n")[:-1]]


def spread(curves: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of two curves at one step."""
    return max(max(step) - min(step) for step in zip(*curves, strict=True))


if __name__ == "__main__":
    main()
