"""Every kind of attention, ZeRO stage, type and TP size on a pretended GPU: a selection.

    python -m benchmarks.gpu_dry.selection [NAME …] [--places]

`benchmarks.gpu_dry` counts exactly what a step of a dozen designs costs. Here a step of everything
that a configuration may combine (`covering`) is asked for what should hold for all: it waits for
the host no more often than its stage does, copies nothing from pageable memory, mixes no devices,
and has no large result in fp64 but the few of the loss and of DeepSpeed's norm.
"""

from __future__ import annotations

import sys
from itertools import product
from operator import itemgetter

from benchmarks.gpu_dry.__main__ import (
    Design,
    costs_of_steps,
    counted_apart,
    options_of,
    tell,
    tell_passed,
)
from tests.distributed.covering import covering
from tests.distributed.designs import DESIGNS as KINDS_OF_ATTENTION
from tests.distributed.designs import PHASED, design_keys

Choice = tuple[str, int, int, str]
"""(kind of attention, tensor-parallel size, ZeRO stage, type)."""
SIZES, STAGES, TYPES = (1, 2, 4), (0, 1, 2, 3), ("bf16", "fp32")
WAITS = {
    **{(0, "fp32"): 1, (1, "bf16"): 1, (1, "fp32"): 6, (2, "bf16"): 4, (2, "fp32"): 8},
    **{(3, "bf16"): 39, (3, "fp32"): 39},
}
"""The most waits of a step of two layers: one is the loop's, at its end, the others DeepSpeed's."""
FP64 = 34


def chosen() -> dict[str, Design]:
    """Return the selection by name: variants meet every stage, and stages every type and size."""
    product_of_all = product(KINDS_OF_ATTENTION, SIZES, STAGES, TYPES)
    allowed = [
        (kind, size, stage, dtype)
        for kind, size, stage, dtype in product_of_all
        if (stage in (1, 2) or kind not in PHASED) and (stage, dtype) in WAITS
    ]

    def factors(choice: Choice) -> dict[str, object]:
        kind, size, stage, dtype = choice
        variant = KINDS_OF_ATTENTION[kind]["variant"]
        return {"variant": variant, "split": size > 1, "stage": stage, "type": dtype}

    some = covering(allowed, factors, at_least={itemgetter(0): 1, itemgetter(1, 2): 3})
    return {
        f"{kind}-tp{size}-zero{stage}-{dtype}": _design(*own)
        for own in some
        for kind, size, stage, dtype in [own]
    }


def _design(kind: str, size: int, stage: int, dtype: str) -> Design:
    keys = design_keys(kind)
    variant = keys.pop("attention.variant")
    own = [f"{key}={value}" for key, value in keys.items()]
    settings = (*own, f"precision.dtype={dtype}", "model.dropout=0.1")
    return Design(
        variant,
        bounds=(),
        tensor_parallel_size=size,
        data_parallel_size=2,
        stage=stage,
        settings=settings,
    )


def too_much(name: str, costs: dict[str, float]) -> list[str]:
    """Return in words what a step asks for beyond what it may.

    Args:
        name: of the selection.
        costs: what the step costs by kind.
    """
    stage, dtype = name.split("-")[-2:]
    bounds = {"host wait": WAITS[int(stage[-1]), dtype], "fp64": FP64, "mixed": 0, "pageable": 0}
    passed = [(kind, costs[kind], bound) for kind, bound in bounds.items() if costs[kind] > bound]
    return [f"{name}: {kind} {number:.0f}, at most {bound}" for kind, number, bound in passed]


def main() -> int:
    """Print a line for each of the selection that is named; return 1 if one asks for too much."""
    designs = chosen()
    options = options_of("benchmarks.gpu_dry.selection", designs, detail="places")
    names = options.names
    if options.in_this_process:
        costs = costs_of_steps([(designs[name], 2) for name in names])
        tell((name, *found) for name, found in zip(names, costs, strict=True))
    passed = []
    print("| selection | host wait | fp64 | mixed | pageable |\n|---|---:|---:|---:|---:|")
    for size in SIZES:
        alike = [name for name in names if designs[name].tensor_parallel_size == size]
        if not alike:
            continue
        for name, found, places in counted_apart("benchmarks.gpu_dry.selection", alike):
            kinds = ("host wait", "fp64", "mixed", "pageable")
            print(
                f"| {name} | " + " | ".join(f"{found[kind]:.0f}" for kind in kinds) + " |",
                flush=True,
            )
            if options.detail:
                print(*(place for place in places if place.strip().startswith(kinds)), sep="\n")
            passed += too_much(name, found)
    return tell_passed(passed)


if __name__ == "__main__":
    sys.exit(main())
