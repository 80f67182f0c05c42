"""Every kind of attention, ZeRO stage, type and tensor-parallel size on a pretended GPU: a selection.

    python -m benchmarks.gpu_dry.selection [NAME …] [--places]

`benchmarks.gpu_dry` counts exactly what a step of a dozen designs costs. Here a step of everything that a
configuration may combine (`covering`) is asked for what should hold for all: it waits for the host no more
often than its stage does, copies nothing from pageable memory, mixes no devices, and has no large result in
fp64 but the few of the loss and of DeepSpeed's norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from operator import itemgetter

from benchmarks.gpu_dry.__main__ import ROOT, Design, costs_of_steps
from tests.distributed.covering import covering
from tests.distributed.designs import DESIGNS as KINDS_OF_ATTENTION
from tests.distributed.designs import PHASED

Choice = tuple[str, int, int, str]
"""(kind of attention, tensor-parallel size, ZeRO stage, type)."""
SIZES, STAGES, TYPES = (1, 2, 4), (0, 1, 2, 3), ("bf16", "fp32")
WAITS = {
    **{(0, "fp32"): 1, (1, "bf16"): 1, (1, "fp32"): 6, (2, "bf16"): 4, (2, "fp32"): 8},
    **{(3, "bf16"): 39, (3, "fp32"): 39},
}
"""The most waits of a step of two layers: one is the loop's, at the step's end, the others DeepSpeed's."""
FP64 = 34
MARK = "costs: "


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
    own = [
        f"attention.{key}={value}"
        for key, value in KINDS_OF_ATTENTION[kind].items()
        if key != "variant"
    ]
    settings = (*own, f"precision.dtype={dtype}", "model.dropout=0.1")
    return Design(KINDS_OF_ATTENTION[kind]["variant"], (), size, 2, stage, settings)


def too_much(name: str, costs: dict[str, float]) -> list[str]:
    """Return in words what a step asks for beyond what it may."""
    stage, dtype = name.split("-")[-2:]
    bounds = {"host wait": WAITS[int(stage[-1]), dtype], "fp64": FP64, "mixed": 0, "pageable": 0}
    passed = [(kind, costs[kind], bound) for kind, bound in bounds.items() if costs[kind] > bound]
    return [f"{name}: {kind} {number:.0f}, at most {bound}" for kind, number, bound in passed]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each of the selection that is named, or all; return 1 if one asks for too much."""
    designs = chosen()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_dry.selection", description=__doc__
    )
    parser.add_argument("names", nargs="*", choices=[*designs, []], metavar="NAME")
    parser.add_argument(
        "--places", action="store_true", help="print where waits and the like come from"
    )
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.names or list(designs)
    if options.in_this_process:
        costs = costs_of_steps([(designs[name], 2) for name in names])
        for name, (found, places) in zip(names, costs, strict=True):
            print(f"\n{MARK}{json.dumps([name, found, places])}", flush=True)
        os._exit(0)  # no library may tidy up what was never there
    passed = []
    print("| selection | host wait | fp64 | mixed | pageable |\n|---|---:|---:|---:|---:|")
    for size in SIZES:
        alike = [name for name in names if designs[name].tensor_parallel_size == size]
        for name, found, places in _apart(alike) if alike else ():
            kinds = ("host wait", "fp64", "mixed", "pageable")
            print(
                f"| {name} | " + " | ".join(f"{found[kind]:.0f}" for kind in kinds) + " |",
                flush=True,
            )
            if options.places:
                print(*(place for place in places if place.strip().startswith(kinds)), sep="\n")
            passed += too_much(name, found)
    print(*passed, sep="\n", file=sys.stderr)
    return 1 if passed else 0


def _apart(names: Sequence[str]) -> list[tuple[str, dict[str, float], list[str]]]:
    """Return what is counted of designs of one tensor-parallel size, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu_dry.selection", *names, "--in-this-process"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [
        json.loads(line.removeprefix(MARK))
        for line in done.stdout.splitlines()
        if line.startswith(MARK)
    ]


if __name__ == "__main__":
    sys.exit(main())
