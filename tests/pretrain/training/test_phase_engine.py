"""Engines of phases on one rank of this process; layouts are in tests/distributed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from typing_extensions import override

from megatron_patches.errors import MethodError
from pretrain.checkpoint.format import MASTER
from pretrain.checkpoint.slices import Slice, slices_of_rank
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.model.build import token_losses
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.tags import Metric
from pretrain.training import update
from pretrain.training.engine import set_learning_rate
from pretrain.training.phase_engine import KEPT_ROWS, PhasedEngine
from pretrain.training.state_transfer import TrainingState
from tests.megatron_patches.test_extending import block
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.distributed  # engines of one rank, seconds each

MUON = {"optimizer__kind": "muon", "optimizer__gradient_clip": 0.0}
FREEZES = {
    **MUON,
    "attention__variant": "vanilla",
    "attention__phases": "[{at: 0.3, freeze: 1}, {at: 0.6, freeze: all}]",
}
EVEN: Mapping[int, float] = MappingProxyType({})
"""Rows that will be frozen train at the rate of the others."""


def opened(context: ParallelContext, **changes: object) -> PhasedEngine:
    overrides = tiny_overrides(Path("none"), Path("none"), "phases", schedule__steps=10, **changes)
    return PhasedEngine(resolve(load_config("demo", overrides), 1), context)


def train(
    phased: PhasedEngine, allowed: bool = True, before_freezing: Mapping[int, float] = EVEN
) -> None:
    """Make one update, or refuse it."""
    tokens = torch.arange(2 * 33).view(2, 33) % 31
    set_learning_rate(phased.engine, 0.01, before_freezing)
    for _ in range(phased.engine.gradient_accumulation_steps()):
        phased.engine.backward(token_losses(phased.engine, tokens).mean())
        phased.update.make(torch.tensor(allowed))


def masters(phased: PhasedEngine) -> list[torch.Tensor]:
    return [weight_slice.values(MASTER).clone() for weight_slice in slices_of_rank(phased.engine)]


def test_a_change_of_phase_takes_over_everything_and_lets_go_of_the_old_engine(
    context: ParallelContext,
) -> None:
    phased = opened(context, **FREEZES)
    train(phased)
    assert phased.note_update() and phased.audit["first_update"]["matrices"] > 0
    assert not phased.note_update()
    assert phased.is_in(3) and not phased.is_in(4)
    saved_state = TrainingState.of(phased.engine)
    old = [weakref.ref(referent) for referent in (phased.engine, phased.engine.module)]
    phased.enter(4)
    assert phased.is_in(4)
    assert [reference() for reference in old] == [None, None]
    assert {name[:7] for name in phased.audit[KEPT_ROWS]} == {"layer=1"}
    for weight_slice in slices_of_rank(phased.engine):
        for kind, values in saved_state.slices[weight_slice.name].values.items():
            assert torch.equal(weight_slice.values(kind), values)
    for _ in range(2):
        entries = phased.audit_of_phases()["phases"]
        assert [entry["phase"] for entry in entries] == [1]
    phased.enter(7)
    assert {name[:7] for name in phased.audit[KEPT_ROWS]} == {"layer=0", "layer=1"}
    assert [entry["phase"] for entry in phased.audit_of_phases()["phases"]] == [1, 2]
    engine = weakref.ref(phased.engine)
    phased.close()
    assert engine() is None


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_rows_whose_rate_has_fallen_to_zero_rest_and_no_others_do(
    context: ParallelContext, kind: str
) -> None:
    phased = opened(context, **{**FREEZES, "optimizer__kind": kind})
    begun = masters(phased)
    train(phased, before_freezing={1: 0.0, 2: 1.0})
    rests = {
        weight_slice.name
        for weight_slice, values in zip(slices_of_rank(phased.engine), begun, strict=True)
        if torch.equal(weight_slice.values(MASTER), values)
    }
    assert rests == {"decoder.layers.1.self_attention.linear_qkv.trained_query_key"}
    phased.close()


def test_rows_that_freezing_changes_stop_the_training(
    context: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    phased = opened(context, **FREEZES)
    train(phased)
    monkeypatch.setattr(TrainingState, "give_weights", lambda self, model: None)
    with pytest.raises(
        MethodError, match=r"at layer=1 role=query .* training was stopped before step 4;"
    ):
        phased.enter(4)
    phased.close()


@pytest.mark.parametrize(
    ("changes", "has"),
    [
        ({"attention__variant": "orthogonal"}, set()),
        ({"attention__variant": "vanilla", "optimizer__qk_clip": 1.0}, {"qk_clip"}),
        ({"telemetry__weights_every": 2}, {"weight_norms"}),
    ],
)
def test_what_an_engine_has(
    changes: dict[str, object], has: set[str], context: ParallelContext
) -> None:
    phased = opened(context, **changes)
    assert {action.name for action in phased.actions} - {"first_update"} == has
    layers = phased.engine.module.decoder.layers
    assert ["_whole" in vars(layer) for layer in layers] == [False, False]  # none is compiled
    assert phased.audit_of_phases() is phased.audit
    phased.close()


class Halving(update.AfterUpdate):
    """Halves every weight that an update has moved, which rounds nothing."""

    name = "halving"

    @override
    def change(self, weights: Sequence[Slice], moved: torch.Tensor) -> None:
        for weight in weights:
            weight.values(MASTER).mul_(torch.where(moved, 0.5, 1.0))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_an_action_changes_weights_that_an_update_has_moved_and_no_others(
    zero_stage: int, context: ParallelContext
) -> None:
    trained = {}
    for actions in ((), (Halving(),)):
        phased = opened(context, deepspeed__config=f"zero{zero_stage}")
        phased.actions = update.Actions(phased.engine, actions)
        with phased.actions.around_update(1):
            train(phased, allowed=False)
        refused = masters(phased)
        with phased.actions.around_update(2):
            train(phased)
        trained[bool(actions)] = refused, masters(phased)
        phased.close()
    assert all(map(torch.equal, trained[True][0], trained[False][0]))
    for halved, whole in zip(trained[True][1], trained[False][1], strict=True):
        assert torch.equal(halved, whole / 2)


def test_the_action_of_the_guide_measures_a_distance(context: ParallelContext) -> None:
    """docs/extending.md to the letter, with the arguments that `actions_after_update` has."""
    phased = opened(context, attention__variant="vanilla")
    section = load_config("demo").optimizer.model_copy(update={"average_decay": 0.5})
    config = load_config("demo").model_copy(update={"optimizer": section})
    distance = Metric("weights/average_distance", "", "distance from the mean", None)
    names = {**vars(update), "AVERAGE_DISTANCE": distance, "actions": []}
    values = {"engine": phased.engine, "config": config, "context": context}
    assert list(values) == list(signature(update.actions_after_update).parameters)
    exec(block("class WeightAverage"), names)
    exec(block("actions.append(WeightAverage"), names | values)
    actions = update.Actions(phased.engine, names["actions"])
    weights = list(phased.engine.module.parameters())
    means = [weight.detach().clone() for weight in weights]
    for step in range(1, 11):
        with actions.around_update(step) as measured:
            train(phased)
        means = [(mean + weight.detach()) / 2 for mean, weight in zip(means, weights, strict=True)]
        assert bool(measured) == (step == 10)
    expected = sum((w - m).double().square().sum() for w, m in zip(weights, means, strict=True))
    assert measured == {distance.tag: pytest.approx(expected.sqrt().item(), rel=1e-5)}
    phased.close()
