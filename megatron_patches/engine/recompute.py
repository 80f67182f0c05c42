"""Recomputation of activations in backward, instead of keeping them, with the same random numbers.

Version-sensitive: `recomputed_in_backward` asks torch for the saved-tensor hooks of the code around
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron_patches.engine.documents import Visible
from megatron_patches.engine.random_streams import random_numbers_from, random_states


def recomputed(
    function: Callable[..., torch.Tensor], hidden_states: torch.Tensor, attention_mask: Visible
) -> torch.Tensor:
    """Return `function(hidden_states, attention_mask)`, keeping only the arguments for backward.

    Args:
        function: map of hidden states and mask to hidden states.
        hidden_states: `[seq(/tp), batch, hidden]`.
        attention_mask: `[batch, 1, seq, seq]` bool, True where a position must not see another, the
            future included, or documents that stand alone; None: causal.
    """
    device = hidden_states.device
    # The states before the forward pass: backward must draw the same dropout masks again.
    states = random_states(device)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), random_numbers_from(states, device)

    result: torch.Tensor = checkpoint(
        function,
        hidden_states,
        attention_mask,
        use_reentrant=False,
        preserve_rng_state=False,  # torch does not know the states of megatron-core's tracker
        context_fn=contexts,
    )
    return result


@contextmanager
def recomputed_in_backward(
    tensors: Sequence[torch.Tensor], recompute: Callable[[], Sequence[torch.Tensor]]
) -> Iterator[None]:
    """Recompute tensors in backward instead of saving them in operations inside the context.

    Args:
        tensors: tensors to recompute.
        recompute: function that returns all of them with the same bits; called once per backward
            pass, without gradients.
    """
    # Hooks replace those of the code around them, which still apply to all other tensors.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack_other, unpack_other = outer if outer is not None else (_same, _same)
    group = _RecomputedGroup(recompute)

    def pack(tensor: torch.Tensor) -> Any:
        for number, recomputed_tensor in enumerate(tensors):
            # Autograd may pass another tensor object of the same memory.
            if tensor.is_set_to(recomputed_tensor):
                return _Placeholder(group, number)
        return pack_other(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _Placeholder):
            return packed.group.pop(packed.number)
        other: torch.Tensor = unpack_other(packed)
        return other

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@dataclass
class _RecomputedGroup:
    """Tensors that are recomputed together, each held until backward takes it."""

    recompute: Callable[[], Sequence[torch.Tensor]]
    results: dict[int, torch.Tensor] = field(default_factory=dict)

    def pop(self, number: int) -> torch.Tensor:
        # A second backward pass over a graph finds the results gone, and computes them again.
        if number not in self.results:
            with torch.no_grad():
                self.results = dict(enumerate(self.recompute()))
        return self.results.pop(number)


@dataclass(frozen=True)
class _Placeholder:
    """Stand-in for a tensor that autograd would save."""

    group: _RecomputedGroup
    number: int


def _same(tensor: Any) -> Any:
    return tensor
