"""What DeepSpeed holds.

The audit against formulas and live buffers, negative controls, clipping, bf16.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

STAGES = (1, 2, 3)
DTYPES = ("fp32", "bf16")
ENGINES = [("orthogonal", stage, dtype) for stage, dtype in itertools.product(STAGES, DTYPES)]
ENGINES.append(("vanilla", 1, "fp32"))
CLIPPING = [  # (variant, stage, sequence parallel)
    ("vanilla", 0, False),
    ("orthogonal", 1, False),
    ("orthogonal", 2, True),
    ("orthogonal", 3, True),
]
CORRUPTED = [
    "frozen-zero3",
    "trainable-monarch-zero1",
    "trainable-zero2",
    "trainable-zero3",
]
RANKS, TENSOR_PARALLEL, DATA_PARALLEL = 4, 2, 2
CLIP = 0.05
# Odd on purpose: 33 elements in a norm do not divide by 2 ranks, so every stage has to pad.
ODD_SIZES = {"model__hidden_size": 33, "model__head_dim": 8, "model__ffn_hidden_size": 64}


Engine = tuple[tuple[str, int, str], dict[str, Any]]
"""(variant, stage, dtype), and what was found."""


@pytest.fixture(scope="module")
def answers(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything below, from one launch of TP 2 × DP 2."""
    runs = tmp_path_factory.mktemp("audit")

    def overrides(name: str, variant: str, stage: int, **changes: object) -> list[str]:
        return tiny_overrides(
            tiny_shards,
            runs,
            name,
            attention__variant=variant,
            deepspeed__config=f"zero{stage}",
            parallel__tensor_model_parallel_size=TENSOR_PARALLEL,
            telemetry__tensorboard="false",
            **{"schedule__steps": 3, "optimizer__weight_decay": 0.1, **changes},
        )

    payload = {
        "engines": [
            overrides(
                f"{variant}-{stage}-{dtype}",
                variant,
                stage,
                precision__dtype=dtype,
                **ODD_SIZES,
            )
            for variant, stage, dtype in ENGINES
        ],
        "corrupted": {
            name: overrides(name, "monarch" if "monarch" in name else "orthogonal", int(name[-1]))
            for name in CORRUPTED
        },
    }
    answer = run_ranks(RANKS, "tests.distributed.workers.audit:all_cases", payload)
    answer["engines"] = dict(zip(ENGINES, answer["engines"], strict=True))
    return answer


@pytest.fixture(params=ENGINES, ids=lambda engine: f"{engine[0]}-zero{engine[1]}-{engine[2]}")
def engine(request: pytest.FixtureRequest, answers: dict[str, Any]) -> Engine:
    return request.param, answers["engines"][request.param]


def test_zero_holds_nothing_frozen_and_the_counts_are_the_formulas(engine: Engine) -> None:
    (variant, stage, _), report = engine
    file = report["file"]
    assert (
        file["frozen_in_zero"] == 0 and file["zero_stage"] == stage and len(file["ranks"]) == RANKS
    )
    assert file["totals"]["model_trainable_parameters"] == report["counted"]["trainable"]
    assert file["totals"]["model_frozen_parameters"] == report["counted"]["frozen"]
    # 2 layers, (4 + 4) heads of 8 rows of 33, on each data-parallel rank once
    assert file["totals"]["frozen_elements"] == (
        2 * 8 * 8 * 33 * DATA_PARALLEL if variant == "orthogonal" else 0
    )
    for rank in report["ranks"]:
        assert rank["before"]["frozen_in_zero"] == rank["after"]["frozen_in_zero"] == 0
        assert rank["before"]["violations"] == rank["after"]["violations"] == []


def test_partitions_and_optimizer_state_cover_the_trainable_elements_exactly(
    engine: Engine,
) -> None:
    (_, stage, dtype), report = engine
    for tensor_parallel_rank in range(TENSOR_PARALLEL):
        ranks = [
            r["after"] for r in report["ranks"] if r["tensor_parallel_rank"] == tensor_parallel_rank
        ]
        assert len(ranks) == DATA_PARALLEL
        held = [rank["trainable"]["elements"] for rank in ranks]
        # Stages 1 and 2 leave every data-parallel rank the whole shard; stage 3 a slice, with its
        # padding.
        shard = _trainable_elements_of_a_shard(report)
        partitioned = sum(part["elements"] for rank in ranks for part in rank["zero_partitions"])
        padding = partitioned - shard
        assert 0 < padding <= _most_padding(stage)
        assert held == ([shard, shard] if stage < 3 else [partitioned / 2, partitioned / 2])
        for rank in ranks:
            partition = sum(part["elements"] for part in rank["zero_partitions"])
            assert not rank["optimizer_state"]["implied"]
            assert rank["optimizer_state"] == {
                "elements": 2 * partition,
                "bytes": 8 * partition,
                "implied": False,
            }
            assert rank["master_weights"] == {"elements": partition, "bytes": 4 * partition}
        assert sum(rank["optimizer_state"]["elements"] for rank in ranks) - 2 * padding == 2 * shard
        bytes_of_one = 4 if dtype == "fp32" else 2
        assert all(
            rank["trainable"]["bytes"] == bytes_of_one * rank["trainable"]["elements"]
            for rank in ranks
        )


def test_what_the_audit_implies_before_the_first_step_is_what_comes(engine: Engine) -> None:
    _, report = engine
    for rank, in_file in zip(report["ranks"], report["file"]["ranks"], strict=True):
        assert rank["before"] == in_file
        for part in ("optimizer_state", "gradients"):
            implied, after = ({**rank[when][part], "implied": None} for when in ("before", "after"))
            assert implied == after, part


def test_gradient_bytes_follow_the_zero_stage(engine: Engine) -> None:
    (_, stage, dtype), report = engine
    shard = _trainable_elements_of_a_shard(report)
    for rank in report["ranks"]:
        gradients = rank["after"]["gradients"]
        partition = sum(part["elements"] for part in rank["after"]["zero_partitions"])
        # Accumulated in fp32, in bf16 training too.
        assert gradients["bytes"] == 4 * gradients["elements"]
        # The whole shard on every rank; the BF16 optimizer pads it like the partitions.
        if stage == 1:
            padding = DATA_PARALLEL * partition - shard if dtype == "bf16" else 0
            assert gradients["elements"] == shard + padding
        else:
            assert gradients["elements"] == partition
        measured = rank["gradients_between_micro_batches"]
        if measured is not None:
            assert measured["bytes"] == 4 * measured["elements"]
            if stage == 1:
                assert measured["elements"] == shard
            else:
                # the partition without its padding; in fp32 all of the embedding, which two
                # ranks share
                most = partition if dtype == "bf16" else partition + 33 * 512 // TENSOR_PARALLEL
                assert partition - _most_padding(stage) <= measured["elements"] <= most
    assert (report["ranks"][0]["gradients_between_micro_batches"] is None) == (
        stage == 3 or (stage, dtype) == (1, "bf16")
    )


def test_the_bank_is_bitwise_unchanged_by_adamw_with_weight_decay(engine: Engine) -> None:
    (variant, _, _), report = engine
    assert all(rank["bank_unchanged"] for rank in report["ranks"])
    assert {rank["banks"] for rank in report["ranks"]} == {2 if variant == "orthogonal" else 0}
    assert report["losses"][-1] < report["losses"][0]


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_stays_near_fp32(answers: dict[str, Any], stage: int) -> None:
    fp32, bf16 = (answers["engines"]["orthogonal", stage, dtype]["losses"] for dtype in DTYPES)
    assert bf16 == pytest.approx(fp32, abs=2e-2)
    assert bf16 != pytest.approx(fp32, abs=1e-6)


@pytest.mark.parametrize("name", CORRUPTED)
def test_a_bank_that_zero_can_see_stops_the_run_with_its_name(
    answers: dict[str, Any], name: str
) -> None:
    complaint = answers["corrupted"][name]
    buffer, count = ("left", 4) if "monarch" in name else ("weight", 2)
    assert complaint.startswith(
        "ZeRO holds the frozen weight "
        f"'decoder.layers.0.self_attention.linear_qkv.query_key_{buffer}' ({count} "
    )
    assert "\n" not in complaint


def test_clipping_by_the_global_norm_is_that_of_one_rank(tiny_shards: Path, tmp_path: Path) -> None:
    """test_unfreeze.py holds one rank against plain PyTorch."""

    def run(name: str, variant: str, **changes: object) -> dict[str, Any]:
        settings = {
            "attention__variant": variant,
            "optimizer__gradient_clip": CLIP,
            # eps far above the gradients makes AdamW's steps as long as the clipped gradients.
            "optimizer__eps": 1.0,
            "optimizer__learning_rate": 2.0,
            "schedule__kind": "constant",
            "schedule__warmup_steps": 0,
            "schedule__steps": 3,
            "telemetry__tensorboard": "false",
        }
        return {"overrides": tiny_overrides(tiny_shards, tmp_path, name, **settings | changes)}

    worker = "tests.distributed.workers.designs:train_all"
    variants = ("vanilla", "orthogonal")
    alone = [run(variant, variant) for variant in variants]
    unclipped = run("unclipped", "vanilla", optimizer__gradient_clip=0)
    *reports, free = run_ranks(1, worker, {"runs": [*alone, unclipped]})
    references = dict(zip(variants, reports, strict=True))
    assert free["loss"][1] != pytest.approx(references["vanilla"]["loss"][1], rel=1e-3)
    parallel = [
        run(
            f"{variant}-{stage}",
            variant,
            deepspeed__config=f"zero{stage}",
            parallel__tensor_model_parallel_size=TENSOR_PARALLEL,
            parallel__sequence_parallel=sequence_parallel,
        )
        for variant, stage, sequence_parallel in CLIPPING
    ]
    for case, report in zip(CLIPPING, run_ranks(RANKS, worker, {"runs": parallel}), strict=True):
        assert min(report["gradient_norm"]) > 5 * CLIP
        for quantity in ("loss", "gradient_norm"):
            expected = pytest.approx(references[case[0]][quantity], rel=1e-5)
            assert report[quantity] == expected, (case, quantity)


def _trainable_elements_of_a_shard(report: dict[str, Any]) -> int:
    """Elements of one tensor-parallel rank: embedding, and per layer V, output, MLP, two norms."""
    hidden, heads, head_dim, ffn, vocabulary, layers = 33, 4, 8, 64, 512, 2
    trainable_qkv = 1 if report["file"]["totals"]["frozen_elements"] else 3
    sharded = hidden * (vocabulary + layers * ((trainable_qkv + 1) * heads * head_dim + 2 * ffn))
    return sharded // TENSOR_PARALLEL + layers * 4 * hidden + 2 * hidden


def _most_padding(stage: int) -> int:
    """Stages 1 and 2 align 2 groups to 2 × the ranks; stage 3 divides parameters by the ranks."""
    parameters = 1 + 2 * 8 + 2
    return 2 * (2 * DATA_PARALLEL - 1) if stage < 3 else parameters * (DATA_PARALLEL - 1)
