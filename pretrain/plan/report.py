"""A plan as text of 80 columns, and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from textwrap import fill
from typing import Any

from rich.console import Console

from pretrain.plan.duration import ACTIVATION_PASSES, bytes_a_logit
from pretrain.plan.estimate import Estimate, Plan
from pretrain.plan.horizon import sentences
from pretrain.plan.memory import CONTEXT_BYTES
from pretrain.reporting.tables import Table, rich_table
from pretrain.reporting.text import number, percent

WIDTH = 80
EXACT, ESTIMATE = "=", "~"

Row = tuple[str, str, str, float, int]
"""(mark, name, attribute of `Estimate`, unit in which it is shown, digits after the point)."""

MEMORY = {
    "states.weights": (EXACT, "trainable weights"),
    "states.frozen_bank": (EXACT, "frozen bank"),
    "states.gradients": (EXACT, "gradients, summed"),
    "states.master_weights": (EXACT, "fp32 master weights"),
    "states.optimizer_states": (EXACT, "states of the optimizer"),
    "states.autograd_gradients": (ESTIMATE, "gradients as backward writes them"),
    "activations": (ESTIMATE, "activations kept for backward"),
    "logits": (ESTIMATE, "logits, at their most"),
    "layer_gradients": (ESTIMATE, "or a layer's gradients, without the logits"),
    "communication_buffers": (ESTIMATE, "communication buffers during backward"),
    "update_buffers": (ESTIMATE, "copies in the update, without activations"),
    "context": (ESTIMATE, "CUDA context, NCCL, fragments (assumed)"),
    "peak": (ESTIMATE, "peak"),
}
TERMS = {
    "compute": "compute: products, attention",
    "memory": "memory traffic: activations, states",
    "communication": "communication that nothing hides",
}


def render(plan: Plan) -> str:
    """Return the text, without a line break at its end."""
    console = Console(width=WIDTH, no_color=True, highlight=False, soft_wrap=False)
    with console.capture() as capture:
        for line in _headline(plan):
            console.print(_in_width(line), markup=False)
        for table in (_memory(plan), _step(plan), _run(plan), *_phases(plan)):
            console.print()
            console.print(rich_table(table, bare=True))
        assumed = ["Assumed:", *(f"  {line}" for line in assumptions(plan))]
        for block in (_fit(plan), _saving(plan), assumed, *_horizon(plan)):
            console.print()
            for line in block:
                console.print(_in_width(line), markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _in_width(line: str) -> str:
    return fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _headline(plan: Plan) -> list[str]:
    config, request = plan.config, plan.request
    nodes = f"{plan.nodes} node{'s' if plan.nodes > 1 else ''}"
    layout = plan.work.layout
    parallel = f"TP {layout.tensor_model_parallel_size} × DP {layout.data_parallel_size}"
    passes = config.gradient_accumulation_steps(request.gpus)
    many = f"{passes} micro batch{'es' if passes > 1 else ''}"
    batch = f"{many} of {config.data.micro_batch_size} × {config.data.sequence_length} tokens"
    return [
        f"{config.run.name}: {plan.chosen.variant} on {request.gpus} × {plan.gpu.name} ({nodes}), "
        f"{parallel}, ZeRO {layout.zero_stage}, {layout.dtype}",
        f"a step: {batch} on each data-parallel rank",
        *([f"without --baseline {request.baseline}: {plan.refusal}"] if plan.refusal else []),
        "",
        f"{EXACT} exact   {ESTIMATE} estimate. No GPU was used: times are sums of three terms "
        "under the assumptions below; nothing here has been checked against a run on a GPU.",
    ]


def _table(plan: Plan, title: str, rows: Sequence[Row]) -> Table:
    header = ["", title, plan.chosen.variant]
    if plan.baseline is not None:
        if plan.baseline.variant == plan.chosen.variant:
            header[-1] += ", as set"
        header += [plan.baseline.variant, "difference"]
    return Table(header, [_cells(plan, row) for row in rows], text_columns=(0, 1))


def _cells(plan: Plan, row: Row) -> list[str]:
    """Return the cells of a row, with more digits for small numbers, and the difference."""
    mark, name, attribute, unit, digits = row
    estimates = [plan.chosen, *([plan.baseline] if plan.baseline else [])]
    values = [attrgetter(attribute)(estimate) / unit for estimate in estimates]
    largest = max(values)
    if 0 < largest < 1:
        digits = max(digits, 2 - math.floor(math.log10(largest)))
    cells = [mark, name, *(number(value, digits) for value in values)]
    if plan.baseline is not None:
        cells.append(
            "" if not values[1] or values[0] == values[1] else percent(values[0] / values[1])
        )
    return cells


def _memory(plan: Plan) -> Table:
    rows = [(mark, name, f"memory.{part}", 1e9, 3) for part, (mark, name) in MEMORY.items()]
    return _table(plan, "memory of one rank, GB (1e9 bytes)", rows)


def _step(plan: Plan) -> Table:
    rows = [(ESTIMATE, name, f"seconds.{term}", 1e-3, 1) for term, name in TERMS.items()]
    return _table(plan, "one step, ms", [*rows, (ESTIMATE, "step", "seconds.total", 1e-3, 1)])


def _run(plan: Plan) -> Table:
    config, speed = plan.config, plan.chosen.speed
    rows: list[Row] = [
        (EXACT, "parameters, M", "parameters.total", 1e6, 2),
        (EXACT, "of them trainable, M", "parameters.trainable", 1e6, 2),
        (EXACT, "model TFLOP a step", "flops.model", 1e12, 1),
        (EXACT, "executed TFLOP a step", "flops.executed", 1e12, 1),
        *[(EXACT, "TFLOP of an update", "flops.update", 1e12, 1)] * bool(plan.chosen.flops.update),
        (ESTIMATE, "tokens/s", "speed.tokens_per_second", 1, 0),
        (ESTIMATE, "tokens/s a GPU", "speed.tokens_per_second", plan.request.gpus, 0),
    ]
    if speed.mfu is not None:
        rows += [
            (ESTIMATE, "MFU, %", "speed.mfu", 0.01, 1),
            (ESTIMATE, "MFU, attention in full, %", "speed.mfu_full_attention", 0.01, 1),
            (ESTIMATE, "HFU, %", "speed.hfu", 0.01, 1),
        ]
    rows += [
        (ESTIMATE, "days", "speed.run_days", 1, 2),
        (ESTIMATE, "GPU-hours", "speed.run_gpu_hours", 1, 1),
        (ESTIMATE, "kWh", "speed.run_kwh", 1, 1),
    ]
    if speed.run_cost is not None:
        rows.append((ESTIMATE, "cost", "speed.run_cost", 1, 2))
    tokens = config.tokens_per_step * config.total_steps
    return _table(plan, f"the run: {config.total_steps:,} steps, {tokens:,} tokens", rows)


def _phases(plan: Plan) -> list[Table]:
    """Return a table of the training phases if there are several."""
    header = [
        "phase from step",
        f"{EXACT} trained, M",
        f"{EXACT} states, GB",
        f"{ESTIMATE} peak, GB",
        f"{EXACT} TFLOP",
        f"{ESTIMATE} ms a step",
    ]
    rows = [
        [
            f"{phase.first_step:,}",
            number(phase.parameters.trainable / 1e6, 2),
            number(phase.memory.states.total / 1e9, 3),
            number(phase.memory.peak / 1e9, 3),
            number(phase.flops.executed / 1e12, 3),
            number(phase.seconds.total * 1e3, 1),
        ]
        for phase in plan.chosen.phases
    ]
    return [Table(header, rows)] if len(rows) > 1 else []


def _fit(plan: Plan) -> list[str]:
    fit = plan.fit
    room = f"{fit.peak_bytes / 1e9:.1f} of {fit.memory_bytes / 1e9:.1f} GB"
    if fit.fits:
        return [
            f"{ESTIMATE} It fits: {room} ({fit.peak_bytes / fit.memory_bytes:.0%}).",
            f"  data.micro_batch_size={fit.largest_micro_batch_size} is the largest that fits and "
            "divides a rank's share of the batch.",
        ]
    changes = [
        f"  {change.peak_bytes / 1e9:8.1f} GB {'fits' if change.fits else 'is not enough'}: "
        f"{' '.join(change.settings)}"
        for change in fit.changes
    ]
    return [f"{ESTIMATE} It does not fit: {room}. {advice(plan)}", *changes]


def advice(plan: Plan) -> str:
    """Return a sentence that names the gentlest change that makes the run fit."""
    enough = next((change for change in plan.fit.changes if change.fits), None)
    if enough is None:
        return "No change tried here makes it fit; take cards with more memory, or more of them."
    gain = (plan.fit.peak_bytes - enough.peak_bytes) / 1e9
    return f"Set {' '.join(enough.settings)}: {gain:.1f} GB less."


def _saving(plan: Plan) -> list[str]:
    cost, request = plan.chosen.saving, plan.request
    lines = [
        f"{EXACT} A checkpoint has {cost.bytes / 1e9:.2f} GB; {ESTIMATE} {cost.write_seconds:.1f} "
        f"s to write at {request.write_gb_s:g} GB/s.",
        f"{ESTIMATE} Young/Daly: one every {cost.young_daly_steps:,} steps "
        f"({_duration(cost.young_daly_seconds)}) costs {cost.lost_share_at_young_daly:.2%} of the "
        "time, lost work included.",
    ]
    if cost.every_seconds is None or cost.lost_share is None:
        return [*lines, "  checkpoint.every=0 saves only at the end: a failure loses everything."]
    every = f"checkpoint.every={cost.every_steps} ({_duration(cost.every_seconds)})"
    return [*lines, f"  {every} costs {cost.lost_share:.2%}."]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _horizon(plan: Plan) -> list[list[str]]:
    if plan.horizon is None:
        return []
    rules = [f"  {line}" for line in sentences(plan.horizon, plan.config)]
    asked = f"--chinchilla {plan.horizon.tokens_per_parameter:g}"
    paste = ["", f"  {' '.join(plan.horizon.overrides)}"]
    return [[f"By rule ({asked}), for overrides to paste:", *rules, *paste]]


def assumptions(plan: Plan) -> list[str]:
    """Return every number that is assumed, one sentence each."""
    gpu, work = plan.gpu, plan.work
    rates = f"products {gpu.gemm_tflops:g} TFLOP/s, "
    rates += f"of weight gradients {gpu.weight_gradient_tflops:g}"
    if work.layout.dtype == "fp32":
        rates = f"products {gpu.fp32_tflops:g} TFLOP/s (fp32, no TF32)"
    return [
        f"{gpu.name}: {rates}, of {gpu.peak_tflops:g} at peak (bf16)",
        f"attention {gpu.attention_tflops:g} TFLOP/s over long samples, half of it at "
        f"{gpu.attention_half_length:g} tokens",
        f"memory traffic {gpu.bandwidth_tb_s:g} TB/s; an activation moves {ACTIVATION_PASSES} "
        f"times, a logit {bytes_a_logit(work)} bytes",
        f"collectives {gpu.node_gb_s:g} GB/s in a node of {gpu.gpus_per_node}, "
        f"{gpu.network_gb_s:g} over nodes, no latency",
        f"{CONTEXT_BYTES / 1e9:g} GB for CUDA and NCCL",
        f"{gpu.watts:g} W a board at full load, without host and cooling",
        f"a node fails every {plan.request.mtbf_hours:g} h (--mtbf-hours), the job every "
        f"{plan.chosen.saving.mean_hours_between_failures:,.0f} h",
        "all of a save's time is lost, as with checkpoint.asynchronous=false; in the background "
        "a save costs less",
        "training steps only: no validation, no opening, no checkpoints, no failures; no waits for "
        "the host or between kernels",
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the content of `render` as plain values; names carry units, exact ones stand apart."""
    request, layout = plan.request, plan.work.layout
    adamw_alone = plan.config.optimizer.kind == "adamw"
    states = "adam_moments" if adamw_alone else "optimizer_states"  # the first as scripts know it
    fit = asdict(plan.fit)
    changes = fit.pop("changes")
    horizon = {}
    if plan.horizon is not None:
        rules = sentences(plan.horizon, plan.config)
        horizon = {"horizon": {**asdict(plan.horizon), "rules": rules}}
    return {
        "config": request.config,
        "overrides": list(request.overrides),
        "gpus": request.gpus,
        "nodes": plan.nodes,
        "tensor_parallel_size": layout.tensor_model_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "zero_stage": layout.zero_stage,
        "gpu": plan.gpu.model_dump(),
        "assumptions": assumptions(plan),
        "chosen": _estimate_json(plan.chosen, states),
        "baseline": None if plan.baseline is None else _estimate_json(plan.baseline, states),
        **({"baseline_refusal": plan.refusal} if plan.refusal else {}),
        "fit": {
            "fits": plan.fit.fits,
            **fit,
            "advice": None if plan.fit.fits else advice(plan),
            "changes": changes,
        },
        **horizon,
    }


def _estimate_json(estimate: Estimate, states_name: str) -> dict[str, Any]:
    """Return an estimate as plain values; `states_name` is the key of the optimizer's states."""
    count = estimate.parameters
    memory = asdict(estimate.memory)
    saving = asdict(estimate.saving)
    states = memory.pop("states")
    del states["update_traffic"]  # traffic, not memory
    states[states_name] = states.pop("optimizer_states")
    updated = states.pop("own_elements")
    written = states.pop("autograd_gradients")
    phases = [
        {
            "first_step": phase.first_step,
            "steps": phase.steps,
            "parameters": asdict(phase.parameters) | {"trainable": phase.parameters.trainable},
            "states_bytes": phase.memory.states.total,
            "peak_bytes": phase.memory.peak,
            "flops_a_step": asdict(phase.flops),
            "step_seconds": phase.seconds.total,
            "checkpoint_bytes": phase.checkpoint_bytes,
        }
        for phase in estimate.phases
    ]
    return {
        "variant": estimate.variant,
        **({"phases": phases} if len(phases) > 1 else {}),
        "exact": {
            "parameters": {
                "total": count.total,
                "trainable": count.trainable,
                "frozen": count.frozen,
                "updated_by_a_rank": updated,
            },
            "memory_bytes": states,
            "flops_a_step": asdict(estimate.flops),
            "checkpoint_bytes": saving.pop("bytes"),
        },
        "estimate": {
            "memory_bytes": {"autograd_gradients": written, **memory, "peak": estimate.memory.peak},
            "step_seconds": {**asdict(estimate.seconds), "total": estimate.seconds.total},
            **asdict(estimate.speed),
            "checkpoint": saving,
        },
    }
