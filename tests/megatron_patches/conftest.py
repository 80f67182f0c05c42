"""One rank in the test's own process, for all that does not depend on how a layer is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_patches.engine.compat import prepare_imports, prepare_megatron_core


@pytest.fixture(scope="package")
def one_rank() -> Iterator[dist.ProcessGroup]:
    """The tensor-parallel group of a world of one gloo rank on the CPU.

    Gone after the package's tests.
    """
    prepare_imports()
    from megatron.core import parallel_state

    current_device = torch.cuda.current_device
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=limit, store=dist.HashStore(), world_size=1, rank=0)
    parallel_state.initialize_model_parallel()
    prepare_megatron_core(torch.device("cpu"))
    yield parallel_state.get_tensor_model_parallel_group()
    torch.cuda.current_device = current_device
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
