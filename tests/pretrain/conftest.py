"""One rank in the test's own process, for tests of models, engines and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.single_process import one_process


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    """Process groups of this process alone; what megatron-core replaces is put back."""
    current_device = torch.cuda.current_device
    with one_process() as alone:
        yield alone
    torch.cuda.current_device = current_device
