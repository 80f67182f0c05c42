"""A step of Muon in one process, against the formula; layouts are in tests/distributed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches.errors import MethodError
from megatron_patches.recipe.parts import Tensor
from pretrain.checkpoint.slices import Slice
from pretrain.config.optimizer import OptimizerSection
from pretrain.optimizer import muon
from pretrain.optimizer.muon import MuonWithAdamW
from pretrain.optimizer.orthogonalise import newton_schulz

pytestmark = pytest.mark.usefixtures("context")

ROWS, COLUMNS = 6, 4
RATE, DECAY = 0.5, 0.1
ONE_RANK: Any = SimpleNamespace(
    rank=0, data_parallel_rank=0, tensor_parallel_rank=0, tensor_parallel_size=1
)


def tensor(name: str, layer: int | None) -> Tensor:
    parts = ((name, ROWS),)
    return Tensor(name, (ROWS, COLUMNS), "ordinary", cut=None, parts=parts, layer=layer)


class Made:
    """A matrix and an embedding, and their optimizer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw() -> torch.Tensor:
            return torch.randn(ROWS * COLUMNS, generator=generator)

        self.matrix, self.other = (torch.nn.Parameter(draw()) for _ in range(2))
        self.gradients = [draw() for _ in range(3)]
        section = OptimizerSection.model_validate(
            {
                "kind": "muon",
                "learning_rate": RATE,
                "weight_decay": DECAY,
                "muon": {"momentum": 0.8, "newton_schulz_dtype": "fp32", **settings},
            }
        )
        common = {"lr": RATE, "weight_decay": DECAY}
        groups = [
            {"params": [self.matrix], "rule": "muon", **common},
            {"params": [self.other], "rule": "adamw", **common},
        ]
        self.optimizer = MuonWithAdamW(groups, section)
        flats = {"matrix": self.matrix, "other": self.other}
        slices = [
            Slice(name, 0, length=ROWS * COLUMNS, flat=flat, offset=0, states=(), state={})
            for name, flat in flats.items()
        ]
        monkeypatch.setattr(muon, "slices_of_rank", lambda engine: slices)

    def prepare(self, *more: Tensor) -> dict[str, list[str]]:
        inventory = [tensor("matrix", 0), tensor("other", None), *more]
        return self.optimizer.prepare(None, inventory, ONE_RANK, replicated=False)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("scale", "factor"), [("match_adamw", 0.2 * 6**0.5), ("spectral", 1.5**0.5)]
)
def test_updates_are_those_of_the_formula(
    nesterov: bool, scale: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Made(monkeypatch, nesterov=nesterov, update_scale=scale)
    assert training.prepare() == {"muon": ["matrix"], "adamw": ["other"]}
    weight = training.matrix.detach().clone()
    momentum = torch.zeros(ROWS * COLUMNS)
    adam = torch.nn.Parameter(training.other.detach().clone())
    reference = torch.optim.AdamW([adam], lr=RATE, weight_decay=DECAY, betas=(0.9, 0.98), eps=1e-8)
    for number, gradient in enumerate(training.gradients):
        for parameter in (training.matrix, training.other):
            parameter.grad = 2 * gradient
        training.optimizer.divide_gradients(torch.tensor(2.0))
        training.optimizer.step()
        momentum = 0.8 * momentum + 0.2 * gradient
        ahead = 0.2 * gradient + 0.8 * momentum if nesterov else momentum
        update = newton_schulz(ahead.view(1, ROWS, COLUMNS).clone(), 5).reshape(-1) * factor
        weight = weight * (1 - RATE * DECAY) - RATE * update
        assert torch.allclose(training.matrix, weight, rtol=1e-4, atol=1e-5)
        assert torch.allclose(
            training.optimizer.state[training.matrix]["momentum"], momentum, atol=1e-6
        )
        adam.grad = gradient.clone()
        reference.step()
        assert torch.allclose(training.other, adam, rtol=1e-5, atol=1e-6)
        if number == 0:
            said = training.optimizer.report()
            assert said is not None and training.optimizer.report() is None
            assert (said["matrices"], said["matrices_by_rank"]) == (1, [1])
            assert said["update_norm"] == {"matrix": pytest.approx(float(update.norm()), rel=1e-4)}
            assert said["newton_schulz_steps"] == 5


def test_without_a_gradient_the_momentum_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Made(monkeypatch)
    training.prepare()
    training.matrix.grad = training.gradients[0].clone()
    training.optimizer.step()
    momentum = training.optimizer.state[training.matrix]["momentum"].clone()
    training.matrix.grad = None
    training.optimizer.step()
    after = training.optimizer.state[training.matrix]["momentum"]
    assert torch.allclose(after, 0.8 * momentum, atol=1e-7)


def test_nothing_moves_in_a_step_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Made(monkeypatch)
    free.prepare()
    training = Made(monkeypatch)
    training.prepare()
    for allowed in (1.0, 0.0, 1.0):
        weights = [training.matrix.detach().clone(), training.other.detach().clone()]
        had = dict(training.optimizer.state[training.matrix])
        had = {name: values.clone() for name, values in had.items()}
        for parameter in (training.matrix, training.other):
            parameter.grad = (
                training.gradients[0] / 0.0 if not allowed else training.gradients[0].clone()
            )
        training.optimizer.allow(torch.tensor(allowed))
        training.optimizer.step()
        same = [
            torch.equal(a, b)
            for a, b in zip(weights, (training.matrix, training.other), strict=True)
        ]
        assert same == [not allowed] * 2
        if not allowed:
            after = training.optimizer.state[training.matrix]["momentum"]
            assert torch.allclose(after, had["momentum"], rtol=1e-6)
            continue
        for parameter in (free.matrix, free.other):
            parameter.grad = training.gradients[0].clone()
        free.optimizer.step()
        assert torch.allclose(training.matrix, free.matrix, rtol=1e-4)
        assert torch.allclose(training.other, free.other, rtol=1e-4)


def test_states_before_the_first_step_and_a_matrix_in_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Made(monkeypatch)
    assert training.optimizer.states_of(training.matrix) == ("momentum",)
    assert training.optimizer.states_of(training.other) == ("exp_avg", "exp_avg_sq")
    for parameter in (training.matrix, training.other):
        training.optimizer.begin(parameter)
    assert {*training.optimizer.state[training.matrix]} == {"momentum"}
    assert not training.optimizer.state[training.matrix]["momentum"].any()
    assert {*training.optimizer.state[training.other]} == {"step", "exp_avg", "exp_avg_sq"}
    training.optimizer.state[training.matrix]["momentum"] += 1
    training.optimizer.begin(training.matrix)
    assert training.optimizer.state[training.matrix]["momentum"].all()
    with pytest.raises(MethodError, match="would leave 1 of 2 matrices of the layers as they are"):
        training.prepare(tensor("forgotten", 1))


@pytest.mark.parametrize(
    ("asked", "device", "instructions", "expected"),
    [
        ("auto", "cpu", "avx512_f", torch.float32),
        ("auto", "cpu", "avx512_bf16", torch.bfloat16),
        ("auto", "cpu", "amx_bf16", torch.bfloat16),
        ("auto", "cuda", "avx2", torch.bfloat16),
        ("fp32", "cuda", "avx512_bf16", torch.float32),
        ("fp32", "cpu", "avx512_bf16", torch.float32),
        ("bf16", "cpu", "avx2", torch.bfloat16),
    ],
)
def test_the_type_of_the_iterations(
    asked: str,
    device: str,
    instructions: str,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    if capabilities.get("architecture") == "x86_64":
        assert {"avx512_bf16", "amx_bf16"} <= set(capabilities)  # the names that are asked for
    # This CPU has one set of instructions, and older versions of torch do not say which.
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True}, raising=False)
    training = Made(monkeypatch, newton_schulz_dtype=asked)
    assert training.optimizer._dtype(torch.device(device)) == expected
