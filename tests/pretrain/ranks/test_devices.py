"""CPU or GPU: a GPU machine whose CUDA does not work is refused unless the CPU was asked for.

Peak rates of devices by the names that CUDA gives them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laboratory.sweep.running import visible_devices
from pretrain.errors import UserError
from pretrain.ranks.devices import (
    ask_for,
    cpu_was_asked_for,
    gpu_index,
    gpu_names,
    nvidia_devices,
    peak_flops,
    use_cuda,
)
from tests.ranks import run_program
from tests.tiny import tiny_overrides

without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a torch that can use no GPU"
)


@pytest.fixture(params=["dev/nvidia0", "proc/driver/nvidia/gpus/0000:17:00.0/information"])
def gpu_machine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The root of a file system with a trace of an NVIDIA GPU; nobody has asked for anything."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    file = tmp_path / request.param
    file.parent.mkdir(parents=True)
    file.touch()
    return tmp_path


@without_cuda
@pytest.mark.parametrize("visible", [None, "NoDevFiles"])  # which Slurm sets: no wish for the CPU
def test_a_gpu_machine_without_usable_cuda_is_refused(
    gpu_machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError) as refused:
        use_cuda(gpu_machine)
    sentence = str(refused.value)
    assert sentence.startswith("this machine has NVIDIA GPUs")
    assert str(gpu_machine) in sentence and f"torch {torch.__version__} " in sentence
    assert (
        "run.device=cpu" in sentence and "CUDA_VISIBLE_DEVICES" in sentence and "\n" not in sentence
    )
    assert refused.value.rank_specific  # the GPUs of other nodes may work


@pytest.mark.parametrize("visible", ["", "-1", " -1, 0"])
def test_the_cpu_can_be_asked_for(
    gpu_machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cpu_was_asked_for(visible)
    assert use_cuda(gpu_machine) is False


def test_the_config_key_hides_the_gpus(gpu_machine: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0,1"}
    ask_for("auto", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
    ask_for("cpu", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}


@without_cuda
def test_cuda_that_is_asked_for_must_be_there() -> None:
    with pytest.raises(UserError, match=r"run\.device=cuda, but torch .* CUDA"):
        ask_for("cuda", {})


@without_cuda
def test_a_machine_without_gpus_trains_on_its_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    for name in ("null", "nvidiactl", "nvidia-uvm"):  # a driver that is loaded, and no GPU
        (tmp_path / "dev" / name).touch()
    assert nvidia_devices(tmp_path) == []
    assert use_cuda(tmp_path) is False


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 2, ["0", "1"]),
        ("2, 5", 2, ["2", "5"]),
        ("GPU-8932f937,MIG-1", 2, ["GPU-8932f937", "MIG-1"]),
        ("1,-1,2", 1, ["1"]),
        *[(visible, 0, []) for visible in (None, "", "-1", "NoDevFiles", "0,1")],
    ],
)
def test_names_of_gpus(visible: str | None, count: int, names: list[str]) -> None:
    assert gpu_names(visible, count) == names


@without_cuda
@pytest.mark.parametrize("visible", ["-1", "NoDevFiles", "", "0,-1"])
def test_a_sweep_gives_out_only_gpus_that_torch_can_use(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices() == []


@pytest.mark.slow
@without_cuda
@pytest.mark.skipif(
    not Path("/proc/driver").is_dir(), reason="needs /proc/driver to lay a directory over"
)
@pytest.mark.distributed
def test_training_refuses_a_gpu_machine_without_usable_cuda(
    tmp_path: Path, tiny_shards: Path
) -> None:
    """The real command line in a mount namespace whose /proc/driver is that of a GPU machine."""
    machine = tmp_path / "driver"
    (machine / "nvidia/gpus/0000:17:00.0").mkdir(parents=True)
    lay = f"mount --bind {machine} /proc/driver"
    namespace = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*namespace, lay], capture_output=True).returncode:
        pytest.skip("needs mount namespaces")

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        overrides = tiny_overrides(tiny_shards, tmp_path / "runs", "run", schedule__steps=3)
        command = [sys.executable, "-m", "pretrain", "train", "demo", *overrides, *more]
        script = f'{lay} && unset CUDA_VISIBLE_DEVICES && exec "$@"'
        return run_program([*namespace, script, "sh", *command], timeout=300)

    refused = run("--local-ranks", "2")
    sentence = "this machine has NVIDIA GPUs (/proc/driver/nvidia/gpus/0000:17:00.0), but torch "
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {sentence}")
    assert not (tmp_path / "runs/run").exists()
    done = run("run.device=cpu")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_task_that_is_shown_one_gpu_takes_it_whatever_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)  # srun
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_index(local_rank=3, count=1) == 0
    assert [gpu_index(local_rank, count=8) for local_rank in (0, 7)] == [0, 7]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")  # of which CUDA has lost three
    assert gpu_index(local_rank=3, count=1) >= 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # torchrun: the one GPU is rank 0's
    assert gpu_index(local_rank=0, count=1) == 0
    assert gpu_index(local_rank=3, count=1) >= 1


@pytest.mark.distributed
def test_what_is_set_for_gpus(tmp_path: Path) -> None:
    program = """
import json, os, sys, torch
from pathlib import Path
from pretrain.ranks.gpu_settings import record_collectives, use_arithmetic

os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
found = []
for wish in (False, True):
    use_arithmetic(deterministic=wish, reduced_precision_reduction=not wish)
    in_parts = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    workspace = "CUBLAS_WORKSPACE_CONFIG" in os.environ
    strict = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    found.append([*strict, in_parts, workspace])
record_collectives(Path(sys.argv[1]) / "trace_")
names = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
found.append([os.environ[name] for name in names])
print(json.dumps(found))
"""
    done = run_program([sys.executable, "-c", program, tmp_path])
    assert done.returncode == 0, done.stderr
    as_a_rule, deterministic, recorder = json.loads(done.stdout)
    assert as_a_rule == [False, False, True, False]
    assert deterministic == [True, True, False, True]
    assert recorder == ["0", f"{tmp_path}/trace_"]  # what the user has set stays


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("cpu", None),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-32GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H1000", None),
    ],
)
def test_peaks_in_bf16_of_devices_that_are_known(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else pytest.approx(tflops * 1e12))
    assert peak_flops(name, "fp32") is None
