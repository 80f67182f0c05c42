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
from typing import Any, cast

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
from pretrain.ranks.environment import LaunchEnvironment, meeting_point
from pretrain.ranks.release import existing_groups, forget_models, release_groups

SUPPORTED_DEEPSPEED = "0.19."


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
    """Groups that the process had before, and keeps: who has joined the other ranks also leaves
    them."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class DeepSpeedMpu:
    """The model-parallel interface DeepSpeed asks for, answered by megatron-core's parallel_state.

    DeepSpeed's "model parallel" is our tensor parallel: there is no pipeline. It must not have
    `initialize_sequence_parallel`, by which DeepSpeed recognises its own Ulysses groups.
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

    In megatron-core's order: tensor-parallel ranks are neighbours (same node), and data-parallel
    groups stride over them.

    Args:
        launch: this process's place among the ranks.
        tensor_parallel_size: ranks that share one copy of the model.
        timeout_seconds: after which a collective that hangs ends the run.

    Raises:
        UserError: the other ranks did not come within the timeout.
        MethodError: torch is older than any that was tested.
    """
    from megatron.core import parallel_state

    warning = untested_torch()
    if warning is not None and launch.rank == 0:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    if tensor_parallel_size > 1:
        # megatron-core orders its overlapped collectives by it; without them it would only keep
        # ZeRO's stream from overlapping. CUDA reads it when it is first used.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = own_device(launch.local_rank)
    # DeepSpeed takes the GPU of this number, and neither srun nor a process on its own has it.
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
            # They become a timedelta, so parts of a minute count.
            distributed_timeout_minutes=timeout_seconds / 60,
            # They would be second copies, for parts of it that are not used here.
            create_gloo_process_groups=False,
        )
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
    """Leave the groups that `initialize_distributed` made, and let go of all that holds them."""
    forget_models()
    release_groups(keep=context.earlier_groups)
    gc.collect()  # models refer to their groups, and to themselves


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed for torch's device, without its chatter and its shared-memory all-reduce.

    Its `BF16_Optimizer` would print eighteen lines about memory, after collecting all garbage six
    times, and wait for the device to learn whether the norm is finite, which `GuardedUpdate` judges
    on the device, and copy each gradient to fp32 before adding it.

    On the CPU `deepspeed.comm.torch` builds an op that leaves 66 MB per rank and run in /dev/shm
    (`deepspeed_allreduce_buffer_*`) and nothing frees them; gloo does the same all-reduce.
    Importing that module by attribute yields PyTorch's own, hence `sys.modules`.

    Raises:
        UserError: a DeepSpeed this program was not written against.
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
    """Stand in for what DeepSpeed would print, wait for or build."""


def _never(norm: object) -> bool:
    """Stand in for DeepSpeed's question whether the norm is finite."""
    return False


def _mark_not_finite(norm: torch.Tensor, device: object = None, val: float = -1.0) -> None:
    """Put `val` in the place of what is not finite, without a copy to the device."""
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

    Counting micro batches over the whole global batch makes the masks independent of how it is
    spread over data-parallel ranks. A resumed step draws what the uninterrupted one drew: no
    generator has to be saved.

    Args:
        run_seed: `run.seed`.
        step: of the optimizer.
        micro_batch: its number in the global batch.
        tensor_parallel_rank: of this rank.
    """
    shared = _hash_seed(run_seed, step, micro_batch, "shared")
    own = _hash_seed(run_seed, step, micro_batch, f"tensor-parallel-{tensor_parallel_rank}")
    seed_dropout(shared, own)


def agree(values: list[float], device: torch.device) -> list[float]:
    """Sum each number over all ranks, so that every rank takes the same decision (collective).

    Args:
        values: own numbers.
        device: of the collective.
    """
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def require_equal_on_all_ranks(name: str, value: str, remedy: str) -> None:
    """Require the same `value` on all ranks (collective).

    Args:
        name: of what is compared, for the message.
        value: of this rank.
        remedy: end of the message.

    Raises:
        UserError: on every rank, naming what differs and the first rank that differs.
    """
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise UserError(f"{name} differs between rank 0 and rank {different[0]}; {remedy}")


@contextmanager
def together() -> Iterator[None]:
    """Raise on all ranks what one of them raises in the block (collective).

    Raises:
        UserError: the same on every rank: the error of the first rank that failed, an OSError or a
            MethodError as a sentence.
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
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    first = next((each for each in failures if each is not None), None)
    if first is not None:
        raise first


def _rendezvous(
    backend: str, launch: LaunchEnvironment, timeout: timedelta, gpu: torch.device | None
) -> None:
    """Join the other ranks; with this rank's GPU named, NCCL connects at once."""
    alone = launch.world_size == 1 and meeting_point() is None
    try:
        if launch.rank > 0:
            wait_for_first_rank(timeout)
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
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"port {port}, which MASTER_PORT names, is taken by another program on {host}; set "
                "MASTER_PORT to a free one",
                rank_specific=True,
            ) from error
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]]).rstrip(".")
        raise UserError(
            f"rank {launch.rank} waited {timeout.total_seconds():.0f} s for {launch.world_size} "
            f"ranks at {host}:{port} and they did not all come ({reason}); check that every rank "
            "started and that the address is reachable",
            rank_specific=True,
        ) from error


def wait_for_first_rank(timeout: timedelta) -> None:
    """Wait until rank 0 listens.

    torch would wait too, but twice as long and with pages of C++ on stderr.
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
