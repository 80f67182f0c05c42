"""The choice of CPU or GPU, and the reason why torch cannot use a GPU.

A GPU machine whose CUDA does not work (a driver too old, a torch built for the CPU, a container
without the devices) must not silently train on the CPU. There the user has to ask for the CPU, by
`run.device=cpu` or an empty CUDA_VISIBLE_DEVICES. Torch is imported only where it has to be asked.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pretrain.errors import UserError
from pretrain.ranks.environment import one_environment_for_all

if TYPE_CHECKING:
    import torch

Device = Literal["auto", "cpu", "cuda"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
MACHINE = Path("/")


def ask_for(device: Device, environment: MutableMapping[str, str] = os.environ) -> None:
    """Apply `run.device`; call this before torch, megatron-core or DeepSpeed look for a GPU.

    `cpu` hides the GPUs from this process and its children, so that no library uses one.

    Args:
        device: Value of `run.device`.
        environment: Environment of this process and its children.

    Raises:
        UserError: the device is `cuda`, and torch cannot use a GPU.
    """
    if device == "cpu":
        environment[VISIBLE] = ""
    elif device == "cuda" and (reason := why_no_cuda()):
        raise UserError(
            f"run.device=cuda, but {reason}; fix that, or set run.device=auto", rank_specific=True
        )


def use_cuda(machine: Path = MACHINE) -> bool:
    """Return whether this process trains on GPUs: torch can use one, and nobody asked for the CPU.

    Raises:
        UserError: the machine has NVIDIA GPUs, torch cannot use them, and nobody asked for the CPU.
    """
    if cpu_was_asked_for(os.environ.get(VISIBLE)):
        return False
    reason = why_no_cuda()
    if reason is not None and (devices := nvidia_devices(machine)):
        raise UserError(
            f"this machine has NVIDIA GPUs ({devices[0]}), but {reason}; fix that, or ask for "
            f"the CPU with run.device=cpu or an empty {VISIBLE}",
            rank_specific=True,
        )
    return reason is None


def cpu_was_asked_for(visible: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs: empty, or beginning with -1."""
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def nvidia_devices(machine: Path = MACHINE) -> list[str]:
    """Return signs of NVIDIA GPUs that need no library: device files, the driver's list.

    Args:
        machine: Root of the file system.
    """
    files = [*machine.glob("dev/nvidia[0-9]*"), *machine.glob("proc/driver/nvidia/gpus/*")]
    return [str(path) for path in sorted(files)]


def why_no_cuda() -> str | None:
    """Return torch's reason why it cannot use a GPU, as a clause; None if it can."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the same reason that the clause names
        if torch.cuda.is_available():
            return None
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            reason = lines[0].split(". ")[0].rstrip(".")
            hidden = f" (with {VISIBLE}={os.environ[VISIBLE]})" if VISIBLE in os.environ else ""
            return f"torch {torch.__version__} cannot use CUDA: {reason}{hidden}"
    return f"torch {torch.__version__} finds no CUDA device"


def own_device(local_rank: int, machine: Path = MACHINE) -> torch.device:
    """Return the device of this rank, and make it torch's current one.

    Args:
        local_rank: Number of the rank on its node.
        machine: Root of the file system.

    Raises:
        UserError: a GPU machine whose CUDA does not work, or more ranks than GPUs.
    """
    import torch

    if not use_cuda(machine):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = gpu_index(local_rank, count)
    if index >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU: {count} visible on this node; "
            "start at most one rank per GPU",
            rank_specific=True,
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gpu_index(local_rank: int, count: int) -> int:
    """Return the index of a rank's GPU among those it sees; `count` or more if it has none.

    Args:
        local_rank: Number of the rank on its node.
        count: Number of GPUs that the rank sees.
    """
    return 0 if is_shown_its_own(count) else local_rank


def is_shown_its_own(count: int) -> bool:
    """Return whether srun shows each task only its own GPU, whatever the local rank.

    False where a task sees several GPUs of which CUDA can use only one.

    Args:
        count: Number of GPUs that this rank sees.
    """
    is_shown_one = "," not in os.environ.get(VISIBLE, "")
    return count == 1 and is_shown_one and not one_environment_for_all()


def gpu_names(visible: str | None, count: int) -> list[str]:
    """Return the GPUs of this process, as CUDA_VISIBLE_DEVICES names them.

    Args:
        visible: Value of that variable; None if it is not set.
        count: Number of GPUs that CUDA uses; it ignores -1, an unknown name and everything after
            them.
    """
    names = [str(index) for index in range(count)] if visible is None else visible.split(",")
    return [name.strip() for name in names[:count]]


# Dense bf16 tensor-core FLOP/s in units of 1e12, from NVIDIA's data sheets (some print only twice
# that, the figure with sparsity). The first match wins, so a narrower name stands before the wider
# one.
PEAK_BF16_TFLOPS = (
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800 PCIe", 756.0),
    ("H800", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


def peak_flops(device_name: str, dtype: str = "bf16") -> float | None:
    """Return the peak dense FLOP/s of a device.

    The peak of a slice of a device (MIG) is unknown: its name does not tell its share of the
    arithmetic.

    Args:
        device_name: Name from `torch.cuda.get_device_name`.
        dtype: "bf16" or "fp32". There is no entry for fp32: its peak depends on whether TF32 is
            allowed.

    Returns:
        FLOP/s; None for an unknown device.
    """
    if dtype != "bf16" or re.search(r"\bMIG\b", device_name):
        return None
    for name, tflops in PEAK_BF16_TFLOPS:
        if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):
            return tflops * 1e12
    return None
