"""The two streams that dropout draws from, and where they change places.

What tensor-parallel ranks hold alike is dropped alike on all of them, by numbers of the default generator.
What is sharded is dropped by numbers of a stream of the rank's own, in megatron-core's tracker; under
sequence parallelism, which shards everything, megatron-core enters it around all layers, and on one rank
there is nothing to tell apart.

Eagerly the attention enters its stream by itself. A graph cannot: it draws all its numbers from the default
generator. So around a compiled layer the streams change places, and the replicated masks, whose numbers are
then elsewhere, come from an operator that the compiler does not look into.

Version-sensitive: reads and sets the states of megatron-core 0.16's random-number tracker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig

OWN = "model-parallel-rng"  # megatron-core's name
REPLICATED = "replicated"
States = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Of the default generator of a device, and of every stream of the tracker."""


def random_states(device: torch.device) -> States:
    """Where all streams are."""
    return _default_state(device), get_cuda_rng_tracker().get_states()


def set_random_states(states: States, device: torch.device) -> None:
    """Put all streams there."""
    default, streams = states
    _set_default_state(default, device)
    get_cuda_rng_tracker().set_states(dict(streams))


@contextmanager
def random_numbers_from(states: States, device: torch.device) -> Iterator[None]:
    """All streams begin at `states`, and go on as if nothing had been."""
    before = random_states(device)
    set_random_states(states, device)
    try:
        yield
    finally:
        set_random_states(before, device)


def own_stream(config: TransformerConfig) -> AbstractContextManager[None]:
    """Around what drops sharded activations: draws from the rank's own stream, if that is another."""
    if not has_own_stream(config) or torch.compiler.is_compiling():
        return nullcontext()
    fork: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
    return fork


def has_own_stream(config: TransformerConfig) -> bool:
    """Whether sharded activations are dropped by another stream than what is around them."""
    return config.tensor_model_parallel_size > 1 and not config.sequence_parallel


@contextmanager
def own_stream_by_default(device: torch.device) -> Iterator[None]:
    """The default generator draws from the rank's own stream, `replicated_mask` from the shared one."""
    tracker = get_cuda_rng_tracker()
    default, streams = random_states(device)
    tracker.set_states(streams | {REPLICATED: default})
    _set_default_state(streams[OWN], device)
    try:
        yield
    finally:
        streams = tracker.get_states()
        default = streams.pop(REPLICATED)
        tracker.set_states(streams | {OWN: _default_state(device)})
        _set_default_state(default, device)


@torch.library.custom_op("ora_pretrain::replicated_mask", mutates_args=())
def replicated_mask(like: torch.Tensor, keep: float) -> torch.Tensor:
    """Booleans of the shape of `like`, true with probability `keep`; within `own_stream_by_default`."""
    with get_cuda_rng_tracker().fork(REPLICATED):
        return torch.empty_like(like).bernoulli_(keep).bool()


@replicated_mask.register_fake
def _(like: torch.Tensor, keep: float) -> torch.Tensor:
    return torch.empty_like(like, dtype=torch.bool)


def _default_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_default_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
