"""A plan as plain values for JSON: names carry the units, and what is exact stands apart from estimates."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from pretrain.plan.estimate import Estimate, Plan
from pretrain.plan.memory import layout_of
from pretrain.plan.report import advice, assumptions


def as_json(plan: Plan) -> dict[str, Any]:
    """The content of `report.render`."""
    request, fit, layout = plan.request, plan.fit, layout_of(plan.config, plan.request.gpus)
    return {
        "config": request.config,
        "overrides": list(request.overrides),
        "gpus": request.gpus,
        "nodes": plan.nodes,
        "tensor_parallel_size": plan.config.parallel.tensor_model_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "zero_stage": layout.zero_stage,
        "gpu": plan.gpu.model_dump(),
        "assumptions": assumptions(plan.config, plan.gpu, plan),
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


def _estimate_json(found: Estimate) -> dict[str, Any]:
    states, memory = asdict(found.memory.states), found.memory
    updated, written = states.pop("own_elements"), states.pop("autograd_gradients")
    flops, saving, speed = asdict(found.flops), asdict(found.saving), found.speed
    return {
        "variant": found.variant,
        "exact": {
            "parameters": {
                "total": found.parameters.total,
                "trainable": found.parameters.trainable,
                "frozen": found.parameters.frozen,
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
                **{part.name: getattr(found.seconds, part.name) for part in fields(found.seconds)},
                "total": found.seconds.total,
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
