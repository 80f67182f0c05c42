"""Layers of every kind of attention, compiled: graph breaks, and the difference from eager layers.

    python -m benchmarks.gpu.compile --seconds 50 --json compile.json

A stage of benchmarks.gpu.check. bf16 and inductor on a GPU; fp32 on the CPU, where the graphs run with
torch's own kernels.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path
from typing import Any

from megatron_patches.engine.compat import silence_expected_warnings

silence_expected_warnings()

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from benchmarks.gpu.trainings import MAIN_VARIANTS  # noqa: E402
from megatron_patches.bank.monarch_kernel import Tile  # noqa: E402
from megatron_patches.model.auxiliary_losses import take_auxiliary_losses  # noqa: E402
from megatron_patches.recipe.policy import VARIANTS  # noqa: E402
from pretrain.config.load import load_config  # noqa: E402
from pretrain.config.tree import Config  # noqa: E402
from pretrain.model.build import build_model, compile_layers, token_losses  # noqa: E402
from pretrain.model.structured_products import StructuredProducts, use_structured_products  # noqa: E402
from pretrain.ranks.environment import LaunchEnvironment  # noqa: E402
from pretrain.ranks.groups import (  # noqa: E402
    ParallelContext,
    initialize_distributed,
    set_seeds,
    shutdown_distributed,
)

BY_KERNEL = "monarch by the kernel"
"""Whatever a measurement would choose; without a GPU by the operator's own products."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, required=True, help="after which nothing new begins")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=[*MAIN_VARIANTS, *VARIANTS, BY_KERNEL])
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    context = initialize_distributed(LaunchEnvironment(0, 0, 1), 1, timeout_seconds=600)
    found: dict[str, Any] = {"variants": {}, "failed": {}, "left_out": []}
    for variant in dict.fromkeys(arguments.variants):
        for dropout in (0.0, 0.1) if variant in MAIN_VARIANTS else (0.0,):
            name = f"{variant}, dropout {dropout:g}"
            if time.monotonic() > until:
                found["left_out"].append(name)
                continue
            try:
                found["variants"][name] = compare(variant, dropout, context)
            except Exception:
                found["failed"][name] = traceback.format_exc(limit=-12)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
            print(name, found["variants"].get(name, "failed"), flush=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    shutdown_distributed(context)


def compare(variant: str, dropout: float, context: ParallelContext) -> dict[str, float]:
    """Run one micro batch forward and backward, eager and compiled.

    Returns:
        graphs, breaks, seconds of the first compiled pass; without dropout also how far loss and gradients
        are apart, in units of the loss and of the largest entry of each gradient.
    """
    torch._dynamo.reset()
    counters.clear()
    config = config_of(variant.removesuffix(" by the kernel"), dropout, context.device)
    products = StructuredProducts(Tile() if variant == BY_KERNEL else None, "for this check")
    eager = one_pass(config, context, products, compiled=False)
    started = time.perf_counter()
    compiled = one_pass(config, context, products, compiled=True)
    found: dict[str, float] = {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "seconds": time.perf_counter() - started,
        "finite": all(bool(tensor.isfinite().all()) for tensor in compiled.values()),
    }
    if not dropout:
        apart = {
            name: ((tensor - eager[name]).abs().max() / eager[name].abs().max().clamp(min=1e-12)).item()
            for name, tensor in compiled.items()
            if tensor.numel()
        }
        found["loss"] = apart.pop("loss")
        found["gradients"] = max(apart.values())
    return found


def config_of(variant: str, dropout: float, device: torch.device) -> Config:
    """The demo's model, in the precision of the device."""
    on_gpu = device.type == "cuda"
    return load_config(
        "demo",
        [
            f"attention.variant={variant}",
            f"model.dropout={dropout}",
            "parallel.tensor_model_parallel_size=1",
            f"precision.dtype={'bf16' if on_gpu else 'fp32'}",
            f"model.num_layers={4 if on_gpu else 2}",
        ],
    )


def one_pass(
    config: Config, context: ParallelContext, products: StructuredProducts, compiled: bool
) -> dict[str, torch.Tensor]:
    """Mean loss and all gradients, in fp32."""
    model = build_model(config, context)
    use_structured_products(model, products)
    if compiled:
        compile_layers(model, "inductor" if context.device.type == "cuda" else "aot_eager")
    set_seeds(config.run.seed, 1, 0, 0)
    generator = torch.Generator().manual_seed(7)
    size = (config.data.micro_batch_size, config.data.sequence_length + 1)
    tokens = torch.randint(config.model.vocab_size, size, generator=generator).to(context.device)
    loss = token_losses(model, tokens).mean()
    sum(take_auxiliary_losses(model).values(), loss).backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().float(), **gradients}


if __name__ == "__main__":
    main()
