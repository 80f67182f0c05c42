"""The inventory of tensors against live engines.

Every design, every phase, tensor-parallel sizes 1 and 2.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_patches.recipe.parts import Tensor
from megatron_patches.recipe.tensors import tensors
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from tests.distributed.designs import DESIGNS, EIGHT_HEADS, PHASED, design_keys
from tests.ranks import run_ranks

SIZES = EIGHT_HEADS | {
    "run.name": "inventory",
    "model.hidden_size": 36,
    "data.global_batch_size": 2,
    "optimizer.weight_decay": 0.1,
}
POWER_OF_TWO = {"hadamard": {"model.hidden_size": 32}}
AROUND = (
    {"model.position_embedding": "rope"},
    {"model.position_embedding": "learned", "model.tied_embeddings": "false"},
)
TENSOR_PARALLEL = (1, 2)


def overrides(number: int, design: str, size: int) -> list[str]:
    """Positions and output layers take turns over the designs."""
    values: dict[str, Any] = SIZES | AROUND[(number + size) % 2] | POWER_OF_TWO.get(design, {})
    values |= design_keys(design)
    # Stage 0 leaves parameters as they are; where it cannot be, stage 1 only copies them.
    stage = "zero1" if design in PHASED else "zero0"
    values |= {"parallel.tensor_model_parallel_size": size, "deepspeed.config": stage}
    return [f"{key}={value}" for key, value in values.items()]


def cases(size: int) -> list[tuple[str, Config, int]]:
    configs = [
        (design, load_config("demo", overrides(n, design, size)))
        for n, design in enumerate(DESIGNS)
    ]
    return [(design, config, phase.number) for design, config in configs for phase in config.phases]


@pytest.fixture(scope="module", params=TENSOR_PARALLEL)
def compared(request: pytest.FixtureRequest) -> list[tuple[str, Config, int, dict[str, Any]]]:
    """(design, configuration, phase, what is live and what is listed on every rank).

    One launch a size.
    """
    size: int = request.param
    configs = [overrides(number, design, size) for number, design in enumerate(DESIGNS)]
    worker = "tests.distributed.workers.inventory:live_and_listed"
    reports = run_ranks(size, worker, {"configs": configs}, timeout=300)
    return [(*case, report) for case, report in zip(cases(size), reports, strict=True)]


def test_the_live_engine_has_the_parameters_and_buffers_of_the_inventory(
    compared: list[tuple[str, Config, int, dict[str, Any]]],
) -> None:
    """Names, shapes on each rank, dimensions that are cut, phases, weight decay."""
    assert len(compared) == len(DESIGNS) + 2 + 2 + 1  # further phases of those in PHASED
    for design, config, phase, report in compared:
        size = config.parallel.tensor_model_parallel_size
        assert len(report["live"]) == len(report["listed"]) == size
        for live, listed in zip(report["live"], report["listed"], strict=True):
            expected = {
                name: [shape, "buffer" if begins is None else cut, begins, decay]
                for name, (shape, cut, begins, decay) in listed.items()
            }
            assert live == expected, (design, phase)


def test_the_shares_of_all_ranks_are_the_whole() -> None:
    for design, config, phase in cases(2):
        for tensor in tensors(config.shape, config.policy, phase):
            for size in (1, 2, 4):
                held = sum(tensor.rank_elements(rank, size) for rank in range(size))
                copies = size if tensor.cut is None else 1
                assert held == copies * tensor.elements, (design, tensor.name, size)


def test_kinds_say_what_a_tensor_is() -> None:
    kinds: dict[str, set[str]] = {}
    for design, config, _ in cases(2):
        inventory = tensors(config.shape, config.policy, 0)
        for tensor in inventory:
            assert tensor.trains == (tensor.kind not in ("frozen", "scores") or tensor.decay), (
                tensor
            )
            assert (tensor.kind == "norm") == ("layernorm" in tensor.name)
        kinds[design] = {tensor.kind for tensor in inventory} - {"ordinary", "norm"}
    assert kinds["vanilla"] == kinds["orthogonal_trainable"] == set()
    assert kinds["orthogonal_penalty"] == {"penalised"}
    assert kinds["monarch"] == kinds["unfreeze"] == {"frozen"}
    assert kinds["low_rank"] == {"frozen", "adapter"}
    assert kinds["synthesizer_random-frozen"] == {"scores"}


def test_multiplications_are_the_elements_of_matrices_that_a_token_meets() -> None:
    def product(tensor: Tensor) -> bool:
        added_or_mixed = ("position_embeddings", "core_attention")
        return len(tensor.shape) > 1 and not any(part in tensor.name for part in added_or_mixed)

    for _, config, phase in cases(2):
        inventory = {tensor.name: tensor for tensor in tensors(config.shape, config.policy, phase)}
        looked_up = inventory.pop("embedding.word_embeddings.weight")
        tied = config.model.tied_embeddings
        assert looked_up.multiplications == (looked_up.elements if tied else 0)
        for tensor in inventory.values():
            assert tensor.multiplications == (tensor.elements if product(tensor) else 0), (
                tensor.name
            )
