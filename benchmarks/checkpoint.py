"""Seconds that training waits for a checkpoint, synchronous and in the background, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoint --directory runs
    torchrun --nproc-per-node 2 -m benchmarks.checkpoint --directory runs --deepspeed zero3

A real engine saves real checkpoints by the program's own code, in rounds: a step, a save that
training waits for, then one in the background, whose stall is the time until the next step may
begin, and that step beside it: a thread that writes and hashes takes memory bandwidth and, where
there is no idle core, a core.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.rounds import Seconds, options_parser, report
from benchmarks.step.contenders import Layout, Shape, benchmark_config
from pretrain.checkpoint.checkpoints import Checkpoints
from pretrain.checkpoint.deferred_error import DeferredError
from pretrain.checkpoint.identity import bank_digests
from pretrain.config.resolved import resolve
from pretrain.model.build import token_losses
from pretrain.ranks.environment import LaunchEnvironment
from pretrain.ranks.groups import ParallelContext, initialize_distributed, shutdown_distributed
from pretrain.runs.position import Position
from pretrain.training.phase_engine import PhasedEngine


def main() -> None:
    """Measure the rounds, and print medians on the first rank."""
    parser = options_parser(__doc__, rounds=9)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the file system to use")
    shape = "LAYERSxHIDDENxBATCHxLENGTH, heads of 64"
    parser.add_argument("--shape", type=Shape.parse, default="8x768x1x128", help=shape)
    parser.add_argument("--deepspeed", default="zero1", help="as deepspeed.config")
    options = parser.parse_args()
    context = initialize_distributed(LaunchEnvironment.read(), 1, timeout_seconds=600)
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.directory) as directory:
        folders = [directory]
        # Every rank made a directory of its own; all save into the one of rank 0.
        dist.broadcast_object_list(folders, src=0)
        settings = f"deepspeed.config={options.deepspeed} run.directory={folders[0]}"
        seconds = measure(options.shape, settings, options.rounds, context)
        dist.barrier()  # nobody writes any more
    if context.is_first:
        report(seconds, options.json)
    shutdown_distributed(context)


def measure(shape: Shape, settings: str, rounds: int, context: ParallelContext) -> Seconds:
    """Return the seconds of steps and saves, round by round, after one that does not count.

    Args:
        shape: Shape of the model and of a rank's batch.
        settings: Overrides of the engine's configuration, separated by spaces.
        rounds: Number of rounds that count.
        context: This rank.
    """
    config = benchmark_config(shape, "orthogonal", Layout(1, context.data_parallel_size), settings)
    resolved = resolve(config, context.world_size)
    trainer = PhasedEngine(resolved, context)
    bank = bank_digests(trainer.engine.module, context)
    # Stands in for a run's identity, of which only the bank's digests are real.
    identity = {"keys": {}, "data": {}, "frozen_bank": {"recipe": None, "sha256": bank}}
    errors = DeferredError(context.device)
    checkpoints = Checkpoints(resolved, context, identity, resumed=None, errors=errors)
    generator = torch.Generator().manual_seed(context.rank)
    size = (shape.batch, shape.length + 1)
    tokens = torch.randint(0, shape.vocabulary, size, generator=generator).to(context.device)

    def step() -> None:
        trainer.engine.backward(token_losses(trainer.engine, tokens).mean())
        trainer.update.make(allowed=torch.tensor(True, device=context.device))
        if context.device.type == "cuda":
            torch.cuda.synchronize()

    def save(number: int, behind: bool) -> None:
        checkpoints.save(trainer.engine, Position(step=number), behind)
        checkpoints.commit(good=True)

    def timed(action: Callable[[], None]) -> float:
        dist.barrier()
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    names = ("save: waited for", "save: the stall of one in the background")
    names += ("step: alone", "step: beside a save")
    seconds: Seconds = {name: [] for name in names}
    for number in range(rounds + 1):
        alone = timed(step)
        waited = timed(lambda number=number: save(2 * number + 1, behind=False))
        step()
        stall = timed(lambda number=number: save(2 * number + 2, behind=True))
        beside = timed(step)
        # The next round must not begin beside a save that is still writing.
        checkpoints.wait()
        checkpoints.take_written()
        if number:
            for name, value in zip(names, (waited, stall, alone, beside), strict=True):
                seconds[name].append(value)
    return seconds


if __name__ == "__main__":
    main()
