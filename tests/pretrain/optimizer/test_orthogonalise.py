"""Newton-Schulz iterations, and copies that are joined."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_patches.recipe.matrices import Stack
from pretrain.optimizer import ownership
from pretrain.optimizer.orthogonalise import Copy, joined, newton_schulz
from pretrain.optimizer.ownership import Exchange, Holding, Matrix, Piece


@pytest.mark.parametrize("size", [(3, 5, 9), (2, 9, 5), (1, 512, 520), (1, 530, 514)])
def test_iterations_are_those_of_the_formula(size: tuple[int, int, int]) -> None:
    matrices = 1e-4 * torch.randn(size, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        updates = newton_schulz(matrices.clone(), steps=5)
    assert counter.get_total_flops() == Stack(*size, height=size[1]).flops(5)
    a, b, c = 3.4445, -4.775, 2.0315
    for matrix, update in zip(matrices.double(), updates, strict=True):
        x = matrix / matrix.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        assert (update - x).abs().max() < 1e-5
        assert torch.linalg.svdvals(x).max() < 1.3


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not newton_schulz(torch.zeros(1, 4, 6), steps=5).any()


def test_joined_copies_copy_the_same() -> None:
    # Heads of [q q k v] into queries, keys and values behind each other: an operation each.
    places = [(8 * group, 4 * group, 4) for group in range(3)]
    places += [(8 * group + 4, 12 + 2 * group, 2) for group in range(3)]
    places += [(8 * group + 6, 18 + 2 * group, 2) for group in range(3)]
    places += [(24, 26, 2)]  # at another distance
    single = [Copy(0, at, buffer_at, length=length) for at, buffer_at, length in places]
    heads = [
        Copy(0, at + half, buffer_at + half, length=length // 2)
        for at, buffer_at, length in places
        for half in (0, length // 2)
    ]
    flat = torch.arange(26.0)
    for copies in (joined(single), joined(heads)):
        assert len(copies) == 4
        buffer = torch.zeros(28)
        back = torch.zeros(26)
        for copy in copies:
            copy.of_buffer(buffer).copy_(copy.of_tensor([flat]))
            copy.of_tensor([back]).copy_(copy.of_buffer(buffer))
        assert torch.equal(back, flat)
        assert buffer[12:18].tolist() == [4.0, 5.0, 12.0, 13.0, 20.0, 21.0]


def test_of_an_exchange_is_in_memory_what_is_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two, which have half of each matrix; the other sends ones."""
    gone: list[weakref.ref[torch.Tensor]] = []

    def exchanged(sent: torch.Tensor, sent_lengths: list[int], others: list[int]) -> torch.Tensor:
        assert sent.numel() == sum(sent_lengths) == 16 and all(buffer() is None for buffer in gone)
        received = torch.ones(sum(others), dtype=sent.dtype)
        gone.extend((weakref.ref(sent), weakref.ref(received)))
        return received

    monkeypatch.setattr(ownership, "_exchanged", exchanged)
    matrices = [Matrix("weight", Stack(1, 4, 4, height=4), shares=1)] * 2
    held = [
        Holding(rank, tuple(Piece(n, start=8 * rank, length=8, flat=0, at=8 * n) for n in (0, 1)))
        for rank in (0, 1)
    ]
    exchange = Exchange(matrices, held, rank=0, replicated=False, factors=[1.0, 2.0])
    flat = torch.zeros(16)
    exchange.orthogonalise([flat], steps=5, dtype=torch.float32)
    assert flat.tolist() == [1.0] * 8 + [2.0] * 8
