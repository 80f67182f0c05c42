"""Choice of how to multiply by structured frozen rows: two batched products, or the kernel.

Which is faster depends on the GPU: rank 0 measures both there once, at the sizes of the run, for
all ranks: see `performance.structured_products`. environment.json keeps the result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.bank.monarch import Factors, add_input_grad, project
from megatron_patches.bank.monarch_kernel import TILES, Tile, why_not
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext, agree

PRODUCTS = "two products"
ROUNDS, TIMES = 9, 8
"""Rounds of the measurement, and calls in each."""
HEAD_START = 6_000_000
"""Cycles of a GPU, 3 to 6 ms."""
ROUNDING: Mapping[torch.dtype, float] = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}
"""Largest relative distance from the result in fp32; a kernel with a larger one is not used."""


@dataclass(frozen=True)
class StructuredProducts:
    """The way in which all ranks multiply by structured rows, and its reason.

    Attributes:
        tile: of the kernel; None: two batched products.
        reason: a few words.
        milliseconds: by way, of one layer's product and input gradient on rank 0; empty: not
            measured.
    """

    tile: Tile | None
    reason: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return the entry of environment.json."""
        values = asdict(self)
        return {
            "way": way_of(self.tile),
            "reason": self.reason,
            "milliseconds": values["milliseconds"],
        }


def structured_layers(model: torch.nn.Module) -> list[FrozenQueryKeyValueLinear]:
    """Return the projections of `model` whose frozen rows are structured."""
    linears = [
        module for module in model.modules() if isinstance(module, FrozenQueryKeyValueLinear)
    ]
    return [linear for linear in linears if isinstance(linear.frozen(), Factors)]


def use_structured_products(model: torch.nn.Module, chosen: StructuredProducts | None) -> None:
    """Set every layer of `model` to compute as chosen.

    Args:
        model: the model.
        chosen: of `choose_structured_products`.
    """
    if chosen is not None:
        for linear in structured_layers(model):
            linear.tile = chosen.tile


def choose_structured_products(
    model: torch.nn.Module,
    wanted: str,
    context: ParallelContext,
    *,
    tokens: int,
    deterministic: bool,
) -> StructuredProducts | None:
    """Resolve `performance.structured_products`, the same on all ranks (collective).

    Args:
        model: the model.
        wanted: the setting: auto, products or kernel.
        context: process groups and device of this rank.
        tokens: of a micro batch, to measure with.
        deterministic: every run must choose alike, so nothing is measured to decide.

    Returns:
        The choice; None where no rank has structured rows.

    Raises:
        UserError: on every rank: the kernel is asked for, and one of them cannot run it.
    """
    layers = structured_layers(model)
    if agree([float(len(layers))], context.device)[0] == 0:
        return None
    factors = [rows for layer in layers if isinstance(rows := layer.frozen(), Factors)]
    against: list[str | None] = [None] * context.world_size
    dist.all_gather_object(
        against, next(filter(None, (why_not(rows.right) for rows in factors)), None)
    )
    problem = next(filter(None, against), None)
    cannot = "performance.structured_products=kernel cannot be had: {}; use auto or products"
    if wanted == "kernel" and problem is not None:
        raise UserError(cannot.format(problem))
    if wanted == "products":
        return StructuredProducts(None, "as configured")
    if problem is not None:
        return StructuredProducts(None, problem)
    if wanted == "auto" and deterministic:
        return StructuredProducts(
            None, "run.deterministic: a measurement could choose otherwise next time"
        )
    chosen = [StructuredProducts(None, "rank 0 has no structured rows")]
    if context.is_first and factors:
        chosen = [fastest(factors[0], tokens, TILES if wanted == "kernel" else (None, *TILES))]
    dist.broadcast_object_list(chosen, src=0, device=context.device)
    if wanted == "kernel" and chosen[0].tile is None:
        raise UserError(cannot.format(chosen[0].reason))
    return chosen[0]


def fastest(factors: Factors, tokens: int, tiles: Sequence[Tile | None]) -> StructuredProducts:
    """Measure the kernel with every tile, and two products for None, on the device of `factors`.

    Args:
        factors: of structured rows.
        tokens: of a micro batch.
        tiles: to be measured; None: two products.
    """
    rows = factors.left.size(0) * factors.left.size(1)
    inputs = factors.right.size(0) * factors.right.size(2)
    # The run's own is left as it is.
    generator = torch.Generator(factors.left.device).manual_seed(0)
    x, total, grad = (
        torch.randn(
            tokens, width, generator=generator, device=factors.left.device, dtype=factors.left.dtype
        )
        for width in (inputs, inputs, rows)
    )
    exact = Factors(factors.right.float(), factors.left.float())
    copy = total.to(torch.float32, copy=True)  # two products add in place
    wanted = project(x.float(), exact), add_input_grad(grad.float(), exact, copy)
    ways = {way_of(tile): tile for tile in tiles}
    works: dict[str, Callable[[], object]] = {}
    left_out: list[str] = []
    for name, tile in ways.items():

        def both(
            tile: Tile | None = tile, total: torch.Tensor = total
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return project(x, factors, tile), add_input_grad(grad, factors, total, tile)

        try:
            results = both(total=total.clone())
        except Exception as error:  # Triton's compiler, or a card with too little shared memory
            left_out.append(f"{name}: {type(error).__name__}")
            continue
        distances = map(_relative_distance, results, wanted)
        if all(distance <= ROUNDING[x.dtype] for distance in distances):
            works[name] = both
        else:
            left_out.append(f"{name}: wrong")
    milliseconds = take_turns(works, x.device)
    best = min(milliseconds, key=milliseconds.__getitem__, default=PRODUCTS)
    return StructuredProducts(ways.get(best), "; ".join(["measured", *left_out]), milliseconds)


def take_turns(works: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Measure the milliseconds of each on `device`.

    Args:
        works: {name: what is measured}.
        device: of the tensors.

    Returns:
        The median of ROUNDS, in each of which all take turns.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(1 + ROUNDS):  # the first one warms up
        for name, work in works.items():
            times[name].append(_milliseconds(work, device))
    return {name: statistics.median(rounds[1:]) for name, rounds in times.items()}


def way_of(tile: Tile | None) -> str:
    """Name the way in words, for records."""
    return PRODUCTS if tile is None else f"kernel, {tile.tokens} tokens, {tile.warps} warps"


def _relative_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return |one − other| / |other|, inf where one is not finite."""
    distance = ((one.float() - other).norm() / other.norm()).item()
    return distance if distance == distance else float("inf")


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the mean of TIMES calls, on a GPU by its own clock."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(TIMES):
            work()
        return 1e3 * (time.perf_counter() - started) / TIMES
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    # Meanwhile the host gets ahead, as it is in a training: its part of a launch must not be
    # measured.
    torch.cuda._sleep(HEAD_START)
    begin.record()
    for _ in range(TIMES):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / TIMES
