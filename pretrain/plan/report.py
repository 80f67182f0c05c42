"""A plan as text of 100 columns, and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.console import Console

from pretrain.plan.advice import Change
from pretrain.plan.estimate import Estimate, Plan
from pretrain.plan.memory import CONTEXT_BYTES
from pretrain.plan.roofline import BYTES_A_LOGIT, HOST_SECONDS, LAUNCHES_A_LAYER, SECONDS_A_LAUNCH
from pretrain.reporting.tables import Table, rich_table
from pretrain.reporting.text import number, percent

WIDTH = 100
EXACT, ESTIMATE = "=", "~"

MEMORY_ROWS: tuple[tuple[str, str, Callable[[Estimate], int]], ...] = (
    (EXACT, "trainable weights", lambda one: one.memory.states.weights),
    (EXACT, "frozen bank", lambda one: one.memory.states.frozen_bank),
    (EXACT, "gradients, summed", lambda one: one.memory.states.gradients),
    (EXACT, "fp32 master weights", lambda one: one.memory.states.master_weights),
    (EXACT, "Adam's two moments", lambda one: one.memory.states.adam_moments),
    (ESTIMATE, "gradients as backward writes them", lambda one: one.memory.states.autograd_gradients),
    (ESTIMATE, "activations kept for backward", lambda one: one.memory.activations),
    (ESTIMATE, "logits, at their most", lambda one: one.memory.logits),
    (ESTIMATE, "or gradients of a layer, when logits are gone", lambda one: one.memory.layer_gradients),
    (ESTIMATE, "communication buffers during backward", lambda one: one.memory.communication),
    (ESTIMATE, "copies during the update, when activations are gone", lambda one: one.memory.update),
    (ESTIMATE, "CUDA context, NCCL, fragments (assumed)", lambda one: one.memory.context),
    (ESTIMATE, "peak", lambda one: one.memory.peak),
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
    """Return the text, without a line break at its end."""
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
    layout = plan.work.layout
    parallel = f"TP {layout.tensor_parallel_size} × DP {layout.data_parallel_size}"
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
    header = ["", title, *(one.variant for one in _estimates(plan))]
    if plan.baseline is not None:
        header.append("difference")
    return Table(header, [[*row, *[""] * (len(header) - len(row))] for row in rows], text_columns=(0, 1))


def _row(
    plan: Plan, mark: str, name: str, value: Callable[[Estimate], float], digits: int
) -> tuple[str, ...]:
    """Return a row with `digits` after the point, more for small numbers, and the difference."""
    values = [value(estimate) for estimate in _estimates(plan)]
    largest = max(values)
    if 0 < largest < 1:
        digits = max(digits, 2 - math.floor(math.log10(largest)))
    cells = [number(one, digits) for one in values]
    if len(values) == 2:
        cells.append("" if not values[1] or values[0] == values[1] else percent(values[0] / values[1]))
    return (mark, name, *cells)


def _memory(plan: Plan) -> Table:
    def in_gb(value: Callable[[Estimate], int]) -> Callable[[Estimate], float]:
        return lambda one: value(one) / 1e9

    rows = [_row(plan, mark, name, in_gb(value), 3) for mark, name, value in MEMORY_ROWS]
    return _table(plan, "memory of one rank, GB (1e9 bytes)", rows)


def _step(plan: Plan) -> Table:
    def in_ms(part: str) -> Callable[[Estimate], float]:
        return lambda one: 1e3 * float(getattr(one.seconds, part))

    rows = [
        _row(plan, ESTIMATE, name, in_ms(part), 1)
        for part, name in PARTS.items()
        if any(getattr(one.seconds, part) for one in _estimates(plan))
    ]
    rows.append(_row(plan, ESTIMATE, "step", lambda one: one.seconds.total * 1e3, 1))
    return _table(plan, "one step, ms", rows)


def _run(plan: Plan) -> Table:
    gpus = plan.request.gpus
    rows = [
        _row(plan, EXACT, "parameters, M", lambda one: one.parameters.total / 1e6, 2),
        _row(plan, EXACT, "of them trainable, M", lambda one: one.parameters.trainable / 1e6, 2),
        _row(plan, EXACT, "model TFLOP a step", lambda one: one.flops.model / 1e12, 1),
        _row(plan, EXACT, "executed TFLOP a step", lambda one: one.flops.executed / 1e12, 1),
        _row(plan, ESTIMATE, "tokens/s", lambda one: one.speed.tokens_per_second, 0),
        _row(plan, ESTIMATE, "tokens/s a GPU", lambda one: one.speed.tokens_per_second / gpus, 0),
        *_utilisation(plan),
        _row(plan, ESTIMATE, "days", lambda one: one.speed.days, 2),
        _row(plan, ESTIMATE, "GPU-hours", lambda one: one.speed.gpu_hours, 1),
        _row(plan, ESTIMATE, "kWh", lambda one: one.speed.kwh, 1),
    ]
    if plan.request.price is not None:
        rows.append(_row(plan, ESTIMATE, "cost", lambda one: one.speed.cost or 0.0, 2))
    config = plan.config
    tokens = config.tokens_per_step * config.total_steps
    return _table(plan, f"the run: {config.total_steps:,} steps, {tokens:,} tokens", rows)


def _utilisation(plan: Plan) -> list[tuple[str, ...]]:
    """Return MFU and HFU; none in fp32, whose peak depends on whether TF32 is allowed."""

    def in_percent(share: str) -> Callable[[Estimate], float]:
        return lambda one: 100 * float(getattr(one.speed, share))

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
    """Return a sentence that names the gentlest change that makes the run fit."""
    enough = next((change for change in plan.fit.changes if change.fits), None)
    if enough is None:
        return "No change tried here makes it fit; take cards with more memory, or more of them."
    gain = (plan.fit.peak - enough.peak) / 1e9
    return f"Set {' '.join(enough.settings)}: {gain:.1f} GB less."


def _saving(plan: Plan) -> list[str]:
    cost, request = plan.chosen.saving, plan.request
    lines = [
        f"{EXACT} A checkpoint has {cost.bytes / 1e9:.2f} GB; {ESTIMATE} {cost.seconds:.1f} s to write at "
        f"{request.write_gb_s:g} GB/s.",
        f"{ESTIMATE} Young/Daly: one every {cost.best_steps:,} steps ({_duration(cost.best_seconds)}) "
        f"costs {cost.lost_at_best:.2%} of the time, lost work included.",
    ]
    if cost.every_seconds is None or cost.lost is None:
        return [*lines, "  checkpoint.every=0 saves only at the end: a failure loses everything."]
    return [
        *lines,
        f"  checkpoint.every={cost.every_steps} ({_duration(cost.every_seconds)}) costs {cost.lost:.2%}.",
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def assumptions(plan: Plan) -> list[str]:
    """Return every number that was not counted, one sentence each."""
    gpu, work = plan.gpu, plan.work
    rates = (
        f"products {gpu.fp32_tflops:g} TFLOP/s (fp32, no TF32)"
        if work.layout.dtype == "fp32"
        else f"products {gpu.gemm_tflops:g} TFLOP/s, of weight gradients {gpu.weight_gradient_tflops:g}"
    )
    return [
        f"{gpu.name}: {rates}, of {gpu.peak_tflops:g} at peak (bf16)",
        f"attention {gpu.attention_tflops:g} TFLOP/s over long samples, half of it at "
        f"{gpu.attention_half_length:g} tokens",
        f"memory traffic {gpu.bandwidth_tb_s:g} TB/s; every elementwise kernel reads and writes memory",
        f"cross entropy moves {BYTES_A_LOGIT[work.performance.cross_entropy]} bytes a logit",
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
    return ["Assumed:", *(f"  {line}" for line in assumptions(plan))]


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the content of `render`; names carry the units, exact values stand apart from estimates."""
    request, fit, layout = plan.request, plan.fit, plan.work.layout
    return {
        "config": request.config,
        "overrides": list(request.overrides),
        "gpus": request.gpus,
        "nodes": plan.nodes,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "zero_stage": layout.zero_stage,
        "gpu": plan.gpu.model_dump(),
        "assumptions": assumptions(plan),
        "chosen": _estimate_json(plan.chosen),
        "baseline": None if plan.baseline is None else _estimate_json(plan.baseline),
        "fit": {
            "fits": fit.fits,
            "memory_bytes": fit.memory,
            "peak_bytes": fit.peak,
            "largest_micro_batch_size": fit.micro_batch,
            "largest_micro_batch_peak_bytes": fit.micro_batch_peak,
            "advice": None if fit.fits else advice(plan),
            "changes": [
                {"settings": list(change.settings), "peak_bytes": change.peak, "fits": change.fits}
                for change in fit.changes
            ],
        },
    }


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    states, memory = asdict(estimate.memory.states), estimate.memory
    updated, written = states.pop("own_elements"), states.pop("autograd_gradients")
    flops, saving, speed = asdict(estimate.flops), asdict(estimate.saving), estimate.speed
    return {
        "variant": estimate.variant,
        "exact": {
            "parameters": {
                "total": estimate.parameters.total,
                "trainable": estimate.parameters.trainable,
                "frozen": estimate.parameters.frozen,
                "updated_by_a_rank": updated,
            },
            "memory_bytes": states,
            "flops_a_step": flops,
            "checkpoint_bytes": saving.pop("bytes"),
        },
        "estimate": {
            "memory_bytes": {
                "autograd_gradients": written,
                "activations": memory.activations,
                "logits": memory.logits,
                "layer_gradients": memory.layer_gradients,
                "communication_buffers": memory.communication,
                "update_buffers": memory.update,
                "context": memory.context,
                "peak": memory.peak,
            },
            "step_seconds": {
                **{part.name: getattr(estimate.seconds, part.name) for part in fields(estimate.seconds)},
                "total": estimate.seconds.total,
            },
            "tokens_per_second": speed.tokens_per_second,
            "mfu": speed.mfu,
            "mfu_full_attention": speed.mfu_full,
            "hfu": speed.hfu,
            "run_days": speed.days,
            "run_gpu_hours": speed.gpu_hours,
            "run_kwh": speed.kwh,
            "run_cost": speed.cost,
            "checkpoint": {
                "write_seconds": saving["seconds"],
                "mean_hours_between_failures": saving["failure_hours"],
                "young_daly_seconds": saving["best_seconds"],
                "young_daly_steps": saving["best_steps"],
                "lost_share_at_young_daly": saving["lost_at_best"],
                "every_steps": saving["every_steps"],
                "every_seconds": saving["every_seconds"],
                "lost_share": saving["lost"],
            },
        },
    }
