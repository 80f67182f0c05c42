"""Making activations again in backward instead of keeping them, with the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils.checkpoint import checkpoint

from megatron_patches.documents import Visible
from megatron_patches.random_streams import random_numbers_from, random_states


def recomputed(
    function: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    attention_mask: Visible,
) -> torch.Tensor:
    """`function(hidden_states, attention_mask)`, of which only the arguments are kept for backward."""
    device = hidden_states.device
    states = random_states(device)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), random_numbers_from(states, device)

    result: torch.Tensor = checkpoint(
        function,
        hidden_states,
        attention_mask,
        use_reentrant=False,
        preserve_rng_state=False,  # it would not know the tracker's
        context_fn=contexts,
    )
    return result
