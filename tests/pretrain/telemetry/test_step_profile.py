"""A profile of steps without a run: what is written, and what happens where nothing can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.config.sections import ProfileSection
from pretrain.telemetry.profile import StepProfile


def profiled(directory: Path) -> None:
    profile = StepProfile(ProfileSection(at=1, steps=1), directory, rank=0)
    for step in (1, 2):
        with profile.of(step):
            torch.ones(2, 2) @ torch.ones(2, 2)


def test_training_continues_without_a_profile_that_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").touch()
    profiled(tmp_path / "profile")
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert said == [
        f"warning: {tmp_path}/profile cannot be written (File exists); rank 0 continues without "
        "its profile"
    ]


def test_the_table_of_a_cut_write_is_the_one_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for ending in ("json", "txt"):
        (tmp_path / f"kernels_rank_0.{ending}").symlink_to("/dev/full")
    profiled(tmp_path)
    assert "warning" not in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kernels_rank_0.json",
        "kernels_rank_0.txt",
        "trace_rank_0.json",
    ]
    assert not any(path.is_symlink() for path in tmp_path.iterdir())  # replaced, not written into
