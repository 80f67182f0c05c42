"""What freezing Q and K does to the time of a training step, measured side by side in one process.

    python benchmarks/step_time.py [--steps 40] [--json FILE]

Three real DeepSpeed engines (vanilla, orthogonal, and vanilla again as the control that shows the noise) take
turns on the same tokens, in an order that rotates every round. Reported: the median over rounds of (step time
/ vanilla's step time of the same round) and its quartiles, beside the share of FLOPs that theory says is
saved. One rank, fp32 on the CPU or bf16 on a GPU. For a steady CPU number set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from megatron_patches.compat import silence_expected_warnings

silence_expected_warnings()

import torch  # noqa: E402

from megatron_patches.policy import VARIANTS  # noqa: E402
from pretrain.config.counting import count_attention, executed_flops_per_token, model_flops_per_token  # noqa: E402
from pretrain.config.load import parse_config  # noqa: E402
from pretrain.config.tree import Config  # noqa: E402
from pretrain.model.build import token_losses  # noqa: E402
from pretrain.ranks.groups import LaunchEnvironment, initialize_distributed, shutdown_distributed  # noqa: E402
from pretrain.training.engines import Trainer  # noqa: E402

CONTENDERS = {"vanilla": "vanilla", "orthogonal": "orthogonal", "vanilla again": "vanilla"}
WARM_UP_ROUNDS = 3


def benchmark_config(variant: str) -> Config:
    """Four layers of hidden size 512 at length 256: large enough that matrix products dominate."""
    return parse_config(
        {
            "run": {"name": variant},
            "model": {
                "num_layers": 4,
                "hidden_size": 512,
                "num_attention_heads": 8,
                "vocab_size": 2048,
                "position_embedding": "rope",
                "dropout": 0.0,
            },
            "attention": {"variant": variant},
            "optimizer": {"learning_rate": 1e-4},
            "schedule": {"steps": 1000, "kind": "constant", "warmup_steps": 0},
            "data": {
                "directory": "none",
                "sequence_length": 256,
                "micro_batch_size": 4,
                "global_batch_size": 4,
                "validate_every": 0,
                "validation_samples": 1,
            },
            "precision": {"dtype": "bf16" if torch.cuda.is_available() else "fp32"},
            "checkpoint": {"every": 0},
        }
    )


def one_step(engine: Any, tokens: torch.Tensor) -> float:
    """Seconds of one forward, backward and update."""
    _synchronize()
    started = time.perf_counter()
    engine.backward(token_losses(engine, tokens).mean())
    engine.step()
    _synchronize()
    return time.perf_counter() - started


def measure(engines: dict[str, Any], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Step times of every engine, round by round; the starting engine rotates."""
    generator = torch.Generator().manual_seed(0)
    names = list(engines)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(rounds + WARM_UP_ROUNDS):
        tokens = torch.randint(0, 2048, (4, 257), generator=generator).to(device)
        for offset in range(len(names)):
            name = names[(round_number + offset) % len(names)]
            seconds = one_step(engines[name], tokens)
            if round_number >= WARM_UP_ROUNDS:
                times[name].append(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="rounds that count")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    context = initialize_distributed(LaunchEnvironment.read(), 1, timeout_seconds=60)
    engines = {name: Trainer(benchmark_config(v), context, 0).engine for name, v in CONTENDERS.items()}
    times = measure(engines, arguments.steps, context.device)
    shape = benchmark_config("vanilla").shape()
    saved = 1 - executed_flops_per_token(
        shape, count_attention(shape, VARIANTS["orthogonal"])
    ) / model_flops_per_token(shape)
    report: dict[str, Any] = {
        "device": str(context.device),
        "rounds": arguments.steps,
        "flops_saved": saved,
        "ratio": {},
    }
    print(
        f"{arguments.steps} rounds on {context.device}; theory: orthogonal executes {saved:.1%} fewer FLOPs"
    )
    print(f"{'step time / vanilla':24}{'median':>9}{'quartiles':>18}")
    for name in list(CONTENDERS)[1:]:
        ratios = [mine / base for mine, base in zip(times[name], times["vanilla"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        report["ratio"][name] = {"median": median, "quartiles": [low, high]}
        print(f"{name:24}{median:9.3f}{f'{low:.3f} – {high:.3f}':>18}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    shutdown_distributed(context)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
