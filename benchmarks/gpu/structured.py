"""Queries and keys of a structured bank: the Triton kernel beside two batched products and the dense matrix.

    python -m benchmarks.gpu.structured --seconds 30 --json structured.json

A stage of benchmarks.gpu.check. One layer's product and, apart, its input gradient, for the tokens of a
micro batch of `large`, in the precision and at the hidden sizes of SIZES; and heads with their rotation,
which the kernel can do in the same pass. All ways take turns. Without a GPU: small sizes, and the
operator's own products.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_patches.engine.compat import silence_expected_warnings

silence_expected_warnings()

import torch  # noqa: E402

from benchmarks.gpu.card import facts  # noqa: E402
from megatron_patches.attention.rotary import RotaryAngles  # noqa: E402
from megatron_patches.bank.monarch import Factors, add_input_grad, project  # noqa: E402
from megatron_patches.bank.monarch_kernel import TILES, Tile, rotates, two_products  # noqa: E402
from megatron_patches.bank.orthonormal import BankRecipe, factors_of_heads  # noqa: E402
from pretrain.model.structured_products import PRODUCTS, take_turns, way_of  # noqa: E402
from pretrain.ranks.gpu_settings import use_arithmetic  # noqa: E402

HEAD_DIM = 64
SIZES = ((1024, torch.bfloat16), (2048, torch.bfloat16), (768, torch.bfloat16), (1024, torch.float32))
SMALL_SIZES = ((128, torch.bfloat16), (192, torch.float32))
DENSE = "dense"
Work = Callable[[], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, required=True, help="after which nothing new begins")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    use_arithmetic(deterministic=False, reduced_precision_reduction=False)
    on_gpu = torch.cuda.is_available()
    batch, length = (25, 512) if on_gpu else (3, 16)
    found: dict[str, Any] = {"facts": facts(), "tokens": batch * length, "sizes": {}, "left_out": []}
    found["failed"] = {}
    for hidden_size, dtype in SIZES if on_gpu else SMALL_SIZES:
        name = f"{hidden_size}, {str(dtype).removeprefix('torch.')}"
        if time.monotonic() > until:
            found["left_out"].append(name)
            continue
        try:
            found["sizes"][name] = compare(Layer(hidden_size, dtype, batch, length), found["failed"], name)
        except Exception:
            found["failed"][name] = traceback.format_exc(limit=-12)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        print(name, found["sizes"].get(name, "failed"), flush=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


class Layer:
    """The frozen rows of one layer, dense and as factors, and an input `[length * batch, hidden_size]`."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, batch: int, length: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        heads = hidden_size // HEAD_DIM
        recipe = BankRecipe(1, hidden_size, HEAD_DIM, heads, heads, scope="layer", construction="monarch")
        made = factors_of_heads(recipe, 0, [("query", range(heads)), ("key", range(heads))])
        right, left = (torch.from_numpy(part).to(device, dtype) for part in (made.right, made.left))
        self.factors = Factors(right, left)
        self.exact = Factors(right.float(), left.float()).rows()
        self.dense = self.exact.to(dtype)
        self.batch, self.length, tokens = batch, length, batch * length
        generator = torch.Generator(device).manual_seed(1)
        self.x, self.total, self.grad = (
            torch.randn(tokens, width, generator=generator, device=device, dtype=dtype)
            for width in (hidden_size, hidden_size, len(self.dense))
        )
        self.rotary = RotaryAngles(HEAD_DIM, 10000.0)

    def forward(self, tile: Tile | None) -> Work:
        return lambda: project(self.x, self.factors, tile)

    def backward(self, tile: Tile | None) -> Work:
        return lambda: add_input_grad(self.grad, self.factors, self.total.clone(), tile)

    def rotated_after(self, tile: Tile | None) -> Work:
        """Projected, and then rotated as the program does it, eagerly."""
        shape = (self.length, self.batch, -1, HEAD_DIM)
        return lambda: self.rotary.rotate(project(self.x, self.factors, tile).view(shape)).view(
            len(self.x), -1
        )

    def rotated_at_once(self, tile: Tile) -> Work:
        half = HEAD_DIM // 2
        self.rotary.rotate(self.x.new_zeros(self.length, 1, 1, HEAD_DIM))  # makes the angles
        angles = [self.rotary._cosine[:, 0, 0, :half], self.rotary._sine[:, 0, 0]]
        right, left = self.factors
        return lambda: two_products(self.x, right, left, None, angles, self.batch, [*tile])


def compare(layer: Layer, failed: dict[str, str], size: str) -> dict[str, Any]:
    """Milliseconds of every way, and how far its result is from that of fp32, by norm."""
    tiles = {way_of(tile): tile for tile in TILES}
    ways: dict[str, Tile | None] = {PRODUCTS: None, **tiles}
    x, grad, weight = layer.x, layer.grad, layer.dense
    passes: dict[str, tuple[dict[str, Work], torch.Tensor]] = {
        "forward": (
            {DENSE: lambda: x @ weight.t(), **{name: layer.forward(tile) for name, tile in ways.items()}},
            x.float() @ layer.exact.t(),
        ),
        "backward": (
            {
                DENSE: lambda: torch.addmm(layer.total, grad, weight),
                **{name: layer.backward(tile) for name, tile in ways.items()},
            },
            layer.total.float() + grad.float() @ layer.exact,
        ),
    }
    if rotates(layer.factors.left.size(1), HEAD_DIM):
        exact = (x.float() @ layer.exact.t()).view(layer.length, layer.batch, -1, HEAD_DIM)
        works = {f"{PRODUCTS}, then rotated": layer.rotated_after(None)}
        works |= {f"{name}, rotated": layer.rotated_at_once(tile) for name, tile in tiles.items()}
        passes["rotated"] = (works, RotaryAngles(HEAD_DIM, 10000.0).rotate(exact).flatten(0, 1))
    found = {}
    for name, (works, wanted) in passes.items():
        apart = {}
        for way, work in list(works.items()):
            try:
                apart[way] = ((work().float().view_as(wanted) - wanted).norm() / wanted.norm()).item()
            except Exception:  # a tile that this card has no room for
                failed[f"{size}, {name}: {way}"] = traceback.format_exc(limit=-6)
                del works[way]
        found[name] = {"milliseconds": take_turns(works, x.device), "apart": apart}
    # The least that a pass can move: the input once, queries and keys once.
    moved = (x.numel() + grad.numel()) * x.element_size()
    taken = found["forward"]["milliseconds"]
    best = min((taken[way] for way in tiles if way in taken), default=float("inf"))
    return {**found, "best_kernel_tb_s": moved / best / 1e9}


if __name__ == "__main__":
    main()
