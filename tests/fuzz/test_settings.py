"""Settings that go together.

What is accepted can be shown and planned, and trains to the same losses at any layout.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_patches.recipe.adapters import ADAPTERS
from megatron_patches.recipe.block import MLPS, NORMS
from megatron_patches.recipe.optimizers import KINDS
from megatron_patches.recipe.variants import VARIANTS
from pretrain.config.load import load_config
from pretrain.config.show import render_show
from pretrain.plan.estimate import Request, make_plan
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import GRADIENT_NORM, LOSS
from tests.fuzz.damage import right_or_refused
from tests.ranks import train_on_warm_ranks
from tests.tiny import tiny_overrides

LAYERS = ("0", "3", "0-1", "50%-100%", "all")
BLOCK: dict[str, tuple[str, ...]] = {
    "model.num_layers": ("1", "2", "6"),
    "model.num_query_groups": ("2", "4"),
    "model.head_dim": ("16", "48"),
    "model.norm": tuple(NORMS),
    "model.mlp": tuple(MLPS),
    "model.position_embedding": ("learned", "rope"),
    "model.qk_norm": ("true", "false"),
    "model.tied_embeddings": ("true", "false"),
    "attention.variant": tuple(VARIANTS),
}
AXES: dict[str, tuple[str, ...]] = {
    "attention.shared": ("true", "false"),
    "attention.frozen_roles": ("both", "query", "key"),
    "attention.scope": ("head", "layer"),
    "attention.construction": ("qr", "svd", "householder", "hadamard", "dct", "monarch"),
    "attention.frozen_heads": ("{0: 1.0}", "{1: 0.5}", "{50%-100%: 1.0}", "{0: 0.25, 3: 1.0}"),
    "attention.convolved": ("both", "key", "value"),
    "optimizer.kind": tuple(KINDS),
    "optimizer.qk_clip": ("1",),
    "performance.recompute": ("query_key", "attention", "full"),
    "performance.cross_entropy": ("in_place", "chunked", "megatron"),
    "data.reset_at_document_end": ("true",),
    "parallel.tensor_model_parallel_size": ("1", "4"),
    "deepspeed.config": ("zero0", "zero1", "zero2", "zero3"),
}
some_adapters = st.lists(st.sampled_from(sorted(ADAPTERS)), min_size=1, max_size=3, unique=True)
phases = st.fixed_dictionaries(
    {"at": st.sampled_from(["0.25", "0.5"]), "freeze": st.sampled_from(LAYERS)}
) | st.fixed_dictionaries({"at": st.just("0.5"), "train": st.sampled_from(LAYERS)})


@st.composite
def settings(draw: st.DrawFn) -> list[str]:
    """Overrides of the demo: a block, and a few of the axes of attention and of training."""
    chosen = {key: draw(st.sampled_from(values)) for key, values in BLOCK.items()}
    for key in draw(st.lists(st.sampled_from(sorted(AXES)), max_size=4, unique=True)):
        chosen[key] = draw(st.sampled_from(AXES[key]))
    if "attention.convolved" in chosen:
        chosen["attention.adapters"] = "[short_convolution, channel_scale]"
    elif draw(st.booleans()):
        chosen["attention.adapters"] = f"[{', '.join(draw(some_adapters))}]"
    if draw(st.integers(0, 3)) == 0:
        entry = draw(phases)
        chosen["attention.phases"] = (
            f"[{{{', '.join(f'{key}: {value}' for key, value in entry.items())}}}]"
        )
    return [f"{key}={value}" for key, value in chosen.items()]


@pytest.mark.distributed
@given(settings())
@example(
    [
        "model.qk_norm=true",
        "attention.variant=hybrid",
        "attention.frozen_heads={1: 1.0}",
        "attention.adapters=[low_rank]",
    ]
)
def test_what_is_accepted_is_described(overrides: list[str]) -> None:
    config = right_or_refused(lambda: load_config("demo", overrides))
    if isinstance(config, str):
        return
    assert "parameters, trainable" in render_show("demo", overrides)
    request = Request("demo", tuple(overrides), gpus=4, gpu="h200", baseline="vanilla")
    right_or_refused(lambda: make_plan(request))


LAYOUTS = ((1, 1, 3), (2, 1, 0), (2, 2, 0), (2, 2, 2), (4, 4, 1), (4, 2, 3))
"""(ranks, tensor-parallel ranks, ZeRO stage)."""


@pytest.mark.full
@given(settings(), st.sampled_from(LAYOUTS))
def test_any_layout_trains_to_the_same_losses(
    tiny_shards: Path, overrides: list[str], layout: tuple[int, int, int]
) -> None:
    """Where the layout is not refused in a sentence."""
    with tempfile.TemporaryDirectory() as directory:
        alone = losses(tiny_shards, Path(directory) / "alone", overrides, (1, 1, 1))
        if alone is None:
            return
        spread = losses(tiny_shards, Path(directory) / "spread", overrides, layout)
        if spread is not None:
            for step, both in enumerate(zip(alone, spread, strict=True)):
                expected, other = both
                assert other == pytest.approx(expected, rel=1e-4), (overrides, layout, step)


def losses(
    shards: Path, run: Path, overrides: list[str], layout: tuple[int, int, int]
) -> list[tuple[float, float]] | None:
    """Return the losses and gradient norms of a training; None if it is refused."""
    ranks, tensor_parallel, stage = layout
    chosen = {key.replace(".", "__"): value for key, value in (o.split("=", 1) for o in overrides)}
    changes: dict[str, object] = {
        **chosen,
        # A high rate would let Adam amplify rounding differences between layouts.
        "optimizer__learning_rate": 3e-4,
        "data__micro_batch_size": 1,
        "parallel__tensor_model_parallel_size": tensor_parallel,
        "parallel__sequence_parallel": tensor_parallel > 1,
        "deepspeed__config": f"zero{stage}",
        "telemetry__tensorboard": "false",
        "telemetry__weights_every": 2,
        "telemetry__spectral_norms": "['*']",
    }
    done = train_on_warm_ranks(tiny_overrides(shards, run.parent, run.name, **changes), ranks)
    if done.returncode == 2:
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
        return None
    assert done.returncode == 0, (overrides, layout, done.stderr)
    return [
        (record[LOSS.tag], record[GRADIENT_NORM.tag])
        for record in read_metrics(run / "metrics.jsonl")
    ]
