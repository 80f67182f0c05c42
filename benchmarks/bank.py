"""The cost of making the frozen bank, and a check that its bits do not depend on the CPU.

    python -m benchmarks.bank [--json FILE]

Three measurements, on one thread, in CPU seconds (so that other work on the machine disturbs little); each is
the least of a few repetitions:

* all shards of one rank for the `large` model, at tensor-parallel sizes 1, 2, 4 and 8, and the factors that
  stand in their place with construction `monarch`;
* heads of each construction, beside numpy.linalg.qr with the sign fix of the same draws (`textbook`);
* how many different float64 results the BLAS kernels of several CPU models give.
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
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from megatron_patches.bank.exact import FloatArray
from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.orthonormal import CONSTRUCTIONS, FACTORED, ROLES, BankRecipe, rows_of_heads
from megatron_patches.bank.shards import layer_shard, rank_factors
from megatron_patches.bank.structured import is_power_of_two

NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 24, 1024, 16, 64  # the `large` model
LARGE = BankRecipe(1234, HIDDEN_SIZE, HEAD_DIM, NUM_HEADS, NUM_HEADS)
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
HEAD_SHAPES = ((512, 64), (768, 64), (1024, 64), (4096, 128))
HEADS_TIMED = 4
CORE_TYPES = ("Nehalem", "Sandybridge", "Haswell", "SkylakeX")


def make_shards(tensor_parallel_size: int) -> None:
    """All frozen shards of rank 0 of the large model, in bf16."""
    for layer in range(NUM_LAYERS):
        for role in ROLES:
            layer_shard(LARGE, layer, role, 0, tensor_parallel_size, torch.bfloat16)


def make_factors(tensor_parallel_size: int) -> None:
    """All factors of rank 0 of the large model with construction monarch, in bf16."""
    recipe = replace(LARGE, scope="layer", construction="monarch")
    heads = split_heads(NUM_HEADS, NUM_HEADS, range(NUM_HEADS), 0, tensor_parallel_size).frozen
    for layer in range(NUM_LAYERS):
        rank_factors(recipe, layer, heads, torch.bfloat16)


def make_heads(hidden_size: int, head_dim: int, construction: str) -> FloatArray:
    """HEADS_TIMED heads [heads * head_dim, hidden_size]."""
    recipe = BankRecipe(1234, hidden_size, head_dim, HEADS_TIMED, HEADS_TIMED, construction=construction)
    return rows_of_heads(recipe, 0, "query", range(HEADS_TIMED))


def make_textbook_heads(hidden_size: int, head_dim: int) -> FloatArray:
    """The heads of construction qr by numpy.linalg.qr and the sign fix, from the same draws."""
    unit = BankRecipe(
        1234, hidden_size, head_dim, HEADS_TIMED, HEADS_TIMED, init="gaussian", gaussian_std=1.0
    )
    heads = []
    for normal in rows_of_heads(unit, 0, "query", range(HEADS_TIMED)).reshape(HEADS_TIMED, head_dim, -1):
        columns, upper = np.linalg.qr(normal.T)
        heads.append((columns * np.where(upper.diagonal() < 0, -1.0, 1.0)).T)
    return np.concatenate(heads)


def least_seconds(action: Callable[[], object], repetitions: int) -> float:
    """The least CPU time of some runs of `action`, after one that is not counted."""
    action()
    seconds = []
    for _ in range(repetitions):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure_large(make: Callable[[int], None]) -> dict[str, float]:
    """Seconds of rank 0 by tensor-parallel size."""
    return {str(size): least_seconds(partial(make, size), 2) for size in TENSOR_PARALLEL_SIZES}


def measure_heads() -> dict[str, dict[str, float]]:
    """Seconds for one head, by shape, then by construction."""
    table = {}
    for shape in HEAD_SHAPES:
        actions: dict[str, Callable[[], object]] = {"textbook": partial(make_textbook_heads, *shape)}
        for construction in CONSTRUCTIONS:
            too_large = construction == "cayley" and shape[0] > 1024  # cubic in hidden_size
            no_power = construction == "hadamard" and not is_power_of_two(shape[0])
            if construction not in FACTORED and not too_large and not no_power:  # those are made by the layer
                actions[construction] = partial(make_heads, *shape, construction)
        seconds = {name: least_seconds(action, 5) / HEADS_TIMED for name, action in actions.items()}
        table[f"{shape[0]} x {shape[1]}"] = seconds
    return table


def print_bits() -> None:
    """Digests of the same heads by our construction and by the textbook's, for `measure_bits`."""
    made = make_heads(HIDDEN_SIZE, HEAD_DIM, "qr"), make_textbook_heads(HIDDEN_SIZE, HEAD_DIM)
    print(*(hashlib.sha256(rows.tobytes()).hexdigest() for rows in made))


def measure_bits() -> dict[str, int]:
    """Count the different results that the heads of `print_bits` have over CORE_TYPES and threads."""
    seen = []
    command = [sys.executable, "-m", "benchmarks.bank", "--print-bits"]
    for core, threads in product(CORE_TYPES, ("1", "4")):
        settings = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        seen.append(subprocess.check_output(command, env=os.environ | settings, text=True).split())
    ours, textbook = zip(*seen, strict=True)
    return {"settings": len(seen), "qr": len(set(ours)), "textbook": len(set(textbook))}


def print_tables(result: dict[str, Any]) -> None:
    print(f"Large ({NUM_LAYERS} layers, hidden {HIDDEN_SIZE}, {NUM_HEADS} heads of {HEAD_DIM}), one rank")
    for size, seconds in result["large_seconds"].items():
        factors = result["large_factors_seconds"][size]
        print(f"  tensor parallel {size}: {seconds:.2f} s; monarch {factors:.3f} s")
    print("One head, ms (in brackets: times numpy.linalg.qr)")
    for shape, row in result["head_seconds"].items():
        cells = [f"{name} {1e3 * value:.2f} ({value / row['textbook']:.1f})" for name, value in row.items()]
        print(f"  {shape:>10}: {'  '.join(cells)}")
    bits = result["different_results"]
    print(f"Different float64 results over {bits['settings']} settings of BLAS kernels and threads")
    print(f"  qr {bits['qr']}, numpy.linalg.qr {bits['textbook']}")


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
            "large_seconds": measure_large(make_shards),
            "large_factors_seconds": measure_large(make_factors),
            "head_seconds": measure_heads(),
            "different_results": measure_bits(),
        }
    print_tables(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
