"""Newton-Schulz iterations, and copies that are joined."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_patches.recipe.matrices import Stack
from pretrain.training.orthogonalise import Copy, joined, newton_schulz


@pytest.mark.parametrize("size", [(3, 5, 9), (2, 9, 5), (1, 512, 520), (1, 530, 514)])
def test_iterations_are_those_of_the_formula(size: tuple[int, int, int]) -> None:
    given = 1e-4 * torch.randn(size, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        found = newton_schulz(given.clone(), steps=5)
    assert counter.get_total_flops() == Stack(*size, height=size[1]).flops(5)
    a, b, c = 3.4445, -4.775, 2.0315
    for matrix, own in zip(given.double(), found, strict=True):
        x = matrix / matrix.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        assert (own - x).abs().max() < 1e-5
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
