"""The cost of a training step, measured side by side: the arbiter of claims about speed.

    OMP_NUM_THREADS=1 python -m benchmarks.step.measure --steps 40 --shape 4x512x4x256 --json FILE
    python -m benchmarks.step.measure --ranks 2 --tensor-parallel 2
        --settings "" deepspeed.config=zero1
    OMP_NUM_THREADS=1 python -m benchmarks.step.measure --recipe modern --clock wall
        --contenders plain vanilla orthogonal monarch_shared_conv

Real DeepSpeed engines (vanilla and orthogonal, each again as the control that shows the noise) and
the same vanilla model in plain PyTorch (plain_gpt.py; of several ranks under DDP, `plain sharded`
under FSDP2: with tensor parallelism each has a part of the samples) take turns on the same tokens,
in an order that rotates every round. With several --settings there is an engine of every variant
for each. Reported: the median over rounds of (step time / the baseline's step time of the same
round) with its quartiles, the time of each part of a step, and the time in each class of kernel; on
GPUs also peak memory and MFU. fp32 on the CPU, bf16 on GPUs.

--recipe modern gives RMSNorm, SwiGLU, norms of queries and keys and untied embeddings to all, the
peer too; modern_muon gives Muon as well. The peer's is torch.optim.Muon, which takes whole matrices
of queries and keys where ours takes heads, and is in bf16 on any device (ours there: --settings
optimizer.muon.newton_schulz_dtype=bf16).

The clock on the CPU is this process's CPU time, which other work on the machine disturbs little;
--clock wall is for an idle machine, and for several ranks, who wait for each other.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.rounds import ratio
from benchmarks.step.contenders import (
    AGAIN,
    COMPILED,
    PEERS,
    RECIPES,
    SHARDED,
    Contender,
    Layout,
    Shape,
    batches,
    benchmark_config,
    build_contender,
    contender_name,
    take_turns,
    waiting,
)
from benchmarks.step.parts import PARTS, seconds_by_kernel, seconds_by_part
from megatron_patches.recipe.counting import executed_flops_per_token, model_flops_per_token
from megatron_patches.recipe.variants import ORDINARY, VARIANTS
from pretrain.ranks.devices import peak_flops
from pretrain.ranks.groups import (
    LaunchEnvironment,
    ParallelContext,
    agree,
    initialize_distributed,
    shutdown_distributed,
)
from pretrain.ranks.launch import launch_local_ranks

CONTENDERS = ("plain", "vanilla", "orthogonal", f"vanilla{AGAIN}", f"orthogonal{AGAIN}")
STRUCTURED = ("monarch", "monarch_shared_conv")
OPTIONAL = (*STRUCTURED, *(f"{name}{AGAIN}" for name in STRUCTURED), COMPILED, SHARDED)
PART_ROUNDS = 8
PROFILED_STEPS = 3
TO_BUILD = 0.7
"""Share of --seconds in which contenders are built; in the rest they are measured."""
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def main() -> None:
    """Build the contenders, measure them, and report on the first rank."""
    arguments = parse_arguments()
    launch = LaunchEnvironment.read()
    if arguments.ranks > 1 and launch.world_size == 1:
        command = [sys.executable, "-m", "benchmarks.step.measure", *sys.argv[1:]]
        sys.exit(launch_local_ranks(command, arguments.ranks))
    context = initialize_distributed(launch, arguments.tensor_parallel, timeout_seconds=600)
    layout = Layout(arguments.tensor_parallel, context.data_parallel_size)
    clock = arguments.clock or (
        "cpu" if context.device.type == "cpu" and launch.world_size == 1 else "wall"
    )
    contenders, peak_bytes, left_out = build_in_time(arguments, layout, context)
    batch = batches(arguments.shape, context)
    report = measure(
        contenders,
        batch,
        context=context,
        layout=layout,
        shape=arguments.shape,
        steps=arguments.steps,
        clock=clock,
    )
    report |= {"peak_bytes": peak_bytes, "left_out": left_out}
    keep = arguments.json if context.is_first else None
    write_report(report, keep)
    for name, contender in contenders.items():
        if AGAIN not in name:
            report["parts"][name] = seconds_by_part(
                contender, batch, PART_ROUNDS, CLOCKS[clock], wait=waiting(context)
            )
            report["kernels"][name] = seconds_by_kernel(contender, batch, PROFILED_STEPS)
            write_report(report, keep)
    if context.is_first:
        print_report(report)
    shutdown_distributed(context)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="rounds that count")
    shape = "LAYERSxHIDDENxBATCHxLENGTH, heads of 64; xVOCABULARY may follow (2048)"
    parser.add_argument("--shape", type=Shape.parse, default="4x512x4x256", help=shape)
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="gpt2", help="of all of them")
    parser.add_argument(
        "--contenders", nargs="+", choices=(*CONTENDERS, *OPTIONAL), default=list(CONTENDERS)
    )
    parser.add_argument("--ranks", type=int, default=1, help="started on this machine")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    settings = (
        "overrides of the engines' configuration, each a text like "
        '"deepspeed.config=zero1"; "": none'
    )
    parser.add_argument("--settings", nargs="+", default=[""], help=settings)
    parser.add_argument("--clock", choices=("cpu", "wall"))
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after most of which none is built"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.shape = replace(arguments.shape, recipe=arguments.recipe)
    return arguments


def build_in_time(
    arguments: argparse.Namespace, layout: Layout, context: ParallelContext
) -> tuple[dict[str, Contender], dict[str, int], list[str]]:
    """Build as many contenders as time allows; each takes one step, which allocates its memory.

    Returns:
        The contenders, the peak bytes of a GPU of each one's step beyond what was held before, and
            the names of those for which no time was left.
    """
    started = time.monotonic()
    contenders: dict[str, Contender] = {}
    peak_bytes: dict[str, int] = {}
    left_out: list[str] = []
    for kind in arguments.contenders:
        for settings in arguments.settings if kind not in PEERS else [""]:
            name = contender_name(kind, settings)
            # Ranks must leave out the same contenders, or the others would wait for ever.
            spent = agree([time.monotonic() - started], context.device)[0] / context.world_size
            if spent > TO_BUILD * arguments.seconds:
                left_out.append(name)
                continue
            held_bytes = start_of_peak()
            contenders[name] = build_contender(
                kind, settings, arguments.shape, layout=layout, context=context
            )
            take_first_step(name, contenders[name], batches(arguments.shape, context)())
            if torch.cuda.is_available():
                peak_bytes[name] = torch.cuda.max_memory_allocated() - held_bytes
            if context.is_first:
                print(f"{time.monotonic() - started:.0f} s: {name} is built", flush=True)
    return contenders, peak_bytes, left_out


def write_report(report: dict[str, Any], file: Path | None) -> None:
    """Write the report so far, if there is a file for it.

    Args:
        report: Report of `measure`.
        file: Path of --json; None on ranks other than the first.
    """
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")


def start_of_peak() -> int:
    """Reset the GPU's peak memory statistics and return the bytes in use."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def take_first_step(name: str, contender: Contender, tokens: torch.Tensor) -> None:
    """Take one step, which allocates all memory that later steps need.

    Args:
        tokens: `[batch, length + 1]`.

    Raises:
        RuntimeError: the loss is not finite.
    """
    loss = contender.forward(tokens)
    contender.backward(loss)
    contender.update()
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss of {name} is {loss.item()}")


def mfu(flops: float, seconds: float, context: ParallelContext) -> float | None:
    """Model FLOPs utilisation of a step, causal attention counted by half.

    Args:
        flops: FLOPs of a step on all ranks.
        seconds: Seconds of a step.

    Returns:
        None without a GPU whose peak is known.
    """
    if context.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name())
    return flops / seconds / (peak * context.world_size) if peak else None


def measure(
    contenders: dict[str, Contender],
    batch: Callable[[], torch.Tensor],
    *,
    context: ParallelContext,
    layout: Layout,
    shape: Shape,
    steps: int,
    clock: str,
) -> dict[str, Any]:
    """Let the contenders take turns.

    Args:
        contenders: Contenders by name.
        batch: Function that makes the tokens of a round, `[batch, length + 1]`.
        shape: Shape of the model and of a rank's batch.
        steps: Rounds that count.
        clock: `cpu` for this process's CPU time, else the time by the clock.

    Returns:
        The report: the machine and the layout, medians in seconds, MFU, ratios to the baselines,
            and places for the seconds by part and by kernel.
    """
    times = take_turns(contenders, batch, steps, CLOCKS[clock], wait=waiting(context))
    theory = benchmark_config(shape, ORDINARY, layout).shape
    full = model_flops_per_token(theory)
    step_flops = shape.batch * shape.length * layout.data_parallel * full
    variants = {name.partition(" ")[0] for name in contenders} & VARIANTS.keys()
    medians = {name: statistics.median(values) for name, values in times.items()}
    report: dict[str, Any] = {
        "shape": str(shape),
        "recipe": shape.recipe,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ranks": context.world_size,
        "tensor_parallel": layout.tensor_parallel,
        "zero_stage": {name: contender.zero_stage for name, contender in contenders.items()},
        "clock": clock,
        "rounds": steps,
        "flops_saved": {
            name: 1 - executed_flops_per_token(theory, VARIANTS[name]) / full
            for name in sorted(variants - {ORDINARY})
        },
        "seconds": medians,
        "mfu": {name: mfu(step_flops, seconds, context) for name, seconds in medians.items()},
        "ratio": {},
        "parts": {},
        "kernels": {},
    }
    first = next((name for name in times if name != "plain"), "plain")
    for base in ("plain", first):
        if base in times and len(times) > 1:
            compared = {name: values for name, values in times.items() if name != base}
            report["ratio"][base] = {
                name: ratio(values, times[base]) for name, values in compared.items()
            }
    return report


def print_report(report: dict[str, Any]) -> None:
    """Print the report of `measure`, with its `peak_bytes`, as tables."""
    ranks = f"{report['ranks']} rank{'s' if report['ranks'] > 1 else ''}"
    if report["ranks"] > 1:
        ranks += f" (tensor parallel {report['tensor_parallel']})"
    how = f"{report['rounds']} rounds, {report['clock']} clock"
    wide = max(24, *(len(name) + 2 for name in report["seconds"]))
    print(f"{report['shape']}, {report['recipe']}, on {report['device']}, {ranks}, {how}")
    for name, saved in report["flops_saved"].items():
        print(f"theory: {name} executes {saved:.1%} fewer FLOPs than {ORDINARY}")
    for base, ratios in report["ratio"].items():
        print(f"\n{f'step time / {base}':{wide}}{'median':>9}{'quartiles':>18}{'ms a step':>12}")
        for name, spread in ratios.items():
            quartiles = f"{spread['low']:.3f} – {spread['high']:.3f}"
            milliseconds = 1e3 * report["seconds"][name]
            print(f"{name:{wide}}{spread['median']:9.3f}{quartiles:>18}{milliseconds:12.1f}")
    print(f"\n{'ms by part':{wide}}" + "".join(f"{part:>12}" for part in PARTS))
    for name, parts in report["parts"].items():
        print(f"{name:{wide}}" + "".join(f"{1e3 * parts[part]:12.1f}" for part in PARTS))
    for name, peak in report["peak_bytes"].items():
        share = report["mfu"][name]
        print(
            f"{name:{wide}}{peak / 1e9:12.2f} GB" + ("" if share is None else f"{share:12.1%} MFU")
        )
    print("\nms by kernel, under the profiler")
    for name, kernels in report["kernels"].items():
        spent = ", ".join(f"{kernel} {1e3 * seconds:.1f}" for kernel, seconds in kernels.items())
        print(f"{name:{wide}}{spent}")


if __name__ == "__main__":
    main()
