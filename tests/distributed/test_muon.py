"""Muon: the same update as torch's on one rank, the same curve under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

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
