"""Muon: the same update as torch's on one rank, the same curve under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import test_layouts
from tests.distributed.layouts import Chain, chains, layouts
from tests.distributed.test_layouts import Link, Trained
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.timeout(1800)
DESIGNS = (
    ("vanilla", "fp32 muon"),
    ("orthogonal", "fp32 muon"),
    ("hybrid-three-adapters", "fp32 muon"),
    ("monarch_trainable", "fp32 muon"),
    ("unfreeze", "fp32 muon"),
    ("vanilla", "bf16 muon"),
)
CHAINS = chains(DESIGNS, layouts(4), len(test_layouts.LINKS))
MUON = {"optimizer__kind": "muon", "optimizer__gradient_clip": 0.0}


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("vanilla", {"newton_schulz_dtype": "bf16"}),
        ("vanilla", {"newton_schulz_dtype": "bf16", "update_scale": "spectral", "nesterov": False}),
        ("vanilla", {"update_scale": "spectral", "nesterov": False, "newton_schulz_steps": 3}),
        ("monarch_trainable", {}),
    ],
)
def test_an_update_is_that_of_torch(
    variant: str, changes: dict[str, object], tmp_path: Path
) -> None:
    keys = {f"optimizer__{key}": value for key, value in changes.items()}
    overrides = tiny_overrides(
        tmp_path,
        tmp_path,
        "muon",
        attention__variant=variant,
        deepspeed__config="zero0",
        optimizer__learning_rate=1e-4,
        optimizer__weight_decay=0.1,
        **MUON,
        **keys,
    )
    in_bf16 = changes.get("newton_schulz_dtype") == "bf16"
    payload = {"overrides": overrides, "bf16": in_bf16}
    differences = run_ranks(1, "tests.distributed.workers.muon:against_torch", payload)
    assert len(differences) == (8 if variant == "vanilla" else 12)
    assert max(differences.values()) < 1e-6, differences


@pytest.fixture(scope="module")
def trained(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tiny_shards, tmp_path_factory.mktemp("muon"))


@pytest.fixture(scope="module")
def links(trained: Trained) -> dict[Chain, list[Link]]:
    return trained.train(CHAINS)


def test_the_chains_try_both_stages_and_every_size() -> None:
    tried = {layout for chain in CHAINS for layout in chain.layouts}
    for size in (1, 2, 4):
        assert any(layout.tensor_parallel == size for layout in tried)
        assert any(layout.data_parallel == size for layout in tried)
    assert {(layout.zero_stage, layout.ranks) for layout in tried} >= {(0, 4), (1, 4)}


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_momentum_goes_on_at_another_layout(chain: Chain, links: dict[Chain, list[Link]]) -> None:
    test_layouts.test_what_is_loaded_is_what_was_saved(chain, links)


def test_the_curve_is_that_of_one_rank(trained: Trained, links: dict[Chain, list[Link]]) -> None:
    whole = trained.uninterrupted(CHAINS)
    for chain in CHAINS:
        test_layouts.test_losses_are_those_of_the_uninterrupted_run(chain, links, whole)
