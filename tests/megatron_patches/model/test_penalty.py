"""The orthogonality penalty: value and closed-form gradient against plain autograd."""

import pytest
import torch

from megatron_patches.model.penalty import OrthogonalityPenalty, take_auxiliary_losses

HEAD_DIM, HIDDEN = 4, 20


def plain_penalty(weight: torch.Tensor, groups: int, queries: int, strength: float) -> torch.Tensor:
    """The definition, head by head, left to autograd."""
    heads = weight.view(groups, queries + 2, HEAD_DIM, HIDDEN)
    identity = torch.eye(HEAD_DIM, dtype=weight.dtype)
    total = torch.zeros((), dtype=weight.dtype)
    for group in heads:
        for rows in group[:-1]:  # the last is the value head
            total = total + (rows @ rows.T - identity).square().sum()
    return strength * total


@pytest.mark.parametrize(("groups", "queries"), [(4, 1), (2, 3), (1, 1)])
def test_value_and_gradient_are_those_of_plain_autograd(groups: int, queries: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = (groups * (queries + 2) * HEAD_DIM, HIDDEN)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    output = torch.randn(5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    passed, penalty = OrthogonalityPenalty.apply(output, weight, groups, HEAD_DIM, 0.3)
    assert torch.equal(passed, output)
    (2 * passed.sum() + 5 * penalty).backward()
    copy = weight.detach().clone().requires_grad_()
    expected = plain_penalty(copy, groups, queries, 0.3)
    (5 * expected).backward()
    assert penalty.item() == pytest.approx(expected.item(), rel=1e-13)
    assert (weight.grad - copy.grad).abs().max() <= 1e-12 * copy.grad.abs().max()
    assert torch.equal(output.grad, torch.full_like(output, 2))
    value = weight.grad.view(groups, queries + 2, HEAD_DIM, HIDDEN)[:, -1]
    assert torch.count_nonzero(value) == 0
    assert torch.count_nonzero(weight.grad) > 0


def test_bf16_weights_are_judged_in_fp32() -> None:
    weight = (
        torch.linalg.qr(torch.randn(HIDDEN, 3 * HEAD_DIM))[0]
        .T.contiguous()
        .bfloat16()
        .requires_grad_()
    )
    _, penalty = OrthogonalityPenalty.apply(torch.zeros(1), weight, 1, HEAD_DIM, 1.0)
    expected = plain_penalty(weight.detach().double(), 1, 1, 1.0).item()
    assert penalty.dtype == torch.float32
    assert penalty.item() == pytest.approx(expected, rel=1e-3)
    penalty.backward()
    assert weight.grad.dtype == torch.bfloat16


def test_terms_are_added_up_by_name_and_taken_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    for module, (name, value) in zip(model, [("a", 1.0), ("b", 2.0), ("a", 4.0)], strict=True):
        module.auxiliary_loss = name, torch.tensor(value)
    assert {name: term.item() for name, term in take_auxiliary_losses(model).items()} == {
        "a": 5.0,
        "b": 2.0,
    }
    assert take_auxiliary_losses(model) == {}
