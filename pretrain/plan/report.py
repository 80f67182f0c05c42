"""A plan as text of 100 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console

from pretrain.config.tree import Config
from pretrain.plan.advice import Change
from pretrain.plan.devices import Gpu
from pretrain.plan.estimate import Estimate, Plan
from pretrain.plan.memory import CONTEXT_BYTES, layout_of
from pretrain.plan.roofline import BYTES_A_LOGIT, HOST_SECONDS, LAUNCHES_A_LAYER, SECONDS_A_LAUNCH
from pretrain.reporting.tables import Table, rich_table
from pretrain.reporting.text import number, percent

WIDTH = 100
EXACT, ESTIMATE = "=", "~"

MEMORY_ROWS: tuple[tuple[str, str, Callable[[Estimate], int]], ...] = (
    (EXACT, "trainable weights", lambda found: found.memory.states.weights),
    (EXACT, "frozen bank", lambda found: found.memory.states.frozen_bank),
    (EXACT, "gradients, summed", lambda found: found.memory.states.gradients),
    (EXACT, "fp32 master weights", lambda found: found.memory.states.master_weights),
    (EXACT, "Adam's two moments", lambda found: found.memory.states.adam_moments),
    (ESTIMATE, "gradients as backward writes them", lambda found: found.memory.states.autograd_gradients),
    (ESTIMATE, "activations kept for backward", lambda found: found.memory.activations),
    (ESTIMATE, "logits, at their most", lambda found: found.memory.logits),
    (ESTIMATE, "or gradients of a layer, when logits are gone", lambda found: found.memory.layer_gradients),
    (ESTIMATE, "communication buffers during backward", lambda found: found.memory.communication),
    (ESTIMATE, "copies during the update, when activations are gone", lambda found: found.memory.update),
    (ESTIMATE, "CUDA context, NCCL, fragments (assumed)", lambda found: found.memory.context),
    (ESTIMATE, "peak", lambda found: found.memory.peak),
)
PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "norms, dropout, GELU, residuals",
    "cross_entropy": "cross entropy",
    "accumulation": "gradients into their sum",
    "tensor_parallel": "tensor-parallel collectives",
    "reduction": "reduction of gradients, not hidden",
    "gathering": "gathering of weights, not hidden",
    "update": "norm, clipping, AdamW",
    "launches": "waiting for kernel launches",
    "host": "waiting for the host",
}


def render(plan: Plan) -> str:
    """The text, without a line break at its end."""
    console = Console(width=WIDTH, no_color=True, highlight=False, soft_wrap=False)
    with console.capture() as capture:
        for line in _headline(plan):
            console.print(line, markup=False)
        for table in (_memory(plan), _step(plan), _run(plan)):
            console.print()
            console.print(rich_table(table, bare=True))
        for block in (_fit(plan), _saving(plan), _assumptions(plan)):
            console.print()
            for line in block:
                console.print(line, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _estimates(plan: Plan) -> list[Estimate]:
    return [plan.chosen, *([plan.baseline] if plan.baseline else [])]


def _headline(plan: Plan) -> list[str]:
    config, request = plan.config, plan.request
    nodes = f"{plan.nodes} node{'s' if plan.nodes > 1 else ''}"
    layout = layout_of(config, request.gpus)
    parallel = f"TP {config.parallel.tensor_model_parallel_size} × DP {layout.data_parallel_size}"
    passes = config.gradient_accumulation_steps(request.gpus)
    many = f"{passes} micro batch{'es' if passes > 1 else ''}"
    batch = f"{many} of {config.data.micro_batch_size} × {config.data.sequence_length} tokens"
    return [
        f"{config.run.name}: {plan.chosen.variant} on {request.gpus} × {plan.gpu.name} ({nodes}), "
        f"{parallel}, ZeRO {layout.zero_stage}, {layout.dtype}",
        f"a step: {batch} on each data-parallel rank",
        "",
        f"{EXACT} exact   {ESTIMATE} estimate. No GPU was used: times are a roofline, to about ±15 % if",
        "  the assumptions below hold; nothing here has been checked against a run on a GPU.",
    ]


def _table(plan: Plan, title: str, rows: Sequence[tuple[str, ...]]) -> Table:
    header = ["", title, *(found.variant for found in _estimates(plan))]
    if plan.baseline is not None:
        header.append("difference")
    return Table(header, [[*row, *[""] * (len(header) - len(row))] for row in rows], text_columns=(0, 1))


def _row(
    plan: Plan, mark: str, name: str, value: Callable[[Estimate], float], digits: int
) -> tuple[str, ...]:
    """`digits` after the point, more where the number is small; the difference is of the baseline."""
    found = [value(estimate) for estimate in _estimates(plan)]
    largest = max(found)
    if 0 < largest < 1:
        digits = max(digits, 2 - math.floor(math.log10(largest)))
    cells = [number(one, digits) for one in found]
    if len(found) == 2:
        cells.append("" if not found[1] or found[0] == found[1] else percent(found[0] / found[1]))
    return (mark, name, *cells)


def _memory(plan: Plan) -> Table:
    def in_gb(value: Callable[[Estimate], int]) -> Callable[[Estimate], float]:
        return lambda found: value(found) / 1e9

    rows = [_row(plan, mark, name, in_gb(value), 3) for mark, name, value in MEMORY_ROWS]
    return _table(plan, "memory of one rank, GB (1e9 bytes)", rows)


def _step(plan: Plan) -> Table:
    def in_ms(part: str) -> Callable[[Estimate], float]:
        return lambda found: 1e3 * float(getattr(found.seconds, part))

    rows = [
        _row(plan, ESTIMATE, name, in_ms(part), 1)
        for part, name in PARTS.items()
        if any(getattr(found.seconds, part) for found in _estimates(plan))
    ]
    rows.append(_row(plan, ESTIMATE, "step", lambda found: found.seconds.total * 1e3, 1))
    return _table(plan, "one step, ms", rows)


def _run(plan: Plan) -> Table:
    gpus = plan.request.gpus
    rows = [
        _row(plan, EXACT, "parameters, M", lambda found: found.parameters.total / 1e6, 2),
        _row(plan, EXACT, "of them trainable, M", lambda found: found.parameters.trainable / 1e6, 2),
        _row(plan, EXACT, "model TFLOP a step", lambda found: found.flops.model / 1e12, 1),
        _row(plan, EXACT, "executed TFLOP a step", lambda found: found.flops.executed / 1e12, 1),
        _row(plan, ESTIMATE, "tokens/s", lambda found: found.speed.tokens_per_second, 0),
        _row(plan, ESTIMATE, "tokens/s a GPU", lambda found: found.speed.tokens_per_second / gpus, 0),
        *_utilisation(plan),
        _row(plan, ESTIMATE, "days", lambda found: found.speed.days, 2),
        _row(plan, ESTIMATE, "GPU-hours", lambda found: found.speed.gpu_hours, 1),
        _row(plan, ESTIMATE, "kWh", lambda found: found.speed.kwh, 1),
    ]
    if plan.request.price is not None:
        rows.append(_row(plan, ESTIMATE, "cost", lambda found: found.speed.cost or 0.0, 2))
    config = plan.config
    tokens = config.tokens_per_step * config.total_steps
    return _table(plan, f"the run: {config.total_steps:,} steps, {tokens:,} tokens", rows)


def _utilisation(plan: Plan) -> list[tuple[str, ...]]:
    """In fp32 there is no peak to compare with: it depends on whether TF32 is allowed."""

    def in_percent(share: str) -> Callable[[Estimate], float]:
        return lambda found: 100 * float(getattr(found.speed, share))

    if plan.chosen.speed.mfu is None:
        return []
    names = {"MFU, %": "mfu", "MFU, attention in full, %": "mfu_full", "HFU, %": "hfu"}
    return [_row(plan, ESTIMATE, name, in_percent(share), 1) for name, share in names.items()]


def _fit(plan: Plan) -> list[str]:
    fit = plan.fit
    room = f"{fit.peak / 1e9:.1f} of {fit.memory / 1e9:.1f} GB"
    if fit.fits:
        passes = (
            f"data.micro_batch_size={fit.micro_batch} is the largest that fits and divides a rank's share"
        )
        return [f"{ESTIMATE} It fits: {room} ({fit.peak / fit.memory:.0%}).", f"  {passes} of the batch."]
    return [f"{ESTIMATE} It does not fit: {room}. {advice(plan)}", *map(_change_line, fit.changes)]


def _change_line(change: Change) -> str:
    verdict = "fits" if change.fits else "is not enough"
    return f"  {change.peak / 1e9:8.1f} GB {verdict}: {' '.join(change.settings)}"


def advice(plan: Plan) -> str:
    """One sentence: the gentlest change that makes it fit."""
    enough = next((change for change in plan.fit.changes if change.fits), None)
    if enough is None:
        return "No change tried here makes it fit; take cards with more memory, or more of them."
    gain = (plan.fit.peak - enough.peak) / 1e9
    return f"Set {' '.join(enough.settings)}: {gain:.1f} GB less."


def _saving(plan: Plan) -> list[str]:
    found, request = plan.chosen.saving, plan.request
    lines = [
        f"{EXACT} A checkpoint has {found.bytes / 1e9:.2f} GB; {ESTIMATE} {found.seconds:.1f} s to write at "
        f"{request.write_gb_s:g} GB/s.",
        f"{ESTIMATE} Young/Daly: one every {found.best_steps:,} steps ({_duration(found.best_seconds)}) "
        f"costs {found.lost_at_best:.2%} of the time, lost work included.",
    ]
    if found.every_seconds is None or found.lost is None:
        return [*lines, "  checkpoint.every=0 saves only at the end: a failure loses everything."]
    return [
        *lines,
        f"  checkpoint.every={found.every_steps} ({_duration(found.every_seconds)}) costs {found.lost:.2%}.",
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def assumptions(config: Config, gpu: Gpu, plan: Plan) -> list[str]:
    """Every number that was not counted, one sentence each."""
    rates = (
        f"products {gpu.fp32_tflops:g} TFLOP/s (fp32, no TF32)"
        if config.precision.dtype == "fp32"
        else f"products {gpu.gemm_tflops:g} TFLOP/s, of weight gradients {gpu.weight_gradient_tflops:g}"
    )
    return [
        f"{gpu.name}: {rates}, of {gpu.peak_tflops:g} at peak (bf16)",
        f"attention {gpu.attention_tflops:g} TFLOP/s over long samples, half of it at "
        f"{gpu.attention_half_length:g} tokens",
        f"memory traffic {gpu.bandwidth_tb_s:g} TB/s; every elementwise kernel reads and writes memory",
        f"cross entropy moves {BYTES_A_LOGIT[config.performance.cross_entropy]} bytes a logit",
        f"collectives {gpu.node_gb_s:g} GB/s in a node of {gpu.gpus_per_node}, {gpu.network_gb_s:g} over "
        "nodes, no latency",
        f"{CONTEXT_BYTES / 1e9:g} GB for CUDA and NCCL; {1e3 * HOST_SECONDS:g} ms a step for the host; "
        f"{LAUNCHES_A_LAYER} launches a layer of {1e6 * SECONDS_A_LAUNCH:g} µs",
        f"{gpu.watts:g} W a board at full load, without host and cooling",
        f"a node fails every {plan.request.mtbf_hours:g} h (--mtbf-hours), the job every "
        f"{plan.chosen.saving.failure_hours:,.0f} h",
        "training steps only: no validation, no opening, no checkpoints, no failures",
    ]


def _assumptions(plan: Plan) -> list[str]:
    return ["Assumed:", *(f"  {line}" for line in assumptions(plan.config, plan.gpu, plan))]
