"""What making the frozen bank costs, and whether its bits depend on the CPU: `python benchmarks/bank.py [--json FILE]`.

Three measurements, all on one thread: the shards of one rank for the `large` model (24 layers, 16 heads,
hidden 1024, head_dim 64) at tensor-parallel sizes 1, 2, 4, 8; one head of each construction beside
numpy.linalg.qr of the same draw; and how many different results the BLAS kernels of several CPU models give.
Wall times; each is the least of several repetitions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from megatron_patches.exact import FloatArray
from megatron_patches.orthonormal import CONSTRUCTIONS, ROLES, BankRecipe, head_rows
from megatron_patches.shards import layer_shard

LARGE = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 64}
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
HEAD_SHAPES = ((512, 64), (768, 64), (1024, 64), (4096, 128))
CORE_TYPES = ("Nehalem", "Sandybridge", "Haswell", "SkylakeX")


def recipe_of(hidden_size: int, head_dim: int, heads: int = 1, construction: str = "qr") -> BankRecipe:
    return BankRecipe(1234, hidden_size, head_dim, heads, heads, construction=construction)


def textbook_head(recipe: BankRecipe, head: int) -> FloatArray:
    """One head by numpy.linalg.qr and the sign fix, of the same draw."""
    normal = BankRecipe(**recipe.as_dict() | {"init": "gaussian", "construction": "qr", "gaussian_std": 1.0})
    # type: ignore[arg-type] columns, upper = np.linalg.qr(head_rows(normal, 0, "query", head).T) return
    (columns * np.where(upper.diagonal() < 0, -1.0, 1.0)).T


def least_seconds(action: Callable[[], object], repetitions: int) -> float:
    """The shortest wall time of some runs of `action`, after one that is not counted."""
    action()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_shards() -> dict[str, float]:
    """Seconds for rank 0 to make all its shards of the large model, cast to bf16, by tensor-parallel size."""
    recipe = recipe_of(LARGE["hidden_size"], LARGE["head_dim"], LARGE["num_attention_heads"])

    def make(size: int) -> None:
        for layer in range(LARGE["num_layers"]):
            for role in ROLES:
                layer_shard(recipe, layer, role, 0, size, torch.bfloat16)

    return {str(size): least_seconds(lambda: make(size), 2) for size in TENSOR_PARALLEL_SIZES}  # noqa: B023


def measure_heads() -> dict[str, dict[str, float]]:
    """Seconds for one head, by shape and construction, with `textbook` for numpy.linalg.qr."""
    table = {}
    for hidden_size, head_dim in HEAD_SHAPES:
        row = {"textbook": least_seconds(lambda: textbook_head(recipe_of(hidden_size, head_dim), 0), 10)}  #
        noqa: B023 for construction in CONSTRUCTIONS: if construction != "cayley" or hidden_size <= 1024:  #
        cubic in hidden_size recipe = recipe_of(hidden_size, head_dim, construction=construction)
        row[construction] = least_seconds(lambda: head_rows(recipe, 0, "query", 0), 10)  # noqa: B023
        table[f"{hidden_size} x {head_dim}"] = row return table


def print_bits() -> None:
    """Digests of some heads by our construction and by the textbook's, for `measure_bits`."""
    recipe = recipe_of(1024, 64, 8)
    ours = [head_rows(recipe, 0, "query", head) for head in range(8)]
    textbook = [textbook_head(recipe, head) for head in range(8)]
    print(*(hashlib.sha256(np.stack(rows).tobytes()).hexdigest() for rows in (ours, textbook)))


def measure_bits() -> dict[str, int]:
    """How many different float64 results 8 heads have over the BLAS kernels of CORE_TYPES, 1 and 4 threads."""
    seen = set()
    for core in CORE_TYPES:
        for threads in ("1", "4"):
            settings = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS":
            threads} command = [sys.executable, __file__, "--print-bits"] done = subprocess.run(command,
            env=os.environ | settings, capture_output=True, text=True, check=True)
            seen.add(tuple(done.stdout.split())) return {"settings": 2 * len(CORE_TYPES), "qr": len({a for a,
            _ in seen}), "textbook": len({b for _, b in seen})}


def main() -> None:
    parser = argparse.ArgumentParser(description="What making the frozen bank costs.")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--print-bits", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.print_bits:
        print_bits()
        return
    with threadpool_limits(limits=1):
        result = {
            "machine": platform.processor() or platform.machine(),
            "numpy": np.__version__,
            "large_seconds_by_tensor_parallel_size": measure_shards(),
            "head_seconds": measure_heads(),
            "different_results": measure_bits(),
        }
    print_tables(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def print_tables(result: dict) -> None:
    print("Large (24 layers x 16 heads x 2, hidden 1024, head_dim 64), one rank, one thread")
    for size, seconds in result["large_seconds_by_tensor_parallel_size"].items():
        print(f"  tensor parallel {size}: {seconds:6.2f} s")
    print("One head, milliseconds (times numpy.linalg.qr)")
    for shape, row in result["head_seconds"].items():
        cells = [f"{name} {1e3 * value:.2f} ({value / row['textbook']:.1f})" for name, value in row.items()]
        print(f"  {shape:>10}: {'  '.join(cells)}")
    bits = result["different_results"]
    print(f"Different float64 results over {bits['settings']} settings of BLAS kernels and threads")
    print(f"  qr {bits['qr']}, numpy.linalg.qr {bits['textbook']}")


if __name__ == "__main__":
    main()
