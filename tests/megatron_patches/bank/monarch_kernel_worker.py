"""What test_monarch_kernel.py runs in processes of its own, as Triton's import needs.

python -m tests.megatron_patches.bank.monarch_kernel_worker interpret|compile DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_patches.bank.monarch import Factors
from megatron_patches.bank.monarch_kernel import kernel_constants, kernel_stages, launch


@dataclass(frozen=True)
class Case:
    """A product and its input gradient: pieces a of b numbers, m blocks."""

    tokens: int
    a: int
    b: int
    m: int


CASES = (
    Case(tokens=18, a=8, b=8, m=16),  # queries and keys of 64 = 8 · 8
    # No power of two; of 20 blocks a subset each; two groups, two chunks.
    Case(tokens=33, a=24, b=20, m=30),
    Case(tokens=18, a=8, b=6, m=12),
    Case(tokens=17, a=32, b=4, m=8),  # blocks larger than pieces
    Case(tokens=3, a=2, b=7, m=3),  # smaller than every tile
)


def tensors(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """x `[tokens, a * b]`, grad `[tokens, m * a]`, total like x, right and left."""
    generator = torch.Generator().manual_seed(case.a)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    right = torch.linalg.qr(drawn(case.a, max(case.m, case.b), case.b))[0][:, : case.m]
    found = {
        "right": right.contiguous(),
        "left": torch.linalg.qr(drawn(case.m, case.a, case.a))[0],
        # Rows with a gap behind them.
        "x": drawn(case.tokens, 2 * case.a * case.b)[:, : case.a * case.b],
        "grad": drawn(case.tokens, case.m * case.a),
        "total": drawn(case.tokens, case.a * case.b),
    }
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def interpret(directory: Path) -> None:
    """Every case in both types, by the kernel in Triton's interpreter.

    {case, type: what came out}.
    """
    out = {}
    for number, case in enumerate(CASES):
        for dtype in (torch.float32, torch.bfloat16):
            given = tensors(case, dtype)
            right, left = Factors(given["right"], given["left"])
            forward = launch(given["x"], right, second=left, addend=None, tile=[16, 4])
            backward = launch(
                given["grad"], left.mT, second=right.mT, addend=given["total"], tile=[16, 4]
            )
            out[number, str(dtype)] = forward, backward
    torch.save(out, directory / "interpreted.pt")


def compile_for_gpus(directory: Path) -> None:
    """The kernel's machine code for cards that are not here.

    What it takes of them, into compiled.json.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_patches.bank.monarch_triton import two_products

    names = two_products.arg_names
    pointers = {"x", "first", "second", "addend", "out"}
    found = []
    for capability, kind, backward, tokens, warps in (
        (80, "bf16", False, 32, 8),
        (80, "bf16", True, 32, 8),
        (90, "bf16", False, 32, 8),
        (80, "fp32", False, 16, 8),
    ):
        # d 2048 = 32 · 64, queries and keys: 128 blocks.
        a, b, m = 32, 64, 128
        first, rows = ((m, a, a), b) if backward else ((a, m, b), a)
        contiguous = ("first_r", "second_m") if backward else ("first_k", "second_p")
        constants = {
            **kernel_constants(first, rows, tokens, backward),
            "INTERPRETED": False,
            **dict.fromkeys(contiguous, 1),
        }
        kinds = {name: f"*{kind}" if name in pointers else "i32" for name in names}
        kinds |= dict.fromkeys(constants, "constexpr")
        aligned = [name for name, argument in kinds.items() if argument != "constexpr"]
        source = ASTSource(
            fn=two_products,
            signature=kinds,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        options = {
            "num_warps": warps,
            "num_stages": kernel_stages(2 if kind == "bf16" else 4),
        }
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        found.append(
            {
                "capability": capability,
                "type": kind,
                "shared_bytes": compiled.metadata.shared,
                "tensor_core_products": compiled.asm["ptx"].count("mma.sync"),
                "wide_stores": compiled.asm["ptx"].count("st.global.v4"),
                "machine_code": len(compiled.asm["cubin"]),
            }
        )
    (directory / "compiled.json").write_text(json.dumps(found))


if __name__ == "__main__":
    what = sys.argv[1]
    where = Path(sys.argv[2])
    assert (os.environ.get("TRITON_INTERPRET") == "1") == (what == "interpret")
    {"interpret": interpret, "compile": compile_for_gpus}[what](where)
