"""Rank functions of test_unfreeze.py.

Train through changes of phase, look inside, and compare.
"""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from megatron_patches.bank.orthonormal import ROLES
from megatron_patches.bank.shards import layer_shard
from megatron_patches.engine.freeze import frozen_layers, kept_weights, lasting_weights
from pretrain.checkpoint.format import MASTER
from pretrain.checkpoint.identity import bank_digests
from pretrain.checkpoint.loading import StoredCheckpoint
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.model.build import build_model, token_losses
from pretrain.training.open_run import Run, open_run
from pretrain.training.state_transfer import SliceState, TrainingState
from tests.command_line import equal
from tests.distributed.plain_training import plain_optimizer, plain_step
from tests.distributed.workers.runs import curves, next_step, of_all_ranks

DECAY_STEPS, DECAYED_UNTIL = 4, 6
"""Length and last step of the decay in the schedule that has one, {at: 0.6} of 10 steps."""
TAGS = ("loss/train", "optim/grad_norm", "optim/lr", "memory/trainable_parameters")


def curves_and_references(payload: dict[str, Any]) -> dict[str, Any]:
    """Curves, an audit, and the same training in plain PyTorch."""
    return {
        "curves": {name: curves(overrides, TAGS) for name, overrides in payload["curves"].items()},
        "audit": _phases(load_config("demo", payload["curves"]["unfreezes"]).run_path),
        "references": {
            name: _reference(load_config("demo", overrides))
            for name, overrides in payload["references"].items()
        },
    }


def changes_of_phase(payload: dict[str, Any]) -> dict[str, Any]:
    return {
        "changes": {name: _watch(load_config("demo", o)) for name, o in payload["watch"].items()},
        "freezes": {
            name: _freezes(load_config("demo", o)) for name, o in payload["freeze"].items()
        },
    }


def _reference(config: Config) -> dict[str, list[float]]:
    """Models and optimizers of plain PyTorch, one after another; what is kept is copied by name."""
    expected: dict[str, list[float]] = {tag: [] for tag in TAGS[:3]}
    slows = any(phase.decay_steps for phase in config.phases)
    with open_run(config) as run:  # for its data
        model: torch.nn.Module | None = None
        states: dict[str, dict[str, Any]] = {}
        for step in range(1, config.total_steps + 1):
            phase = config.phase_at(step)
            if step == phase.first_step:
                model, optimizer = _next_model(
                    config, run, phase=phase.number, old=model, states=states
                )
            assert model is not None
            batch = run.batches.at((step - 1) * config.data.global_batch_size).flatten(0, 1)
            loss = token_losses(model, batch).mean()
            norm, rate = plain_step(
                model,
                optimizer,
                terms=(loss,),
                config=config,
                step=step,
                learning_rate_factor=phase.learning_rate_factor,
                before_freezing=min(1.0, (DECAYED_UNTIL - step) / DECAY_STEPS) if slows else 1.0,
            )
            for tag, value in zip(expected, (loss.item(), norm, rate), strict=True):
                expected[tag].append(value)
            states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return expected


def _next_model(
    config: Config,
    run: Run,
    phase: int,
    old: torch.nn.Module | None,
    states: dict[str, dict[str, Any]],
) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    model = build_model(config, run.context, phase)
    if old is not None:
        new = dict(lasting_weights(model))
        had = {name: weight.detach() for name, weight in lasting_weights(old)}
        assert all(name.endswith("trained_query_key") for name in new.keys() ^ had.keys())
        with torch.no_grad():
            for name, weight in had.items():
                new[name].copy_(weight)
    optimizer = plain_optimizer(model, config)
    for name, parameter in model.named_parameters():
        if name in states:
            optimizer.state[parameter] = states[name]
    return model, optimizer


def _watch(config: Config) -> dict[str, Any]:
    """Train step by step.

    At every change of phase compare what was before with what is after it.
    """
    seen: dict[str, Any] = {"moved": [], "changes": []}
    with open_run(config) as run:
        position = run.position
        while position.step < config.total_steps:
            if run.phased.phase != config.phase_at(position.step + 1):
                prior = _all_state(run)
                gone = weakref.ref(run.engine), weakref.ref(run.engine.module)
                shared = _shared_memory()
                run.enter_phase_of(position.step + 1)
                seen["changes"].append(_change(run, prior) | {"step": position.step})
                del prior
                gc.collect()
                seen["changes"][-1]["old engine is gone"] = all(ref() is None for ref in gone)
                seen["changes"][-1]["shared memory grew"] = _shared_memory() - shared
            _, position = next_step(run, position)
            seen["moved"].append(_moved(run))
        steps = [state["step"] for state in _adam_states(run)]
        seen["step counts"] = [int(step) for step in steps]
    return seen


def _all_state(run: Run) -> tuple[TrainingState, dict[str, torch.Tensor], int]:
    full = {
        name: safe_get_full_fp32_param(p).cpu().clone()
        for name, p in run.engine.module.named_parameters()
    }
    return TrainingState.of(run.engine), full, run.engine.micro_steps


def _change(run: Run, prior: tuple[TrainingState, dict[str, torch.Tensor], int]) -> dict[str, Any]:
    """Return what a change of phase kept and what is new; true on every rank."""
    old, old_full, old_micro_steps = prior
    new, new_full, new_micro_steps = _all_state(run)
    kept = [(state, new.slices[name]) for name, state in old.slices.items()]
    moments = [values for _, after in kept for values in _moments(after)]
    rounded = [(after.values[MASTER], after.values[MASTER].bfloat16().float()) for _, after in kept]
    report = {
        "weights": all(
            torch.equal(new.weights[name], weight) for name, weight in old.weights.items()
        ),
        "masters by DeepSpeed": all(
            torch.equal(new_full[name], full) for name, full in old_full.items()
        ),
        "masters, moments and steps": _same(kept),
        "moments are not zero": all(bool(tensor.any()) for tensor in moments)
        and len(moments) == 2 * len(kept) >= 4,
        "masters are not rounded": any(not torch.equal(a, b) for a, b in rounded),
        "new parameters have no state": all(
            state.step == 0 and not any(bool(values.any()) for values in _moments(state))
            for name, state in new.slices.items()
            if name not in old.slices
        ),
        "counters": old_micro_steps == new_micro_steps > 0 and old.counters == new.counters,
        "what is new starts from the bank": all(
            _moved(run)[layer] == 0 for layer in run.phased.phase.newly_trainable
        ),
    }
    report = _everywhere(report)
    report["new parameters"] = sorted(new.weights.keys() - old.weights.keys())
    return report


def _same(states: list[tuple[SliceState, SliceState]]) -> bool:
    return all(
        a.start == b.start
        and a.step == b.step
        and a.values.keys() == b.values.keys()
        and all(equal(a.values[kind], b.values[kind]) for kind in a.values)
        for a, b in states
    )


def _freezes(config: Config) -> dict[str, Any]:
    """Train step by step through changes that freeze rows; what they kept, and what is stored."""
    changes: list[dict[str, Any]] = []
    with open_run(config) as run:
        position = run.position
        while position.step < config.total_steps:
            if run.phased.phase != config.phase_at(position.step + 1):
                old, _, micro_steps = _all_state(run)
                run.enter_phase_of(position.step + 1)
                new, _, new_micro_steps = _all_state(run)
                frozen = dict(kept_weights(run.engine.module))
                left = [(old.slices[name], state) for name, state in new.slices.items()]
                change = {
                    "weights": new.weights.keys() == old.weights.keys()
                    and all(equal(new.weights[name], value) for name, value in old.weights.items()),
                    "masters, moments and steps": _same(left) and len(left) > 4,
                    "states are gone": old.slices.keys() - new.slices.keys()
                    == old.slices.keys() & frozen.keys(),
                    "counters": micro_steps == new_micro_steps > 0,
                }
                layers = [f"layers.{layer}." for layer in run.phased.phase.newly_kept]
                names = sorted(name for name in frozen if any(layer in name for layer in layers))
                changes.append({**_everywhere(change), "kept": names, "step": position.step})
                kept = {name: weight.clone() for name, weight in frozen.items()}
            _, position = next_step(run, position)
        stayed = all(equal(kept[name], weight) for name, weight in kept_weights(run.engine.module))
        run.save(position, in_background=False)
        run.commit(good=True)
        digests = bank_digests(run.engine.module, run.context)
    stored = StoredCheckpoint(config.run_path / f"checkpoints/step_{config.total_steps:08d}")
    rows = [row for row in stored.parameters.values() if row.step is None and not row.states]
    return {
        "changes": changes,
        "rows stayed": stayed,
        "stored": len(rows) >= len(kept) and stored.about.frozen_bank["sha256"] == digests,
        "audit": _phases(config.run_path),
    }


def _everywhere(report: dict[str, Any]) -> dict[str, Any]:
    """Return what is true on every rank."""
    reports = of_all_ranks(report)
    return {key: all(other[key] for other in reports) for key in report}


def _moments(state: SliceState) -> list[torch.Tensor]:
    return [values for kind, values in state.values.items() if kind != MASTER]


def _adam_states(run: Run) -> list[dict[str, Any]]:
    inner = run.engine.optimizer.optimizer
    return [inner.state[parameter] for group in inner.param_groups for parameter in group["params"]]


def _moved(run: Run) -> list[float]:
    """For each layer the largest distance on any rank of its Query/Key rows from the bank's."""
    context, recipe = run.context, run.config.recipe
    assert recipe is not None
    distances = []
    for _, layer in frozen_layers(run.engine.module):
        dtype = layer.query_key_weight.dtype
        bank = [
            layer_shard(
                recipe,
                layer.layer,
                role=role,
                rank=context.tensor_parallel_rank,
                tensor_parallel_size=context.tensor_parallel_size,
                dtype=dtype,
            )
            for role in ROLES
        ]
        trained = layer.trained_query_key
        rows = layer.query_key_weight if trained is None else trained
        distances.append(float((rows.detach() - torch.cat(bank)).abs().max()))
    tensor = torch.tensor(distances, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _shared_memory() -> int:
    return sum(1 for _ in Path("/dev/shm").glob("deepspeed*"))


def _phases(run_path: Path) -> list[dict[str, Any]]:
    audit = json.loads((run_path / "audit.json").read_text())
    keys = (
        "phase",
        "first_step",
        "learning_rate_factor",
        "newly_trainable_layers",
        "frozen_in_zero",
    )
    return [
        {key: entry[key] for key in keys}
        | {
            key: entry["totals"][key]
            for key in ("model_trainable_parameters", "model_frozen_parameters")
        }
        for entry in audit["phases"]
    ]
