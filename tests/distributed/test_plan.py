"""The plan against what is there.

The audit of live engines, saved-tensor hooks, the allocator's peak.
"""

from __future__ import annotations

from typing import Any

import pytest

from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.plan.activations import activations_of
from pretrain.plan.memory import memory_of, rank_states, rank_tensors
from pretrain.plan.workload import FP32, Workload, workload_of
from tests.distributed.designs import EIGHT_HEADS, design_keys
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

RANKS = 4
LABEL_BYTES = 9
"""Bytes of a token's label, an int64, and of whether it counts."""
# Odd on purpose: every stage has to pad, and no two tensors are equally large by chance.
ODD = EIGHT_HEADS | {
    "run.name": "plan",
    "model.hidden_size": 33,
    "data.global_batch_size": 4,
}
LEARNED = {"model.position_embedding": "learned", "model.tied_embeddings": "false"}
MUON = {"optimizer.kind": "muon", "optimizer.muon.vector_learning_rate": "0.01"} | LEARNED
BF16_SUMS = {"precision.grad_accum_dtype": "bf16"}
ENGINES: list[tuple[str, int, str, int, dict[str, str]]] = [  # design, stage, dtype, TP, changes
    ("vanilla", 0, "fp32", 2, {}),
    ("vanilla", 1, "fp32", 2, LEARNED),
    ("vanilla", 3, "bf16", 2, {}),
    ("orthogonal", 0, "bf16", 1, BF16_SUMS),
    ("frozen-query", 1, "bf16", 2, {}),
    ("orthogonal", 1, "bf16", 2, LEARNED),
    ("orthogonal", 2, "bf16", 4, {}),
    ("orthogonal", 3, "fp32", 2, LEARNED),
    ("orthogonal", 1, "bf16", 2, BF16_SUMS),
    ("unfreeze", 1, "bf16", 2, {}),
    ("unfreeze", 2, "fp32", 1, {}),
    ("hybrid", 2, "fp32", 2, {}),
    ("hybrid-three-adapters", 1, "fp32", 4, {}),
    ("hybrid-three-adapters", 3, "bf16", 2, {}),
    ("monarch", 0, "fp32", 2, {"model.hidden_size": "36"}),
    ("monarch-hybrid-low_rank", 3, "bf16", 2, {"model.hidden_size": "36"}),
    ("monarch_shared_conv", 1, "bf16", 2, {"model.hidden_size": "36"}),
    ("monarch_trainable", 2, "fp32", 2, {"model.hidden_size": "36"}),
    ("hybrid-shared-adapters", 3, "fp32", 2, {}),
    ("thin", 1, "fp32", 4, {}),
    ("synthesizer_random-frozen", 1, "bf16", 2, {}),
    ("synthesizer_factorized", 2, "bf16", 2, {}),
    ("vanilla", 0, "fp32", 2, MUON),
    ("hybrid-three-adapters", 1, "fp32", 2, MUON),
    ("unfreeze", 1, "bf16", 2, MUON),
    ("monarch_trainable", 1, "bf16", 4, {"model.hidden_size": "36"} | MUON),
    ("modern", 1, "bf16", 4, {}),
    ("modern-monarch_shared_conv", 3, "fp32", 2, {"model.hidden_size": "36"}),
    ("relu2", 0, "fp32", 2, {}),
]
# Large enough that the small change, which the estimate leaves out, is not five percent.
ROUND = ODD | {
    "model.hidden_size": 96,
    "model.head_dim": 24,
    "model.num_attention_heads": 4,
    "model.num_query_groups": 4,
    "model.ffn_hidden_size": 320,
    "model.vocab_size": 512,
    "data.sequence_length": 64,
    "data.micro_batch_size": 3,
    "data.global_batch_size": 6,
    "model.position_embedding": "learned",
}
ROPE, GROUPED = {"model.position_embedding": "rope"}, {"model.num_query_groups": "2"}
APART = {"data.reset_at_document_end": "true"}
MEGATRON, CHUNKED = ({"performance.cross_entropy": way} for way in ("megatron", "chunked"))
SPLIT = {"parallel.sequence_parallel": "true"}
ATTENTION, FULL, QUERY_KEY = (
    {"performance.recompute": part} for part in ("attention", "full", "query_key")
)
PASSES: list[tuple[str, str, int, dict[str, str]]] = [  # design, dtype, TP, changes
    ("vanilla", "bf16", 1, MEGATRON),
    ("vanilla", "bf16", 2, CHUNKED),
    ("vanilla", "bf16", 1, ROPE | GROUPED),
    ("vanilla", "fp32", 1, APART | GROUPED),
    ("orthogonal", "bf16", 2, SPLIT | ROPE),
    ("orthogonal_penalty", "bf16", 1, {}),
    ("unfreeze", "bf16", 1, {}),
    ("hybrid", "bf16", 2, GROUPED | ROPE),
    ("monarch", "bf16", 2, SPLIT | ROPE | QUERY_KEY),
    ("monarch_shared_conv", "fp32", 1, GROUPED),
    ("thin", "bf16", 1, ROPE),
    ("monarch_trainable", "fp32", 1, {}),
    ("frozen-query", "fp32", 1, {}),
    ("synthesizer_random", "bf16", 1, {}),
    ("synthesizer_factorized", "bf16", 1, APART),
    ("orthogonal", "bf16", 2, FULL | SPLIT),
    ("vanilla", "bf16", 1, ATTENTION | ROPE),
    ("modern", "bf16", 2, SPLIT | ROPE),
    ("modern-monarch_shared_conv", "fp32", 2, ROPE),
    ("relu2", "fp32", 1, ROPE),
]
VOCABULARY = {"model.vocab_size": "8192"}
LAYERS = {"model.num_layers": "8"}
PEAKS: list[tuple[str, str, int, dict[str, str]]] = [
    ("vanilla", "bf16", 1, VOCABULARY | MEGATRON),
    ("orthogonal", "fp32", 1, VOCABULARY | MEGATRON),
    ("vanilla", "bf16", 1, VOCABULARY),
    ("orthogonal", "bf16", 1, VOCABULARY | CHUNKED),
    ("relu2", "fp32", 1, VOCABULARY),
    ("relu2", "fp32", 1, VOCABULARY | {"model.logit_softcap": "null"}),
    ("relu2", "bf16", 1, VOCABULARY | CHUNKED),
    ("relu2", "fp32", 1, VOCABULARY | {"model.z_loss": "0"} | MEGATRON),
    ("orthogonal", "bf16", 1, LAYERS),
    ("orthogonal", "bf16", 1, LAYERS | FULL),
    ("orthogonal", "bf16", 1, LAYERS | ATTENTION),
]


def overrides(
    base: dict[str, Any], design: str, dtype: str, size: int, changes: dict[str, str]
) -> list[str]:
    attention = design_keys(design)
    parallel = {"parallel.tensor_model_parallel_size": size, "precision.dtype": dtype}
    return [f"{key}={value}" for key, value in {**base, **attention, **parallel, **changes}.items()]


def of_passes(
    cases: list[tuple[str, str, int, dict[str, str]]], target: str
) -> list[tuple[Config, list[int]]]:
    """(configuration, what `target` measured on each rank) of every case."""
    memory: dict[int, Any] = {}
    for size in {case[2] for case in cases}:
        configs = [overrides(ROUND, *case) for case in cases if case[2] == size]
        memory[size] = iter(
            run_ranks(size, f"tests.distributed.workers.plan:{target}", {"configs": configs})
        )
    return [(load_config("demo", overrides(ROUND, *case)), next(memory[case[2]])) for case in cases]


def engine_overrides(engine: tuple[str, int, str, int, dict[str, str]]) -> list[str]:
    design, stage, dtype, size, changes = engine
    changes = {"deepspeed.config": f"zero{stage}", **changes}
    return overrides(ODD, design, dtype=dtype, size=size, changes=changes)


@pytest.fixture(scope="module")
def audits() -> list[list[dict[str, Any]]]:
    configs = [engine_overrides(engine) for engine in ENGINES]
    return run_ranks(RANKS, "tests.distributed.workers.plan:audits", {"configs": configs})


@pytest.mark.parametrize(
    "number", range(len(ENGINES)), ids=lambda number: "-".join(map(str, ENGINES[number][:4]))
)
def test_the_states_of_every_rank_are_those_that_the_audit_finds(
    audits: list[list[dict[str, Any]]], number: int
) -> None:
    config = load_config("demo", engine_overrides(ENGINES[number]))
    assert len(audits[number]) == RANKS
    for rank in audits[number]:
        work = workload_of(resolve(config, RANKS))
        states = rank_states(rank_tensors(work, rank["tensor_parallel_rank"]), work)
        assert {
            "trainable": states.weights,
            "frozen": states.frozen_bank,
            "gradients": states.gradients,
            "master_weights": states.master_weights,
            "optimizer_state": states.optimizer_states,
        } == {
            part: rank[part]["bytes"]
            for part in ("trainable", "frozen", "gradients", "master_weights", "optimizer_state")
        }


@pytest.fixture(scope="module")
def kept() -> list[tuple[Config, list[int]]]:
    return of_passes(PASSES, "activations")


@pytest.mark.parametrize(
    "number", range(len(PASSES)), ids=lambda number: "-".join(map(str, PASSES[number]))
)
def test_activations_are_those_that_saved_tensor_hooks_see(
    kept: list[tuple[Config, list[int]]], number: int
) -> None:
    config, measured = kept[number]
    work = workload_of(resolve(config, len(measured)))
    for rank, kept_bytes in enumerate(measured):
        planned = activations_of(work, rank).kept(config.performance.recompute)
        assert planned == pytest.approx(kept_bytes - logits_kept(work), rel=0.15)


def logits_kept(work: Workload) -> int:
    """Return the bytes that cross entropy keeps: what logits have become, and labels."""
    element = {"megatron": FP32, "in_place": work.element, "chunked": 0}
    logits = work.vocabulary * element[work.config.performance.cross_entropy]
    return work.tokens * (logits + LABEL_BYTES)


def test_the_peak_of_a_pass_is_the_allocators() -> None:
    for config, measured in of_passes(PEAKS, "peaks"):
        work = workload_of(resolve(config, len(measured)))
        memory = memory_of(work)
        planned = memory.activations + max(memory.logits, memory.layer_gradients)
        assert measured == pytest.approx([planned] * len(measured), rel=0.05), config.to_yaml()
