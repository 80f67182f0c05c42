"""Process groups, this rank's device, seeds, and small collectives.

Version-sensitive: `import_deepspeed` replaces five DeepSpeed 0.19 internals, the only ones that are
replaced.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_patches.engine.compat import (
    one_group_per_ranks,
    prepare_megatron_core,
    seed_dropout,
    untested_torch,
    without_unused_packages,
)
from megatron_patches.errors import MethodError
from pretrain.errors import UserError
from pretrain.ranks.devices import own_device
from pretrain.ranks.environment import LaunchEnvironment, launcher_listens, meeting_point
from pretrain.ranks.release import existing_groups, forget_models, release_groups

SUPPORTED_DEEPSPEED = "0.19."
SELF_SECONDS = 5.0
"""Longest attempt of rank 0 to reach itself."""
T = TypeVar("T")


@dataclass(frozen=True)
class ParallelContext:
    """The process groups of this rank, and its place in them."""

    rank: int
    world_size: int
    device: torch.device
    tensor_parallel_rank: int
    tensor_parallel_size: int
    data_parallel_rank: int
    data_parallel_size: int
    tensor_parallel_group: dist.ProcessGroup
    mpu: DeepSpeedMpu
    earlier_groups: frozenset[dist.ProcessGroup]
    """Groups that existed before this run joined; whoever created them also destroys them."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class DeepSpeedMpu:
    """The model-parallel interface that DeepSpeed expects, on megatron-core's parallel_state.

    DeepSpeed's "model parallel" is our tensor parallel: there is no pipeline. This class must not
    define `initialize_sequence_parallel`, by which DeepSpeed recognises its own Ulysses groups.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self.get_model_parallel_rank = parallel_state.get_tensor_model_parallel_rank
        self.get_model_parallel_world_size = parallel_state.get_tensor_model_parallel_world_size
        self.get_model_parallel_group = parallel_state.get_tensor_model_parallel_group
        self.get_tensor_model_parallel_rank = parallel_state.get_tensor_model_parallel_rank
        self.get_tensor_model_parallel_world_size = (
            parallel_state.get_tensor_model_parallel_world_size
        )
        self.get_tensor_model_parallel_group = parallel_state.get_tensor_model_parallel_group
        self.get_tensor_model_parallel_src_rank = parallel_state.get_tensor_model_parallel_src_rank
        self.get_data_parallel_rank = parallel_state.get_data_parallel_rank
        self.get_data_parallel_world_size = parallel_state.get_data_parallel_world_size
        self.get_data_parallel_group = parallel_state.get_data_parallel_group


def initialize_distributed(
    launch: LaunchEnvironment, tensor_parallel_size: int, timeout_seconds: int
) -> ParallelContext:
    """Join the other ranks and build the tensor- and data-parallel groups.

    The order is megatron-core's: tensor-parallel ranks are neighbours (same node), and
    data-parallel groups stride over them.

    Args:
        tensor_parallel_size: Number of ranks that share one copy of the model.
        timeout_seconds: Seconds after which a hanging collective ends the run.

    Raises:
        UserError: the other ranks did not come within the timeout.
        MethodError: torch is older than any that was tested.
    """
    from megatron.core import parallel_state

    warning = untested_torch()
    if warning is not None and launch.rank == 0:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    if tensor_parallel_size > 1:
        # megatron-core orders its overlapped tensor-parallel collectives by this variable. Without
        # them it would only keep ZeRO's stream from overlapping. CUDA reads it on its first use.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = own_device(launch.local_rank)
    # DeepSpeed takes the GPU of this number; neither srun nor a single process sets the variable.
    os.environ["LOCAL_RANK"] = str(launch.local_rank if device.index is None else device.index)
    timeout = timedelta(seconds=timeout_seconds)
    backend = "nccl" if device.type == "cuda" else "gloo"
    earlier_groups = existing_groups()
    if not dist.is_initialized():
        _rendezvous(backend, launch, timeout, device if device.type == "cuda" else None)
    import_deepspeed().comm.init_distributed(
        dist_backend=backend, dist_init_required=False, verbose=False
    )
    with one_group_per_ranks():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel_size,
            # megatron-core makes a timedelta of them, so fractions of a minute count.
            distributed_timeout_minutes=timeout_seconds / 60,
            # Second copies of the groups, for parts of megatron-core that are not used here.
            create_gloo_process_groups=False,
        )
    if backend == "gloo":
        # A rank that has its last group may close it while gloo on another still connects to it.
        dist.barrier()
    prepare_megatron_core(device)
    return ParallelContext(
        rank=launch.rank,
        world_size=launch.world_size,
        device=device,
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        tensor_parallel_group=parallel_state.get_tensor_model_parallel_group(),
        mpu=DeepSpeedMpu(),
        earlier_groups=earlier_groups,
    )


def shutdown_distributed(context: ParallelContext) -> None:
    """Destroy the groups of `initialize_distributed` and release everything that holds them."""
    forget_models()
    release_groups(keep=context.earlier_groups)
    gc.collect()  # models refer to their groups, and are parts of reference cycles


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed for torch's device, without its log lines and shared-memory all-reduce.

    Unpatched, `BF16_Optimizer` prints eighteen lines about memory after six garbage collections. It
    also waits for the device to learn whether the norm is finite, which `GuardedUpdate` decides on
    the device, and copies each gradient to fp32 before adding it.

    On the CPU `deepspeed.comm.torch` builds an op that leaves 66 MB per rank and run in /dev/shm
    (`deepspeed_allreduce_buffer_*`), which nothing frees; gloo does the same all-reduce. Importing
    that module by attribute yields PyTorch's own, hence `sys.modules`.

    Raises:
        UserError: the installed DeepSpeed is of an unsupported version.
    """
    ours = version("deepspeed")
    if not ours.startswith(SUPPORTED_DEEPSPEED):
        raise UserError(
            f"deepspeed {ours} is installed but this program was written against "
            f"{SUPPORTED_DEEPSPEED}x; pip install 'deepspeed=={SUPPORTED_DEEPSPEED}*'"
        )
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with without_unused_packages():
        import deepspeed
        import deepspeed.comm.torch
        import deepspeed.ops.triton_ops  # as the engine's first step does
        from deepspeed.runtime import bf16_optimizer, utils

    bf16_optimizer.see_memory_usage = _nothing
    bf16_optimizer.is_invalid_grad_norm = _never
    bf16_optimizer.BF16_Optimizer._update_hp_grad = _add_gradient
    utils.mask_nan_or_inf_with_val_inplace = _mark_not_finite
    if not torch.cuda.is_available():
        module: Any = sys.modules["deepspeed.comm.torch"]
        module.build_shm_op = _nothing
    logging.getLogger("DeepSpeed").setLevel(os.environ.get("DEEPSPEED_LOG_LEVEL", "WARNING"))
    return deepspeed


def _nothing(*arguments: object, **keywords: object) -> None:
    """Replace a function of DeepSpeed that prints, waits or builds an op."""


def _never(norm: object) -> bool:
    """Replace DeepSpeed's check for an invalid norm, which waits for the device."""
    return False


def _mark_not_finite(norm: torch.Tensor, device: object = None, val: float = -1.0) -> None:
    """Replace values that are not finite by `val`, without a copy to the device."""
    norm.masked_fill_(~norm.isfinite(), val)


def _add_gradient(
    optimizer: Any, parameter: torch.Tensor, group: int, index: int, clear_lp_grads: bool
) -> None:
    """Add a bf16 gradient to the fp32 sum that `BF16_Optimizer` keeps, in one pass."""
    if parameter.grad is not None:
        total = optimizer.fp32_groups_gradients[group][index]
        total.add_(parameter.grad.view_as(total))
        cast(Any, parameter)._hp_grad = total
        optimizer.fp32_groups_has_gradients[group][index] = True
        if clear_lp_grads:
            parameter.grad.zero_()


def set_seeds(run_seed: int, step: int, micro_batch: int, tensor_parallel_rank: int) -> None:
    """Make dropout a function of (seed, step, micro batch, tensor-parallel rank).

    Micro batches are counted over the global batch, so the masks do not depend on the number of
    data-parallel ranks. A resumed step draws the same masks as an uninterrupted one, so no
    generator has to be saved.

    Args:
        micro_batch: Number of the micro batch in the global batch.
    """
    shared_seed = _hash_seed(run_seed, step, micro_batch, "shared")
    rank_seed = _hash_seed(run_seed, step, micro_batch, f"tensor-parallel-{tensor_parallel_rank}")
    seed_dropout(shared_seed, rank_seed)


def agree(values: list[float], device: torch.device) -> list[float]:
    """Return each number's sum over all ranks, so that all ranks decide alike (collective).

    Args:
        values: This rank's numbers.
        device: Device of the collective.
    """
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank of a group, or of all ranks (collective)."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def require_equal_on_all_ranks(name: str, value: str, remedy: str) -> None:
    """Require the same `value` on all ranks (collective).

    Args:
        name: Noun phrase for the message.
        remedy: End of the message.

    Raises:
        UserError: on every rank, naming the first rank whose value differs.
    """
    values = gathered(value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise UserError(f"{name} differs between rank 0 and rank {different[0]}; {remedy}")


@contextmanager
def together() -> Iterator[None]:
    """Raise an error of one rank in the block on all ranks (collective).

    Raises:
        UserError: the error of the first rank that failed, the same on every rank; an OSError or a
            MethodError becomes a sentence.
    """
    failure: UserError | None = None
    try:
        yield
    except UserError as error:
        failure = error
    except MethodError as error:
        failure = UserError(str(error))
    except OSError as error:
        failure = UserError(
            f"{error.filename}: {error.strerror}; make room, or fix its permissions, and start "
            "again"
        )
    first = next((other for other in gathered(failure) if other is not None), None)
    if first is not None:
        raise first


def _rendezvous(
    backend: str, launch: LaunchEnvironment, timeout: timedelta, gpu: torch.device | None
) -> None:
    """Join the other ranks; if `gpu` is set, NCCL connects at once."""
    alone = launch.world_size == 1 and meeting_point() is None
    try:
        if launch.rank > 0 or launcher_listens():
            wait_for_first_rank(timeout)
        elif not alone:
            _require_own_address()
        dist.init_process_group(
            backend,
            store=dist.HashStore() if alone else None,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=gpu,
        )
    # torch.distributed's own errors, and gloo's, are RuntimeErrors.
    except (RuntimeError, OSError) as error:
        host, port = meeting_point() or ("this process", "-")
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]]).rstrip(".")
        problem = (
            f"rank {launch.rank} waited {timeout.total_seconds():.0f} s for {launch.world_size} "
            f"ranks at {host}:{port} and they did not all come ({reason}); check that every rank "
            "started and that the address is reachable"
        )
        if "EADDRINUSE" in str(error):
            problem = (
                f"port {port}, which MASTER_PORT names, is taken by another program on {host}; set "
                "MASTER_PORT to a free one"
            )
        elif "Unable to find interface" in str(error):
            problem = (
                "gloo finds no network interface with this node's address; bring the loopback "
                "device up (`ip link set lo up`), or name another in GLOO_SOCKET_IFNAME"
            )
        raise UserError(problem, rank_specific=True) from error


def _require_own_address() -> None:
    """Check that rank 0 reaches itself where the others will look for it.

    torch would try until the timeout, with pages of C++ on stderr.

    Raises:
        UserError: the address is not known, or there is no way to it.
    """
    address = meeting_point()
    assert address is not None, "only a process on its own has no meeting point"
    try:
        with socket.create_server(("", 0)) as listener:
            port = listener.getsockname()[1]
            socket.create_connection((address[0], port), timeout=SELF_SECONDS).close()
    except (ConnectionRefusedError, TimeoutError):
        pass  # another interface, or a filter of ports: torch finds out
    except OSError as error:
        raise UserError(
            f"rank 0 cannot reach {address[0]}, where MASTER_ADDR says that the ranks meet "
            f"({error.strerror or error}); set it to an address of rank 0's node, and look at the "
            "network there",
            rank_specific=True,
        ) from error


def wait_for_first_rank(timeout: timedelta) -> None:
    """Wait until rank 0 listens.

    torch would wait as well, but twice as long and with pages of C++ on stderr.
    """
    address = meeting_point()
    assert address is not None, "a process on its own has no other rank to wait for"
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection(address, timeout=timeout.total_seconds()).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _hash_seed(*parts: object) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch seeds are signed 64-bit
