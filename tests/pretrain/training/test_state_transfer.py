"""Weights go to the same names and shapes or nowhere.

Real engines: tests/distributed/test_unfreeze.py.
"""

import pytest
import torch

from pretrain.training.state_transfer import TrainingState


def model(**features: int) -> torch.nn.Module:
    return torch.nn.ModuleDict({name: torch.nn.Linear(2, size) for name, size in features.items()})


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_weights_that_both_have_are_copied_and_new_ones_keep_their_start() -> None:
    old = model(a=3)
    new = model(a=3, b=1)
    start = weights_of(new)
    TrainingState(weights_of(old), {}, {}).give_weights(new)
    assert torch.equal(new["a"].weight, old["a"].weight)
    assert torch.equal(new["b"].weight, start["b.weight"])


@pytest.mark.parametrize("other", [{"b": 3}, {"a": 4}])
def test_a_weight_without_a_place_is_an_error(other: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match=r"no 'a\.weight' of shape \(3, 2\)"):
        TrainingState(weights_of(model(a=3)), {}, {}).give_weights(model(**other))
