"""Host waits and copies of a training step on a GPU, counted without one.

    make gpu-dry                                 # or: python -m benchmarks.gpu_dry [DESIGN …]

The program's own training step runs on pretended CUDA tensors (`pretended`), `large` cut to two
layers, in bf16, without dropout, in eager mode. Rank 0 alone runs, and its collectives leave
everything as it is. Every count has a bound, and one above it is an error: a step has come to ask
for more. Where a count has sunk, lower its bound.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu-dry"
KINDS = ("host wait", "copy", "copied MB", "mixed", "pageable")
"""Columns of the table.

`host wait` has the one at the end, where the loop reads its numbers; `copy` those of 1 MiB or more;
`mixed` operations on tensors of two devices; `pageable` copies from memory that is not pinned.
"""
MICRO_BATCHES, SAMPLES = 2, 25
MARK = "counted: "


@dataclass(frozen=True)
class Design:
    """A variant and its layout, and the largest count of each of KINDS."""

    variant: str
    bounds: tuple[int, ...]
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    stage: int = 1
    settings: tuple[str, ...] = ()
    """Further overrides of `large`."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of `large`."""
        return [
            "model.num_layers=2",
            f"attention.variant={self.variant}",
            f"deepspeed.config=zero{self.stage}",
            f"parallel.tensor_model_parallel_size={self.tensor_parallel_size}",
            f"parallel.sequence_parallel={self.tensor_parallel_size > 1}",
            f"data.micro_batch_size={SAMPLES}",
            f"data.global_batch_size={MICRO_BATCHES * SAMPLES * self.data_parallel_size}",
            "model.dropout=0",
            "performance.compile=none",
            *self.settings,
        ]


DESIGNS = {
    "orthogonal": Design("orthogonal", (1, 105, 3647, 0, 0)),
    "tp2": Design("orthogonal", (1, 59, 1877, 0, 0), tensor_parallel_size=2),
    "dp8_zero3": Design("orthogonal", (31, 162, 4361, 0, 0), data_parallel_size=8, stage=3),
    "modern": Design(
        "orthogonal",
        (1, 105, 3647, 0, 0),
        settings=(
            "model.norm=rmsnorm",
            "model.mlp=swiglu",
            "model.ffn_hidden_size=2816",
            "model.qk_norm=true",
            "model.position_embedding=rope",
        ),
    ),
}


def main() -> int:
    """Count the named designs, or all of them; return 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_dry")
    parser.add_argument("names", nargs="*", choices=[*DESIGNS, []], metavar="DESIGN")
    places_help = "print what each count consists of"
    parser.add_argument("--places", action="store_true", help=places_help)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        tell(DESIGNS[options.names[0]])
    passed = []
    print("| design | " + " | ".join(KINDS) + " |\n|---|" + "---:|" * len(KINDS))
    for name in options.names or DESIGNS:
        counts, places = counted_apart(name)
        print(f"| {name} | " + " | ".join(map(str, counts)) + " |", flush=True)
        if options.places:
            print(*places, sep="\n")
        for kind, number, bound in zip(KINDS, counts, DESIGNS[name].bounds, strict=True):
            if number > bound:
                passed.append(f"{name}: {kind} {number}, at most {bound}")
    print(*passed, sep="\n", file=sys.stderr)
    return 1 if passed else 0


def counted_apart(name: str) -> tuple[list[int], list[str]]:
    """Count a step of a design in a process of its own, where CUDA is pretended.

    Returns:
        Numbers by KINDS, and lines on where they come from.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_dry", name, "--in-this-process"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    lines = done.stdout.splitlines()  # the others are DeepSpeed's
    (counted,) = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    counts, places = json.loads(counted)
    return counts, places


def tell(design: Design) -> NoReturn:
    """Print the costs of a step for `counted_apart`, and end the process."""
    load_guard()
    from benchmarks.gpu_dry.pretended import PretendedGpu

    with PretendedGpu() as gpu:
        context = pretend_ranks(design)
        put_in_place(gpu)
        _fuse_rms_norm()
        _run_steps(gpu, context, design)
        counts = [round(gpu.costs.total(kind)) for kind in KINDS]
        places = [
            f"  {kind}: {times:.0f} {cause}"
            for (kind, cause), times in sorted(gpu.costs.found.items())
        ]
    print(f"\n{MARK}{json.dumps([counts, places])}", flush=True)
    os._exit(0)  # no library may tidy up what was never there


def _fuse_rms_norm() -> None:
    """Count torch's RMS norm as LayerNorm without a bias: on a GPU both are one kernel.

    A torch built without CUDA has no such kernel, and would count the operations that it is made
    of. torch.compile takes it apart on every device.
    """
    from torch.nn import functional

    def rms_norm(vectors: Any, shape: Any, weight: Any, eps: float) -> Any:
        return functional.layer_norm(vectors, shape, weight, eps=eps)

    replaced: Any = functional
    replaced.rms_norm = rms_norm


def load_guard() -> None:
    """Compile the device guard, once, and load it before torch is imported."""
    spec = importlib.util.find_spec("torch")
    # torch looks for devices once, when it is imported, so the guard has to be there before.
    assert spec is not None and spec.origin is not None and "torch" not in sys.modules
    folder = Path(spec.origin).parent
    source = Path(__file__).with_name("cuda_guard.cpp")
    made_of = f"{version('torch')} {sys.version} {zlib.crc32(source.read_bytes())}".encode()
    library = BUILD / f"cuda_guard-{zlib.crc32(made_of):08x}.so"
    includes = [f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}"]
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: another process must never load half a library.
        unfinished = library.with_suffix(f".{os.getpid()}")
        options = ["-shared", "-fPIC", "-std=c++20", "-O1", *includes]
        command = [os.environ.get("CXX", "g++"), str(source), *options, "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.rename(library)
    for path in (folder / "lib/libc10.so", folder / "lib/libtorch_cpu.so", library):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def pretend_ranks(design: Design) -> Any:
    """Return the context of rank 0 among pretended ranks; DeepSpeed gets the pretended device."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # while it is imported
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    import deepspeed.accelerator.real_accelerator as accelerators
    import torch.distributed as dist
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_patches.engine.compat import prepare_imports
    from pretrain.ranks.environment import LaunchEnvironment
    from pretrain.ranks.groups import initialize_distributed

    prepare_imports()
    # DeepSpeed would look for a real device; it gets the pretended one after its import.
    accelerators.ds_accelerator = CUDA_Accelerator()
    dist.init_process_group("fake", rank=0, world_size=design.world_size, store=FakeStore())
    launch = LaunchEnvironment(0, 0, design.world_size)
    return initialize_distributed(launch, design.tensor_parallel_size, timeout_seconds=600)


def _run_steps(gpu: Any, context: Any, design: Design) -> None:
    """Run two steps and leave the costs of the second in `gpu.costs`."""
    import torch

    from pretrain.config.load import load_config
    from pretrain.config.resolved import resolve
    from pretrain.runs.position import Position
    from pretrain.training import loop
    from pretrain.training.phase_engine import PhasedEngine

    config = load_config("large", design.overrides)
    phased = PhasedEngine(resolve(config, context.world_size), context)
    shape = (MICRO_BATCHES, SAMPLES, config.data.sequence_length + 1)
    run: Any = SimpleNamespace(
        config=config,
        context=context,
        phased=phased,
        engine=phased.engine,
        watch=SimpleNamespace(at=lambda what: None),
        data=SimpleNamespace(boundary=None),
        has_error=lambda: False,
        batches=SimpleNamespace(
            at=lambda first: torch.zeros(shape, dtype=torch.int64).pin_memory(),
            read=lambda first: None,
        ),
    )
    signals: Any = SimpleNamespace(stop=False, continue_later=False)
    # The first step also allocates the optimizer's state, which no later step does.
    for _ in range(2):
        gpu.costs.found.clear()
        loop.train_step(run, Position(), signals)


def put_in_place(gpu: Any) -> None:
    """Replace what needs a real GPU or other ranks: building, attention kernels, comparisons.

    ZeRO-3 compares its order of layers with rank 0's while it learns it: a wait, and rank 0's is
    this one.

    Attention is torch's flash kernel, in fp32 its memory-efficient one, as on a GPU: there torch
    chooses by the card.
    """
    import torch
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from megatron.core.tensor_parallel import random
    from torch.utils._python_dispatch import _disable_current_modes

    from benchmarks.gpu_dry.pretended import answering
    from megatron_patches.attention import scores
    from pretrain.model.build import build_model
    from pretrain.training import engine, phase_engine

    def build(config: Any, context: Any, phase: int) -> Any:
        model: Any
        with _disable_current_modes(), patch.object(torch.cuda, "current_device", lambda: "cpu"):
            model = build_model(config, replace(context, device=torch.device("cpu")), phase)
        gpu.move(model)
        model.to = model.bfloat16 = answering(model)  # DeepSpeed's engine asks for what is done
        return model

    def flash(
        query: Any, key: Any, value: Any, dropout_p: float, scale: float, **settings: Any
    ) -> Any:
        assert settings["is_causal"]
        aten = torch.ops.aten
        common: Any = {"dropout_p": dropout_p, "is_causal": True, "scale": scale}
        if query.dtype == torch.bfloat16:
            return aten._scaled_dot_product_flash_attention(query, key, value, **common)[0]
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_bias=None, compute_log_sumexp=True, **common)[0]

    def compared_orders(ints: Any) -> None:
        gpu.costs.add("host wait", "rank 0's order", times=2)

    def rng_state(**asked: Any) -> Any:
        return torch.cuda.get_rng_state()

    replaced: Any = phase_engine
    replaced.build_model = build
    replaced = partitioned_param_coordinator
    replaced.assert_ints_same_as_other_ranks = compared_orders
    replaced = engine
    replaced.audit = answering({})
    replaced = random
    replaced._get_cuda_rng_state = rng_state
    replaced._set_cuda_rng_state = answering(None)
    replaced = scores
    replaced.scaled_dot_product_attention = flash


if __name__ == "__main__":
    sys.exit(main())
