"""Random streams: one for each row of an initial weight, and two for dropout.

Initial values. Each row of each full weight matrix has a stream named by (seed, name of the weight,
row), so a rank draws its own rows only and their values do not depend on the layout.

Dropout. Replicated activations, which all tensor-parallel ranks hold alike, are dropped alike, with
numbers of the default generator. Sharded activations are dropped with numbers of the rank's own
stream, in megatron-core's tracker. Sequence parallelism shards all activations, and megatron-core
enters the rank's own stream around all layers; with one tensor-parallel rank the two streams need
not differ.

In eager mode the attention enters the rank's own stream itself. A compiled graph cannot: it draws
all numbers from the default generator. Around a compiled layer the two streams are therefore
exchanged, and the masks of replicated activations come from an operator that the compiler treats as
opaque.

Version-sensitive: reads and sets the states of megatron-core's random-number tracker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig

OWN = "model-parallel-rng"  # megatron-core's name
REPLICATED = "replicated"
States = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""States of a device's default generator, and of every stream of megatron-core's tracker."""


def normal_rows(
    seed: int, name: str, rows: Iterable[int], columns: int, std: float
) -> torch.Tensor:
    """Draw rows of the full matrix called `name`.

    A row depends on (seed, name, row number, columns) only, never on which other rows are drawn.

    Args:
        columns: columns of the full matrix.

    Returns:
        N(0, std²) entries, float32 `[len(rows), columns]`.
    """
    key = np.frombuffer(
        hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), dtype=np.uint64
    )
    numbers = list(rows)
    out = np.empty((len(numbers), columns), dtype=np.float32)
    for position, row in enumerate(numbers):
        # The counter's low words advance while a row is drawn; the row number never overlaps them.
        stream = np.random.Philox(key=key, counter=[0, 0, row, 0])
        np.random.Generator(stream).standard_normal(dtype=np.float32, out=out[position])
    return torch.from_numpy(out).mul_(std)


def random_states(device: torch.device) -> States:
    """Return the states of all streams."""
    return _default_state(device), get_cuda_rng_tracker().get_states()


def set_random_states(states: States, device: torch.device) -> None:
    """Set the states of all streams.

    Args:
        states: result of `random_states`.
        device: device of the default generator.
    """
    default, streams = states
    _set_default_state(default, device)
    get_cuda_rng_tracker().set_states(dict(streams))


@contextmanager
def random_numbers_from(states: States, device: torch.device) -> Iterator[None]:
    """Start all streams at `states` inside the context, and restore them after it.

    Args:
        states: result of `random_states`.
        device: device of the default generator.
    """
    outer_states = random_states(device)
    set_random_states(states, device)
    try:
        yield
    finally:
        set_random_states(outer_states, device)


def own_stream(config: TransformerConfig) -> AbstractContextManager[None]:
    """Return a context in which sharded activations are dropped by the rank's own stream."""
    if not has_own_stream(config) or torch.compiler.is_compiling():
        return nullcontext()
    fork: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
    return fork


def has_own_stream(config: TransformerConfig) -> bool:
    """Return whether dropout of sharded activations needs another stream than the code around."""
    return config.tensor_model_parallel_size > 1 and not config.sequence_parallel


@contextmanager
def own_stream_by_default(device: torch.device) -> Iterator[None]:
    """Exchange the streams: the default generator draws the rank's, the shared one is set aside.

    `replicated_mask` draws from the shared stream.
    """
    tracker = get_cuda_rng_tracker()
    default, streams = random_states(device)
    tracker.set_states(streams | {REPLICATED: default})
    _set_default_state(streams[OWN], device)
    try:
        yield
    finally:
        # Both streams have advanced meanwhile: they go on from there, not from the start.
        streams = tracker.get_states()
        default = streams.pop(REPLICATED)
        tracker.set_states(streams | {OWN: _default_state(device)})
        _set_default_state(default, device)


@torch.library.custom_op("ora_pretrain::replicated_mask", mutates_args=())
def replicated_mask(like: torch.Tensor, keep: float) -> torch.Tensor:
    """Draw booleans that are true with probability `keep`, within `own_stream_by_default`.

    Args:
        like: tensor whose shape the mask has.
    """
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
