"""Making activations again in backward instead of keeping them, with the same random numbers.

Version-sensitive: `remade_in_backward` asks torch for the saved-tensor hooks that are around it.
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


@contextmanager
def remade_in_backward(
    tensors: Sequence[torch.Tensor], remake: Callable[[], Sequence[torch.Tensor]]
) -> Iterator[None]:
    """What is computed inside keeps none of `tensors` for its backward pass, which calls `remake` for them.

    Args:
        remake: makes all of them again, bit by bit; called once for one backward pass, without gradients.
    """
    # Hooks replace the ones around them; what is not made again goes on to those.
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = around if around is not None else (_same, _same)
    together = _Remade(remake)

    def keep(tensor: torch.Tensor) -> Any:
        for number, own in enumerate(tensors):
            if _same_memory(tensor, own):
                return _Remake(together, number)
        return pack(tensor)

    def give(kept: Any) -> torch.Tensor:
        made: torch.Tensor = kept.together.take(kept.number) if isinstance(kept, _Remake) else unpack(kept)
        return made

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        yield


@dataclass
class _Remade:
    """Tensors that are made together, each kept until it is asked for."""

    remake: Callable[[], Sequence[torch.Tensor]]
    made: dict[int, torch.Tensor] = field(default_factory=dict)

    def take(self, number: int) -> torch.Tensor:
        if number not in self.made:
            with torch.no_grad():
                self.made = dict(enumerate(self.remake()))
        return self.made.pop(number)


@dataclass(frozen=True)
class _Remake:
    together: _Remade
    number: int


def _same(tensor: Any) -> Any:
    return tensor


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())
