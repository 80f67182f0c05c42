"""What each rank checks by itself: disk, GPUs, sums."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pretrain.config.load import load_config
from pretrain.doctor.checks import check_all_reduce, disk_facts, gpu_facts, require_gpus
from pretrain.doctor.request import Request
from pretrain.errors import UserError
from tests.mounts import mounted
from tests.tiny import tiny_overrides


def test_room_for_the_checkpoints(tmp_path: Path) -> None:
    small = load_config("demo", tiny_overrides(tmp_path / "shards", tmp_path / "runs", "room"))
    facts = disk_facts(small)
    assert facts["free"] > facts["needed"] > 0
    sizes = {"model__num_layers": 2000, "model__hidden_size": 16384}
    overrides = tiny_overrides(tmp_path / "shards", tmp_path / "runs", "room", **sizes)
    large = load_config("demo", [*overrides, "attention.variant=vanilla"])
    with pytest.raises(UserError, match=r"checkpoints need 231\.9 TB \(77\.3 TB each"):
        disk_facts(large)


def test_a_directory_that_is_a_file_has_no_room(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    config = load_config("demo", tiny_overrides(tmp_path / "shards", tmp_path / "runs", "room"))
    with pytest.raises(UserError, match="runs is not a directory, and checkpoints are written"):
        disk_facts(config)


def test_room_is_that_of_the_phase_that_trains_most(tmp_path: Path) -> None:
    overrides = tiny_overrides(tmp_path / "shards", tmp_path / "runs", "room")
    facts = [
        disk_facts(load_config("demo", [*overrides, f"attention.variant={variant}"]))
        for variant in ("unfreeze", "orthogonal_trainable")
    ]
    assert facts[0]["checkpoint"] == facts[1]["checkpoint"]


def test_only_complete_checkpoints_make_room_for_others(tmp_path: Path) -> None:
    config = load_config("demo", tiny_overrides(tmp_path / "shards", tmp_path / "runs", "room"))
    needed = disk_facts(config)["needed"]
    names = ("step_00000002.damaged", "step_00000004.incomplete", "step_00000006", "mine")
    for name in names:
        checkpoint = config.run_directory.checkpoints / name
        checkpoint.mkdir(parents=True)
        (checkpoint / "rank_00000.safetensors").write_bytes(bytes(1000))
    assert disk_facts(config)["needed"] == needed
    (config.run_directory.checkpoint(6) / "COMPLETE").touch()
    assert disk_facts(config)["needed"] == needed - 1000


def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "size=4m"):
        config = load_config("demo", tiny_overrides(tmp_path / "shards", disk, "full"))
        disk_facts(config)
        (disk / "other").write_bytes(bytes(3 << 20))
        with pytest.raises(UserError, match="free, and this run's checkpoints need"):
            disk_facts(config)
        assert [path.name for path in disk.iterdir()] == ["other"]


def test_a_wrong_sum_is_seen() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    check_all_reduce(group, 0, 1, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="of 1,048,576 sums are wrong"):
        check_all_reduce(group, 3, 1, torch.device("cpu"))  # this rank puts in what is rank 3's


def test_fewer_gpus_than_expected() -> None:
    with pytest.raises(UserError, match=f"torch sees {torch.cuda.device_count()} GPUs of 99"):
        gpu_facts(0, 99)


def test_a_task_that_srun_shows_one_of_the_nodes_gpus_is_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    require_gpus(count=1, expected=8)
    with pytest.raises(UserError, match="torch sees 2 GPUs of 8"):
        require_gpus(count=2, expected=8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")  # CUDA has lost seven of them
    with pytest.raises(UserError, match="torch sees 1 GPUs of 8"):
        require_gpus(count=1, expected=8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that can use no GPU")
def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_facts(0, None, tmp_path) == {"names": [], "free": None}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    said = r"this machine has NVIDIA GPUs .*dev/nvidia0\), but torch "
    with pytest.raises(UserError, match=said):
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
