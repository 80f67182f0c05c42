"""Release of a finished training: references that megatron-core and DeepSpeed keep.

A process group keeps its threads and sockets as long as anything refers to it. Both libraries refer
to the groups of past trainings, or to models that hold them, from module globals and from caches on
classes.

Version-sensitive: the names below are those of megatron-core 0.16 to 0.19 and DeepSpeed 0.19. A
renamed one is noticed by tests/distributed/test_release.py, which counts the threads of a process
that trains many times.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world


def existing_groups() -> frozenset[dist.ProcessGroup]:
    """Return every process group this process is a member of."""
    return frozenset(_world.pg_map)


def release_engine(engine: Any) -> None:
    """Remove DeepSpeed's hooks from the model, and empty the caches that keep engine and model."""
    engine.destroy()
    forget_models()


def forget_models() -> None:
    """Clear the libraries' caches that keep references to modules."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()  # keyed by the module and by its process group
    parameter_offload.FWD_MODULE_STACK.clear()  # ZeRO-3 leaves the whole model on it
    # ZeRO-3: keyed by every submodule of the model. The cache is inside a wrapper for the profiler.
    wrapper = vars(PartitionedParameterCoordinator)[
        "_PartitionedParameterCoordinator__params_to_release"
    ]
    for cell in wrapper.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def release_groups(keep: frozenset[dist.ProcessGroup]) -> None:
    """Destroy every group but `keep`; if `keep` is empty, shut torch.distributed down."""
    from deepspeed import comm
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    # The two groups that megatron-core forgets:
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
    if not keep:
        comm.destroy_process_group()  # torch's groups, and DeepSpeed's records of them
        return
    for group in sorted(existing_groups() - keep, key=lambda group: group.group_name):
        comm.destroy_process_group(group)
