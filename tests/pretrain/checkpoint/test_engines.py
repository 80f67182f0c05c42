"""Slices of DeepSpeed engines on one rank: taken, written, and given to another engine."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches.bank.shards import head_digests, layer_shard, role_digest
from megatron_patches.recipe.optimizers import ADAMW
from pretrain.checkpoint.format import StoredParameter
from pretrain.checkpoint.identity import bank_digests, layout_changes, layout_line
from pretrain.checkpoint.loading import StoredCheckpoint
from pretrain.checkpoint.slices import counters_of, slices_of_rank
from pretrain.checkpoint.writing import HostBuffer, take_snapshot
from pretrain.config.keys import Change
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.model.build import build_model, token_losses
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.position import Position
from pretrain.training.engine import set_learning_rate, wrap_model
from tests.fabricated_checkpoints import about, write_checkpoint
from tests.tiny import VOCAB_SIZE, tiny_overrides

pytestmark = pytest.mark.distributed  # engines of one rank, seconds each

STAGES = [
    ("zero0", "fp32"),
    ("zero1", "fp32"),
    ("zero3", "fp32"),
    ("zero1", "bf16"),
    ("zero0", "bf16"),
]


def hybrid(**changes: object) -> Config:
    """The configuration of a tiny hybrid."""
    standard: dict[str, object] = {
        "attention__variant": "hybrid",
        "attention__frozen_heads": "{0-1: 0.5}",
        "model__num_query_groups": 2,
    }
    overrides = tiny_overrides(Path("nowhere"), Path("runs"), "run", **(standard | changes))
    return load_config("demo", overrides)


def engine_of(context: ParallelContext, stage: str, dtype: str, stored: Path | None = None) -> Any:
    """An engine around the tiny hybrid, as it begins or from a checkpoint."""
    config = hybrid(
        deepspeed__config=stage,
        precision__dtype=dtype,
        precision__grad_accum_dtype="fp32" if stage == "zero1" else dtype,
    )
    model = build_model(config, context)
    state = None if stored is None else StoredCheckpoint(stored)
    if state is not None:
        state.give_weights(model)
    engine, *_ = wrap_model(model, resolve(config, context.world_size), context)
    if state is not None:
        state.give_optimizer(engine)
    set_learning_rate(engine, 0.01, {})
    return engine


def step(engine: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 33), generator=generator)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(token_losses(engine, tokens).mean())
        engine.step()


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """The fp32 weights by name, as DeepSpeed tells them."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = dict(engine.module.named_parameters())
    if engine.zero_optimization_stage():
        weights = {name: safe_get_full_fp32_param(parameter) for name, parameter in weights.items()}
    elif hasattr(engine.optimizer, "fp32_groups"):
        low, high = engine.optimizer.fp16_groups, engine.optimizer.fp32_groups
        copies = {
            id(parameter): copy for parameter, copy in zip(chain(*low), chain(*high), strict=True)
        }
        weights = {name: copies[id(parameter)] for name, parameter in weights.items()}
    return {name: values.detach().clone().flatten() for name, values in weights.items()}


def moments(engine: Any) -> dict[str, torch.Tensor]:
    return {
        f"{kind}/{weight_slice.name}": weight_slice.values(kind).clone()
        for weight_slice in slices_of_rank(engine)
        for kind in ADAMW.states
    }


def steps(engine: Any) -> set[float]:
    """The step counts of all states."""
    return {
        weight_slice.step.item()
        for weight_slice in slices_of_rank(engine)
        if weight_slice.step is not None
    }


def save(engine: Any, context: ParallelContext, path: Path) -> None:
    snapshot = take_snapshot(engine, context, HostBuffer())
    content = about(Position(2, 4, 64), counters=counters_of(engine))
    write_checkpoint(path, [snapshot], content)


@pytest.fixture(scope="module")
def expected_moments(context: ParallelContext) -> dict[str, torch.Tensor]:
    """The moments of AdamW where it has the parameters themselves, after two steps."""
    engine = engine_of(context, "zero0", "fp32")
    for number in (1, 2):
        step(engine, number)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    state = engine.optimizer.state
    return {
        f"{kind}/{names[id(parameter)]}": state[parameter][kind].flatten()
        for parameter in state
        for kind in ADAMW.states
    }


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_slices_are_the_masters_and_moments_and_another_engine_goes_on_from_them(
    context: ParallelContext,
    expected_moments: dict[str, torch.Tensor],
    stage: str,
    dtype: str,
    tmp_path: Path,
) -> None:
    engine = engine_of(context, stage, dtype)
    path = tmp_path / "step_00000002"
    for number in (1, 2):
        step(engine, number)
    expected = masters(engine)
    slices = {weight_slice.name: weight_slice for weight_slice in slices_of_rank(engine)}
    assert slices.keys() == expected.keys()
    for name, weight_slice in slices.items():
        assert (weight_slice.start, weight_slice.length) == (0, expected[name].numel())
        assert weight_slice.kinds == ("master", *ADAMW.states)
        assert torch.equal(weight_slice.values("master"), expected[name])
    engine_moments = moments(engine)
    rounding = 1e-5 if dtype == "fp32" else 0.7
    for key, values in expected_moments.items():
        assert (engine_moments[key] - values).norm() <= rounding * values.norm(), key
    save(engine, context, path)
    other = engine_of(context, stage, dtype, path)
    assert counters_of(other) == counters_of(engine)
    assert steps(other) == steps(engine) and len(steps(engine)) == 1
    for more in (0, 1):
        if more:
            step(engine, 3)
            step(other, 3)
        for ours, theirs in ((masters(engine), masters(other)), (moments(engine), moments(other))):
            assert all(torch.equal(theirs[key], values) for key, values in ours.items())


@pytest.fixture(scope="module")
def stored(context: ParallelContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "step_00000002"
    engine = engine_of(context, "zero0", "fp32")
    step(engine, 1)
    save(engine, context, path)
    return path


def with_index(path: Path, parameters: dict[str, StoredParameter]) -> StoredCheckpoint:
    """A checkpoint of which the index says something else."""
    checkpoint = StoredCheckpoint(path)
    checkpoint.parameters = parameters
    return checkpoint


WEIGHT = "decoder.final_layernorm.weight"


def test_what_belongs_to_another_model_is_refused(context: ParallelContext, stored: Path) -> None:
    engine = engine_of(context, "zero0", "fp32")
    model = engine.module

    index = StoredCheckpoint(stored).parameters
    others = {name: parameter for name, parameter in index.items() if name != WEIGHT}
    longer = replace(index[WEIGHT], shape=(7,))
    for parameters, said in (
        (others, f"has no weight '{WEIGHT}'; restore the run's own"),
        (others | {WEIGHT: longer}, rf"'{WEIGHT}' in shape \(7,\) but .* describes \(32,\)"),
        (index | {"more": index[WEIGHT]}, "has a weight 'more' that this model has not"),
    ):
        with pytest.raises(UserError, match=said):
            with_index(stored, parameters).give_weights(model)
    later = {name: replace(parameter, step=9) for name, parameter in index.items()}
    with_index(stored, later).give_optimizer(engine)
    assert steps(engine) == {9.0}
    flat = engine_of(context, "zero1", "fp32")  # whose AdamW has one step count for a group
    with pytest.raises(UserError, match="has step counts that this run's optimizer keeps together"):
        with_index(stored, index | {WEIGHT: later[WEIGHT]}).give_optimizer(flat)
    momentum = {name: replace(parameter, states=("v",)) for name, parameter in index.items()}
    said = r"has the optimizer states v of '.*keeps exp_avg, exp_avg_s"
    with pytest.raises(UserError, match=said):
        with_index(stored, momentum).give_optimizer(engine)


def test_weights_alone_are_read_without_an_engine(context: ParallelContext, stored: Path) -> None:
    written = engine_of(context, "zero0", "fp32", stored)
    model = build_model(hybrid(), context)
    StoredCheckpoint(stored).give_weights(model)
    expected = dict(written.module.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_slice_that_is_not_there_is_named(stored: Path) -> None:
    checkpoint = StoredCheckpoint(stored)
    piece = checkpoint.parameters[WEIGHT].slices[0]
    elsewhere = (replace(piece, file="rank_00009.safetensors"),)
    lost = replace(checkpoint.parameters[WEIGHT], slices=elsewhere)
    with pytest.raises(UserError, match=r"rank_00009.safetensors is missing"):
        with_index(stored, {WEIGHT: lost}).full("master", WEIGHT)
    with pytest.raises(
        UserError, match=f"does not hold the slice of 'master/{WEIGHT}' that the index names"
    ):
        StoredCheckpoint(stored)._read(piece.file, f"master/{WEIGHT}", 30, 40)


def test_changes_of_the_layout_are_said() -> None:
    sizes = ["data.micro_batch_size=4", "parallel.tensor_model_parallel_size=1"]
    config = load_config("demo", [*sizes, "deepspeed.config=zero2"])
    layout = resolve(config, 1).layout
    assert layout_changes(json.loads(json.dumps(layout.as_dict())), layout) == []
    earlier = layout.as_dict() | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    earlier["unknown"] = 3
    changes = layout_changes(earlier, layout)
    assert changes == [
        Change("tensor_model_parallel_size", 2, 1),
        Change("sequence_parallel", True, False),
    ]
    line = layout_line(changes, dropout=0.0)
    assert line == "resuming at another layout: TP 2 -> 1, sequence parallel on -> off"
    stage = Change("zero_stage", 1, 2)
    for masked in (*changes, Change("micro_batch_size", 2, 4)):
        assert "; with dropout > 0 the masks" in layout_line([stage, masked], dropout=0.1)
    assert layout_line([stage], dropout=0.1) == "resuming at another layout: ZeRO 1 -> 2"


def test_the_digests_of_a_live_bank_are_those_of_its_heads(context: ParallelContext) -> None:
    config = hybrid(attention__frozen_heads="{0: 0.5}")
    model = build_model(config, context)
    recipe = config.recipe
    assert recipe is not None
    groups, expected = model.decoder.layers[0].self_attention.linear_qkv.frozen_groups, {}
    assert len(groups) == 1
    for role, heads in (("query", recipe.num_attention_heads // 2), ("key", 1)):
        rows = layer_shard(
            recipe,
            layer=0,
            role=role,  # type: ignore[arg-type]
            rank=0,
            tensor_parallel_size=1,
            dtype=torch.float32,
            frozen_groups=groups,
        )
        digests = head_digests(rows, recipe.head_dim)
        assert len(digests) == heads
        expected[f"layer=0 role={role}"] = role_digest(digests)
    assert bank_digests(model, context) == expected
