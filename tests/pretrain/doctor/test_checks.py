"""What each rank checks by itself: disk, frozen bank, GPUs, sums."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_patches.recipe.counting import count_parameters
from pretrain.config.load import load_config
from pretrain.doctor.checks import bank_facts
from pretrain.doctor.collectives import WrongSum, all_reduce_speed
from pretrain.doctor.machine import Unfit, disk_facts, gpu_facts
from pretrain.doctor.request import Request
from pretrain.errors import UserError
from pretrain.runs.finished import newest_checkpoint_bytes
from tests.ranks import train_on_warm_ranks
from tests.tiny import tiny_overrides


def test_room_for_the_checkpoints(tmp_path: Path) -> None:
    small = load_config("demo", tiny_overrides(tmp_path / "shards", tmp_path / "runs", "room"))
    assert disk_facts(small)["bytes_per_second"] > 0
    sizes = {
        "model__num_layers": 2000,
        "model__hidden_size": 16384,
        "attention__variant": "vanilla",
    }
    large = load_config(
        "demo", tiny_overrides(tmp_path / "shards", tmp_path / "runs", "room", **sizes)
    )
    with pytest.raises(
        Unfit, match=r"free, and this run's checkpoints need 231\.9 TB \(77\.3 TB each"
    ):
        disk_facts(large)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a tmpfs")
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"mount: {mount.stderr.decode().strip()}")
    try:
        config = load_config("demo", tiny_overrides(tmp_path / "shards", disk, "full"))
        disk_facts(config)
        (disk / "other").write_bytes(bytes(3 << 20))
        with pytest.raises(Unfit, match="free, and this run's checkpoints need"):
            disk_facts(config)
        assert [path.name for path in disk.iterdir()] == ["other"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.distributed
def test_size_of_a_checkpoint(tmp_path: Path, tiny_shards: Path) -> None:
    sizes = {"model__hidden_size": 128, "schedule__steps": 1, "schedule__warmup_steps": 0}
    overrides = tiny_overrides(tiny_shards, tmp_path, "size", **sizes, precision__dtype="bf16")
    assert train_on_warm_ranks(overrides, 1).returncode == 0
    config = load_config("demo", overrides)
    expected = 12 * count_parameters(config.shape, config.policy).trainable
    assert newest_checkpoint_bytes(config.run_path) == pytest.approx(expected, rel=0.03)


def test_the_bank_check_keeps_its_time_and_its_order(tmp_path: Path) -> None:
    config = load_config("demo", tiny_overrides(tmp_path / "shards", tmp_path, "bank"))
    everything = bank_facts(config, 100)
    assert len(everything["digests"]) == everything["heads"] == 2 * 2 * 4
    assert [place for place, _ in everything["digests"]][:4] == [
        "layer 0 query head 0",
        "layer 0 key head 0",
        "layer 1 query head 0",
        "layer 1 key head 0",
    ]
    assert bank_facts(config, 0) == {"digests": everything["digests"][:1], "heads": 16}
    half = tiny_overrides(
        tmp_path / "shards",
        tmp_path,
        "half",
        attention__variant="hybrid",
        attention__frozen_heads='{"0": 0.5}',
    )
    assert [place for place, _ in bank_facts(load_config("demo", half), 9)["digests"]] == [
        *(
            "layer 0 query head 1",
            "layer 0 key head 1",
            "layer 0 query head 3",
            "layer 0 key head 3",
        )
    ]
    by_layer = load_config(
        "demo", [*tiny_overrides(tmp_path / "shards", tmp_path, "bank"), "attention.scope=layer"]
    )
    assert len(bank_facts(by_layer, 0)["digests"]) == 4  # a layer's heads are made at once


def test_a_wrong_sum_is_seen() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    assert all_reduce_speed(group, 0, 1, torch.device("cpu")) is None
    with pytest.raises(WrongSum, match="of 1,048,576 sums are wrong"):
        all_reduce_speed(group, 3, 1, torch.device("cpu"))  # this rank puts in what is rank 3's


def test_fewer_gpus_than_expected() -> None:
    with pytest.raises(Unfit, match=f"torch sees {torch.cuda.device_count()} GPUs of 99"):
        gpu_facts(0, 99)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that can use no GPU")
def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_facts(0, None, tmp_path) == {"names": [], "free": None}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    with pytest.raises(
        UserError, match=r"this machine has NVIDIA GPUs .*dev/nvidia0\), but torch "
    ):
        gpu_facts(0, None, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_facts(0, None, tmp_path) == {"names": [], "free": None}


def test_gpus_are_expected_as_slurm_says_but_not_for_a_cpu_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (Request("demo").expected_gpus(), Request("demo", gpus=4).expected_gpus()) == (8, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (Request("demo").expected_gpus(), Request("demo", gpus=4).expected_gpus()) == (None, 4)


def test_local_ranks_are_asked_the_same() -> None:
    """What one process was asked is what it asks its ranks."""
    from typer.main import get_command

    from pretrain.__main__ import app

    asked = Request("demo", ("run.seed=7", "--x=1"), 12.5, 0, 3, Path("a b.json"))
    command = get_command(app).commands["doctor"]  # type: ignore[attr-defined]
    context = command.make_context("doctor", asked.arguments())
    given = {**context.params, "overrides": tuple(context.params["overrides"])}
    assert given.pop("local_ranks") == 0
    given["report"] = Path(
        given["report"]
    )  # typer 0.16 makes paths only for the function that it calls
    assert Request(**given) == asked
