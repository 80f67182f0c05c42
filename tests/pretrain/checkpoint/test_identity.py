"""Changes that a resume accepts, and those that it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from data_pipeline.shards.blend import Blend
from pretrain.checkpoint.format import About
from pretrain.checkpoint.identity import (
    DATA_KEYS,
    accept_identity,
    check_bank,
    run_identity,
    same_phases_until,
)
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.errors import UserError


@pytest.mark.parametrize("allowed", [False, True])
def test_another_tokenizer_is_refused_whatever_is_allowed(allowed: bool) -> None:
    """Under its ids the weights would be trained on other text."""
    live = identity() | {"data": {**DATA, "tokenizer": "b" * 64}}
    with pytest.raises(UserError, match="another tokenizer") as refused:
        accept_identity("step_00000002", saved_as(identity()), live, allowed)
    assert "allow_change" not in str(refused.value)


RECIPE = {"seed": 1, "scope": "head"}
BANK = {"recipe": RECIPE, "sha256": {"layer=0 role=query": "a" * 64, "layer=0 role=key": "b" * 64}}
DATA: dict[str, Any] = {"tokenizer": "a" * 64, "directories": [], "parts": []}


def identity(bank: dict[str, Any] = BANK, **keys: Any) -> dict[str, Any]:
    every = dict.fromkeys(DATA_KEYS, 1) | {"model.hidden_size": 64, "attention.seed": None} | keys
    return {"keys": every, "data": DATA, "frozen_bank": bank}


def saved_as(saved_identity: dict[str, Any]) -> About:
    return cast(About, SimpleNamespace(**saved_identity))


def test_a_setting_of_the_data_may_change_where_that_is_allowed() -> None:
    key = DATA_KEYS[0]
    saved = saved_as(identity())
    live = identity(**{key: 2})
    assert accept_identity("step_1", saved, identity(), False) == []
    assert accept_identity("step_1", saved, live, True) == [f"{key} is 2, was 1"]
    with pytest.raises(
        UserError, match=rf"step_1 was trained on other data: {key} is 2, was 1; restore the"
    ):
        accept_identity("step_1", saved, live, False)


def test_another_setting_is_refused_but_one_that_is_younger_than_the_checkpoint() -> None:
    for allowed in (False, True):
        with pytest.raises(
            UserError, match=r"with model.hidden_size=64 but this run has 32; set it back"
        ):
            accept_identity(
                "step_1", saved_as(identity()), identity(**{"model.hidden_size": 32}), allowed
            )
    old = identity()
    del old["keys"]["attention.seed"]
    live = identity(**{"model.vocab_multiple": 1})  # what a checkpoint means by saying nothing
    live["keys"]["optimizer.kind"] = "adamw"
    assert accept_identity("step_1", saved_as(old), live, False) == []
    muon = identity(**{"optimizer.kind": "muon"})
    with pytest.raises(UserError, match=r"with optimizer.kind=None but this run has muon"):
        accept_identity("step_1", saved_as(old), muon, False)
    with pytest.raises(UserError, match=r"with model.vocab_multiple=None but this run has 8"):
        accept_identity("step_1", saved_as(old), identity(**{"model.vocab_multiple": 8}), False)


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_learned_positions_hold_the_length_of_the_samples(position: str) -> None:
    keys = {"model.position_embedding": position, "data.sequence_length": 16}
    live = identity(**keys | {"data.sequence_length": 32})
    if position == "rope":
        changes = accept_identity("step_1", saved_as(identity(**keys)), live, True)
        assert changes == ["data.sequence_length is 32, was 16"]
    else:
        with pytest.raises(UserError, match=r"with data.sequence_length=16 but this run has 32"):
            accept_identity("step_1", saved_as(identity(**keys)), live, True)


def test_another_bank_is_refused() -> None:
    check_bank("step_1", BANK, BANK)
    other = {**BANK, "recipe": RECIPE | {"seed": 2}}
    said = "step_1 has a Query/Key bank with seed=1 but this run regenerates it with seed=2"
    for check in (
        lambda: check_bank("step_1", BANK, other),
        lambda: accept_identity("step_1", saved_as(identity()), identity(other), True),
    ):
        with pytest.raises(UserError, match=said):
            check()
    with pytest.raises(UserError, match="scope=head but this run regenerates it with scope=None"):
        check_bank("step_1", BANK, {**BANK, "recipe": None})
    changed = {**BANK, "sha256": BANK["sha256"] | {"layer=0 role=key": "c" * 64}}
    with pytest.raises(
        UserError, match="frozen digest mismatch at layer=0 role=key: the bank regenerated"
    ):
        check_bank("step_1", BANK, changed)
    key = "layer=1 role=key as trained"
    kept = {**BANK, "sha256": BANK["sha256"] | {key: "c" * 64}}
    moved = {**BANK, "sha256": BANK["sha256"] | {key: "d" * 64}}
    with pytest.raises(
        UserError, match=f"mismatch at {key}: rows that checkpoint step_1 holds are"
    ):
        check_bank("step_1", kept, moved)
    more = {**BANK, "sha256": BANK["sha256"] | {"layer=1 role=key": "c" * 64}}
    with pytest.raises(
        UserError, match="frozen digest mismatch at its layers: the bank regenerated"
    ):
        check_bank("step_1", BANK, more)


def test_an_identity_is_of_all_that_decides_the_weights_and_not_of_the_layout() -> None:
    blend = cast(Blend, SimpleNamespace(describe=lambda: DATA))

    def identity_with(*overrides: str) -> dict[str, Any]:
        config = load_config("demo", [*overrides])
        ranks = config.parallel.tensor_model_parallel_size
        return run_identity(resolve(config, ranks), blend)

    plain = identity_with()
    assert plain["data"] == DATA and plain["frozen_bank"]["sha256"] == {}
    assert plain["frozen_bank"]["recipe"]["hidden_size"] == plain["keys"]["model.hidden_size"]
    assert plain["keys"]["model.initial_weights"] is None
    assert identity_with("attention.variant=vanilla")["frozen_bank"]["recipe"] is None
    assert (
        identity_with("parallel.tensor_model_parallel_size=2", "data.micro_batch_size=2") == plain
    )
    assert identity_with("run.seed=77") != plain != identity_with("model.num_layers=3")
    former = "attention.unfreeze"
    key = "the steps after which attention.phases applies"
    later = identity_with("attention.variant=unfreeze", "attention.phases=[{at: 0.25, train: 1}]")
    assert key not in plain["keys"] and later["keys"][key]
    longer = ["attention.phases=[{at: 0.125, train: 1}]", "schedule.steps=480"]
    same_step = identity_with("attention.variant=unfreeze", *longer)
    assert accept_identity("step_1", saved_as(later), same_step, allow_data_change=False) == []
    moved = identity_with("attention.variant=unfreeze", longer[0])
    said = r"applied after steps \[60\], in this run it would after \[30\]; set its `at`"
    with pytest.raises(UserError, match=said):
        accept_identity("step_1", saved_as(later), moved, allow_data_change=False)
    with pytest.raises(UserError, match=said):
        accept_identity("step_31", saved_as(later), moved, False, branch_step=31)
    assert accept_identity("step_30", saved_as(later), moved, False, branch_step=30) == []
    for steps in (None, [], [30, 60]):  # of a checkpoint that is not as it was written
        keys = later["keys"] | {key: steps}
        assert not same_phases_until(30, keys, moved["keys"])
    old = {"at": 0.25, "train": "1", "learning_rate_factor": 1.0, "heads": 1.0, "roles": "both"}
    assert same_phases_until(30, later["keys"] | {"attention.phases": [old]}, moved["keys"])
    saved = dict(later["keys"])
    saved[former] = [{"at": 0.25, "layers": "1", "learning_rate_factor": 1.0}]
    saved[f"the steps after which {former} applies"] = saved.pop(key)
    del saved["attention.phases"]
    about = saved_as(later | {"keys": saved})
    assert accept_identity("step_1", about, later, allow_data_change=False) == []
    saved[former][0]["layers"] = "2"
    with pytest.raises(UserError, match=r"was written with attention\.phases="):
        accept_identity("step_1", about, later, allow_data_change=False)
