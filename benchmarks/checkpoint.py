"""Seconds that training waits for a checkpoint, synchronous and asynchronous, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoint --directory runs
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py --directory runs --deepspeed zero3

A real engine saves real checkpoints by the program's own code, in rounds: a save that training
waits for, then, after a step, one behind training, whose stall is the time until the next step may
begin. Steps follow until it is written: their time is set against that of steps beside no save, for
a thread that writes and hashes takes memory bandwidth and, where there is no idle core, a core.
Reported: medians over the rounds, and of the ratio within a round.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step.contenders import Layout, Shape, benchmark_config
from pretrain.checkpoint.checkpoints import Checkpoints, DeferredError
from pretrain.checkpoint.identity import bank_digests
from pretrain.config.resolved import resolve
from pretrain.model.build import token_losses
from pretrain.ranks.environment import LaunchEnvironment
from pretrain.ranks.groups import ParallelContext, initialize_distributed, shutdown_distributed
from pretrain.runs.position import Position
from pretrain.training.phase_engine import PhasedEngine

WARM_UP_ROUNDS = 1
WAITED, STALL = "a save that training waits for", "a save behind training: the stall"
PLAIN_STEPS = 3


def main() -> None:
    """Measure the rounds, and print medians on the first rank."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--directory", type=Path, default=Path(), help="on the file system to write to"
    )
    parser.add_argument("--rounds", type=int, default=9, help="that count")
    parser.add_argument(
        "--shape",
        type=Shape.parse,
        default="8x768x1x128",
        help="LAYERSxHIDDENxBATCHxLENGTH, heads of 64",
    )
    parser.add_argument("--deepspeed", default="zero1", help="as deepspeed.config")
    arguments = parser.parse_args()
    context = initialize_distributed(LaunchEnvironment.read(), 1, timeout_seconds=600)
    with own_directory(arguments.directory, context) as directory:
        bench = Bench(arguments.shape, arguments.deepspeed, directory, context)
        rounds = [bench.round() for _ in range(arguments.rounds + WARM_UP_ROUNDS)][WARM_UP_ROUNDS:]
        size = sum(
            file.stat().st_size for file in bench.checkpoints.run.checkpoint(bench.number).iterdir()
        )
        dist.barrier()  # all have counted
    if context.is_first:
        print(
            f"{size / 1e6:.0f} MB by {context.world_size} ranks on {context.device}, "
            f"{len(rounds)} rounds"
        )
        print_medians(rounds)
    shutdown_distributed(context)


@contextmanager
def own_directory(parent: Path, context: ParallelContext) -> Iterator[Path]:
    """Yield a new directory, the same for all ranks, that is removed at the end.

    Args:
        parent: where it is made; made too if it is not there.
        context: this rank; the first one makes and removes the directory.
    """
    made: list[Any] = [None]
    if context.is_first:
        parent.mkdir(parents=True, exist_ok=True)
        made = [tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=parent)]
    dist.broadcast_object_list(made, src=0)
    try:
        yield Path(made[0])
    finally:
        if context.is_first:
            shutil.rmtree(made[0], ignore_errors=True)


class Bench:
    """An engine, and the checkpoints of a run that it stands for."""

    def __init__(
        self, shape: Shape, deepspeed: str, directory: Path, context: ParallelContext
    ) -> None:
        settings = f"deepspeed.config={deepspeed} run.directory={directory}"
        layout = Layout(1, context.data_parallel_size)
        self.config = benchmark_config(shape, "orthogonal", layout, settings)
        self.context = context
        resolved = resolve(self.config, context.world_size)
        self.trainer = PhasedEngine(resolved, context)
        bank = bank_digests(self.trainer.engine.module, context)
        identity = {"keys": {}, "data": {}, "frozen_bank": {"recipe": None, "sha256": bank}}
        self.checkpoints = Checkpoints(
            resolved, context, identity, resumed=None, errors=DeferredError(context.device)
        )
        generator = torch.Generator().manual_seed(context.rank)
        size = (shape.batch, shape.length + 1)
        self.tokens = torch.randint(0, shape.vocabulary, size, generator=generator).to(
            context.device
        )
        self.number = 0

    def step(self) -> float:
        """Seconds of a training step."""
        started = time.perf_counter()
        self.trainer.engine.backward(token_losses(self.trainer.engine, self.tokens).mean())
        self.trainer.update.make(allowed=torch.tensor(True, device=self.context.device))
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def save(self, behind: bool) -> float:
        """Seconds until training may go on."""
        dist.barrier()
        self.number += 1
        started = time.perf_counter()
        self.checkpoints.save(self.trainer.engine, Position(step=self.number), behind)
        self.checkpoints.commit(good=True)
        return time.perf_counter() - started

    def round(self) -> dict[str, float]:
        plain = [self.step() for _ in range(PLAIN_STEPS)]
        synchronous = self.save(behind=False)
        self.step()
        stall = self.save(behind=True)
        beside = [self.step()]
        own = self.checkpoints.run.checkpoint(self.number)
        while not self.checkpoints.has_failed() and self.context.world_size == 1:
            if self.checkpoints.newest() == own:  # it is written
                break
            beside.append(self.step())
        self.checkpoints.wait()
        written = self.checkpoints.take_written()
        assert written is not None
        return {
            WAITED: synchronous,
            STALL: stall,
            "a save behind training: written after": written.write,
            "a step": statistics.median(plain),
            "a step beside a save": statistics.median(beside),
        }


def print_medians(rounds: list[dict[str, float]]) -> None:
    """Print the median of every number, and of the ratio within a round, with its quartiles."""
    for what in rounds[0]:
        print(f"{what:42}{statistics.median(each[what] for each in rounds):9.3f} s")
    ratios = [each[STALL] / each[WAITED] for each in rounds]
    ratios = ratios if len(ratios) > 1 else 2 * ratios  # quartiles need two
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    print(f"{'stall / the save that is waited for':42}{median:9.1%}   ({low:.1%} – {high:.1%})")


if __name__ == "__main__":
    main()
