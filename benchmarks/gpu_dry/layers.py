"""The memory traffic of a compiled layer, counted without a GPU.

    python -m benchmarks.gpu_dry.layers [DESIGN …] [--kernels]

torch traces a layer of `large` on pretended CUDA tensors, and inductor lowers its forward and its
backward pass and joins what can be joined; nothing is run. Of each kernel that inductor then
writes, every buffer that it reads or writes counts once. Matrix products and flash attention are no
such kernels: they count apart. The unit is the bytes of the hidden states of a micro batch. Like
the counts of a step these have bounds, and more is an error.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu_dry.__main__ import (
    DESIGNS,
    SAMPLES,
    Design,
    counted_apart,
    load_guard,
    options_of,
    pretend_ranks,
    put_in_place,
    tell,
    tell_passed,
)
from benchmarks.gpu_dry.kernels import describe_card

BOUNDS = {
    **{
        "vanilla": 48.2,
        "orthogonal": 46.2,
        "monarch": 46.2,
        "tp2": 23.2,
        "dp8_zero3": 46.2,
        "fp32": 50.2,
    },
    **{"dropout": 54.7, "gqa_rope": 48.0, "shared_monarch": 66.6, "thin": 72.5},
    **{"modern": 67.4, "modern_orthogonal": 64.4},
}
"""{design: the most that the kernels of both passes may move}."""


def main() -> int:
    """Print a line for each design that is named, or all; return 1 if one passes a bound."""
    options = options_of("benchmarks.gpu_dry.layers", BOUNDS, detail="kernels")
    if options.in_this_process:
        tell(traffic(DESIGNS[name]) for name in options.names)
    passed = []
    print("| design | kernels | forward | backward | sum | products, attention |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in options.names:
        (passes,) = counted_apart("benchmarks.gpu_dry.layers", [name])
        own = [[size for _, size, ours in kernels if ours] for kernels in passes]
        total = sum(map(sum, own))
        others = sum(size for kernels in passes for _, size, ours in kernels if not ours)
        numbers = (*map(sum, own), total, others)
        print(
            f"| {name} | {sum(map(len, own))} |",
            *(f"{number:.1f} |" for number in numbers),
            flush=True,
        )
        if options.detail:
            for kernels in passes:
                print(*(f"    {size:6.2f} {what}" for what, size, _ in kernels), "", sep="\n")
        if total > BOUNDS[name]:
            passed.append(f"{name}: kernels move {total:.2f}, at most {BOUNDS[name]}")
    return tell_passed(passed)


def traffic(design: Design) -> list[list[tuple[str, float, bool]]]:
    """Count what a compiled layer of a design moves.

    Returns:
        Of each pass [(kernel, what it moves, whether inductor wrote it)].
    """
    load_guard()
    import torch
    from torch._inductor import config as inductor_config
    from torch._inductor.graph import GraphLowering

    from benchmarks.gpu_dry.pretended import PretendedGpu

    gpu = PretendedGpu()
    context = pretend_ranks(design)
    put_in_place(gpu)
    describe_card(80)
    from pretrain.config.load import load_config
    from pretrain.model.build import compile_layers
    from pretrain.training import phase_engine

    config = load_config("large", ["model.num_layers=1", *design.overrides])
    shape = (
        config.data.sequence_length // design.tensor_parallel_size,
        SAMPLES,
        config.model.hidden_size,
    )
    with gpu.fake:
        model = phase_engine.build_model(config, context, 0).train()
        layer = model.decoder.layers[0]
        dtype = layer.input_layernorm.weight.dtype
        hidden, grad = (torch.empty(shape, dtype=dtype, device="cuda") for _ in range(2))
    unit = hidden.nbytes * design.tensor_parallel_size
    passes: list[list[tuple[str, float, bool]]] = []

    def instead_of_a_module(lowering: Any) -> Any:
        lowering.codegen()
        nodes = lowering.scheduler.nodes
        moved = [node.get_read_write_buffers_sizes() / unit for node in nodes]
        passes.append(
            [(_name(n), size, not n.is_extern()) for n, size in zip(nodes, moved, strict=True)]
        )

        def run(given: list[Any]) -> Any:
            with gpu.fake:
                return lowering.orig_gm(*given)

        return SimpleNamespace(call=run, __file__=__file__)

    written: Any = GraphLowering
    written._compile_to_module = written.compile_to_module = instead_of_a_module
    inductor_config.shape_padding = False  # what is padded, the card's clock decides
    compile_layers(model, "inductor")
    layer._whole(hidden.requires_grad_(), None).backward(grad)
    return passes


def _name(node: Any) -> str:
    """Return what a kernel computes, shortened: the operations that it was joined of."""
    origins = getattr(node.node, "origins", ()) or [
        o for part in node.get_nodes() for o in part.node.origins
    ]
    return " ".join(sorted({str(origin) for origin in origins}))[:90]


if __name__ == "__main__":
    sys.exit(main())
