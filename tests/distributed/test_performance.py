"""performance.*: every way of computing a step gives the same losses and gradients."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_patches.engine.documents import Documents, attend_within_documents
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.errors import UserError
from pretrain.model.build import compile_layers, flash_documents
from tests.command_line import assert_resumed_exactly
from tests.distributed.covering import covering
from tests.distributed.designs import DESIGNS, design_keys
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow

WORKER = "tests.distributed.workers.performance"
LAYOUTS = [(1, False), (2, True)]  # tensor parallel, sequence parallel


def overrides(**changes: object) -> list[str]:
    defaults = {"model__init_std": 0.2, "data__global_batch_size": 2}
    return tiny_overrides(Path("none"), Path("none"), "performance", **defaults | changes)


def layout(tensor_parallel: int, sequence_parallel: bool) -> dict[str, object]:
    return {
        "parallel__tensor_model_parallel_size": tensor_parallel,
        "parallel__sequence_parallel": str(sequence_parallel).lower(),
    }


def case(key: str, values: tuple[str, str], **changes: object) -> dict[str, Any]:
    """A case of `compare`: a model with either value of a key of `performance`."""
    first, second = ([f"performance.{key}={value}"] for value in values)
    return {"overrides": overrides(**changes), "ways": {"one": first, "other": second}}


def attention(design: str) -> dict[str, object]:
    return design_keys(design, "__")


def pair_up(case: tuple[object, ...]) -> dict[str, object]:
    """The factors of a case of a product, for `covering`."""
    return {str(index): value for index, value in enumerate(case)}


def compare(tensor_parallel: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_ranks(tensor_parallel, f"{WORKER}:compare", {"cases": cases})


@pytest.mark.parametrize(("tensor_parallel", "sequence_parallel"), LAYOUTS)
def test_cross_entropy_is_megatrons_without_its_fp32_logits(
    tensor_parallel: int, sequence_parallel: bool
) -> None:
    product = list(itertools.product(("in_place", "chunked"), ("true", "false"), ("true", "false")))
    # On two ranks every two of the three meet, and on one all of them.
    kinds = covering(product, pair_up) if tensor_parallel == 2 else product
    parallel = layout(tensor_parallel, sequence_parallel)
    cases = [
        case(
            "cross_entropy",
            ("megatron", way),
            model__tied_embeddings=tied,
            data__reset_at_document_end=alone,
            **parallel,
        )
        for way, tied, alone in kinds
    ]
    for way in ("in_place", "chunked"):
        kinds.append((way, "capped", "false"))
        cases.append(case("cross_entropy", ("megatron", way), model__logit_softcap=0.5, **parallel))
    for kind, report in zip(kinds, compare(tensor_parallel, cases), strict=True):
        assert report["compared"] > 15
        # The gradients are off by 1.02e-6 with AVX2.
        assert report["loss"] < 1e-6 and report["gradients"] < 3e-6, (kind, report)
        if tensor_parallel > 1:
            megatrons, ours = (Counter(report["collectives"][way]) for way in ("one", "other"))
            assert megatrons["allreduce_"] - ours["allreduce_"] == 3
            assert ours["_allgather_base_"] - megatrons["_allgather_base_"] == 1
            assert ours.total() == megatrons.total() - 2


def test_z_loss_has_one_gradient_in_both_forms() -> None:
    both = case(
        "cross_entropy",
        ("in_place", "chunked"),
        model__z_loss=0.1,
        model__logit_softcap=0.5,
        data__reset_at_document_end="true",
        **layout(2, True),
    )
    (report,) = compare(2, [both])
    assert report["loss"] < 1e-6 and report["gradients"] < 3e-6, report


def test_cross_entropy_keeps_less_for_backward() -> None:
    wide = {"precision__dtype": "bf16", "model__vocab_size": 8192, "model__num_layers": 1}
    cases = [case("cross_entropy", ("megatron", way), **wide) for way in ("in_place", "chunked")]
    tokens, vocabulary = 2 * 32, 8192
    for way, report in zip(("in_place", "chunked"), compare(1, cases), strict=True):
        # bf16 products round by 2^-8 = 0.4 %, and sums in another order, of other kernels too.
        assert report["loss"] < 1e-5 and report["gradients"] < 3e-2, (way, report)
        spared = report["saved"]["one"] - report["saved"]["other"]
        # fp32 probabilities take four bytes a logit, bf16 ones two.
        assert spared / (tokens * vocabulary) == pytest.approx(
            {"in_place": 2, "chunked": 4}[way], rel=0.02
        )


# Of every kind of layer one, and all of them with `full`.
COMPILED = (
    "orthogonal_penalty",
    "hybrid-three-adapters",
    "hybrid-shared-adapters",
    "synthesizer_factorized",
)
EVERY_DESIGN = [(design, False) for design in DESIGNS]
KEY_BIAS_BEFORE_SCORES = ("hybrid-three-adapters",)
"""With learned positions the gradient of such a bias is nothing but rounding."""


@pytest.mark.parametrize(
    ("tensor_parallel", "kinds"),
    [
        (1, [(design, False) for design in COMPILED]),
        (2, [("orthogonal", True), ("monarch", False)]),
        pytest.param(1, EVERY_DESIGN, marks=pytest.mark.full),
        pytest.param(2, [*EVERY_DESIGN, ("vanilla", True)], marks=pytest.mark.full),
    ],
    ids=["1", "2", "1-all", "2-all"],
)
def test_a_compiled_layer_is_one_graph_and_computes_the_same(
    tensor_parallel: int, kinds: list[tuple[str, bool]]
) -> None:
    """With dropout: aot_eager draws the same numbers. A graph that breaks would be an error."""
    cases = [
        case(
            "compile",
            ("none", "layers"),
            model__dropout=0.1,
            model__position_embedding="rope" if design in KEY_BIAS_BEFORE_SCORES else "learned",
            **layout(tensor_parallel, sequence_parallel),
            **attention(design),
        )
        for design, sequence_parallel in kinds
    ]
    for kind, report in zip(kinds, compare(tensor_parallel, cases), strict=True):
        assert report["loss"] < 1e-6 and report["gradients"] < 6e-6, (kind, report)
        # Two layers; one graph serves both where they are alike. And two passes over the logits.
        assert report["breaks"] == 0 and 3 <= report["graphs"] <= 4, (kind, report)


def test_recomputed_activations_are_those_that_were_not_kept() -> None:
    """With dropout, bit by bit; and each form keeps less than the one before. On two ranks."""
    kinds = list(
        itertools.product(("orthogonal", "vanilla", "synthesizer_random"), ("attention", "full"))
    )
    cases = [
        case(
            "recompute",
            ("none", what),
            model__dropout=0.1,
            **layout(2, sequence_parallel=design == "vanilla"),
            **attention(design),
        )
        for design, what in kinds
    ]
    kept: dict[tuple[str, str], float] = {}
    for (design, what), report in zip(kinds, compare(2, cases), strict=True):
        assert report["loss"] == 0.0 and report["gradients"] == 0.0, (design, what)
        kept[design, what] = report["saved"]["other"] / report["saved"]["one"]
    for design in ("orthogonal", "vanilla", "synthesizer_random"):
        assert kept[design, "attention"] < 0.8, (design, kept)
        assert kept[design, "full"] < 0.75 * kept[design, "attention"], (design, kept)


def test_rows_that_fill_up_the_embedding_change_nothing() -> None:
    """576 rows for 512 pieces.

    The losses and gradient norms of three steps are those of 512 rows.
    """
    runs = [
        overrides(
            **layout(2, False),
            model__tied_embeddings=tied,
            model__vocab_multiple=multiple,
            performance__cross_entropy=way,
        )
        for tied in ("true", "false")
        for way in ("megatron", "in_place", "chunked")
        for multiple in (1, 96)
    ]
    losses = run_ranks(2, f"{WORKER}:engine_losses", {"runs": runs})
    for plain, filled in zip(losses[::2], losses[1::2], strict=True):
        assert len(plain) == 6 and filled == pytest.approx(plain, rel=1e-6)


def test_cross_entropy_under_zero() -> None:
    """At stage 2 with the embedding's weight, at stage 3 with an output layer of its own."""
    runs = [
        overrides(
            deepspeed__config=f"zero{stage}",
            data__global_batch_size=4,
            model__tied_embeddings=str(stage % 2 == 0).lower(),
            performance__cross_entropy=way,
        )
        for stage in (2, 3)
        for way in ("megatron", "in_place", "chunked")
    ]
    losses = run_ranks(2, f"{WORKER}:engine_losses", {"runs": runs})
    for reference, *others in (losses[start : start + 3] for start in (0, 3)):
        assert len(reference) == 6 and reference[-2] != reference[0]
        for other in others:
            assert other == pytest.approx(reference, rel=1e-5)


@pytest.mark.full
@pytest.mark.skipif(not which("g++"), reason="inductor needs a C++ compiler")
def test_kernels_of_inductor_train_to_the_same_losses() -> None:
    runs = [
        overrides(
            performance__compile=way,
            attention__variant="orthogonal",
            model__position_embedding="rope",
        )
        for way in ("none", "layers")
    ]
    eager, compiled = run_ranks(1, f"{WORKER}:engine_losses", {"runs": runs})
    assert compiled == pytest.approx(eager, rel=1e-5) and compiled != eager


@pytest.mark.full
@pytest.mark.skipif(not which("g++"), reason="inductor needs a C++ compiler")
def test_a_compiled_run_resumes_exactly(tiny_shards: Path, tmp_path: Path) -> None:
    """With dropout, whose numbers inductor makes from the seeds of the micro batch."""
    changes = {"model__dropout": 0.1, "performance__compile": "layers", "checkpoint__every": 3}
    run = {"overrides": tiny_overrides(tiny_shards, tmp_path, "run", **changes), "after": 3}
    run_ranks(1, "tests.distributed.workers.designs:train_all", {"runs": [run]})
    assert_resumed_exactly(tmp_path / "run", tmp_path / "run-after-3")


def test_an_engine_recomputes_what_another_keeps_bit_by_bit() -> None:
    """Under ZeRO-3 too, whose hooks fetch the weights once more."""
    runs = [
        overrides(
            performance__recompute=way,
            deepspeed__config=f"zero{stage}",
            data__global_batch_size=4,
            model__dropout=0.1,
        )
        for stage in (2, 3)
        for way in ("none", "attention", "full")
    ]
    losses = run_ranks(2, f"{WORKER}:engine_losses", {"runs": runs})
    for kept, *recomputed in (losses[:3], losses[3:]):
        assert recomputed == [kept, kept]


def test_compiled_layers_and_zero_3_are_refused(tmp_path: Path) -> None:
    config = load_config(
        "demo", overrides(performance__compile="layers", deepspeed__config="zero3")
    )
    with pytest.raises(
        UserError, match=r"performance.compile=layers .* set performance.compile=none or"
    ):
        resolve(config, 1)
    automatic = load_config("demo", overrides()).performance
    assert not automatic.compiles(on_cuda=False, zero_stage=1)
    assert automatic.compiles(on_cuda=True, zero_stage=1)
    assert not automatic.compiles(on_cuda=True, zero_stage=3)


def test_a_missing_compiler_is_named_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        compile_layers(torch.nn.Linear(1, 1), "inductor")  # type: ignore[arg-type]


def test_the_cache_of_compiled_layers_tells_kinds_of_cpus_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As with TORCH_COMPILE_CACHE_KEY_TAG.
    monkeypatch.setattr("torch.compiler.config.cache_key_tag", "ours")
    model = torch.nn.Linear(1, 1)
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList()
    model.output_layer = SimpleNamespace(compile_passes=lambda backend: None)
    for _ in range(2):
        compile_layers(model, "aot_eager")  # type: ignore[arg-type]
    kernels = torch.backends.cpu.get_cpu_capability()
    assert torch.compiler.config.cache_key_tag == f"ours {kernels}"


def test_documents_attended_one_by_one_are_those_behind_a_mask() -> None:
    designs = ("orthogonal", "vanilla", "hybrid-three-adapters")
    product = list(itertools.product(designs, (4, 2), ("none", "attention")))
    kinds = covering(product, pair_up)
    cases = [
        case(
            "document_attention",
            ("mask", "flash"),
            model__num_query_groups=groups,
            data__reset_at_document_end="true",
            performance__recompute=recompute,
            **layout(2, True),
            **attention(design),
        )
        for design, groups, recompute in kinds
    ]
    for kind, report in zip(kinds, compare(2, cases), strict=True):
        assert 0 < report["loss"] < 1e-6 and report["gradients"] < 3e-6, (kind, report)


def test_a_gpus_kernel_takes_documents_as_they_are_given() -> None:
    """No GPU here: torch's own description of the kernel checks types and shapes, not numbers."""
    with FakeTensorMode(), torch.no_grad():
        starts = torch.zeros(2, 32, dtype=torch.int64, device="cuda")
        documents = Documents(starts, torch.zeros(16, dtype=torch.int32, device="cuda"))
        query = torch.empty(64, 4, 8, dtype=torch.bfloat16, device="cuda")
        value = torch.empty(64, 2, 8, dtype=torch.bfloat16, device="cuda")
        context = attend_within_documents(
            query, value, value=value, documents=documents, dropout=0.1, scale=0.5
        )
        assert context.shape == query.shape and context.dtype == query.dtype


def test_documents_begin_where_they_do() -> None:
    starts = torch.tensor([[0, 0, 2, 3, 3], [0, 0, 0, 0, 0]])
    boundaries = Documents(starts).with_boundaries().boundaries
    assert boundaries is not None and boundaries.dtype == torch.int32
    assert boundaries.tolist() == [0, 2, 3, 5] + [10] * 12
    alone = Documents(torch.arange(40)[None]).with_boundaries().boundaries  # every token a document
    assert alone is not None and alone.tolist() == [*range(40)] + [40] * 24


def test_which_way_documents_are_attended() -> None:
    def flash(device: str, **changes: object) -> bool:
        return flash_documents(load_config("demo", overrides(**changes)), torch.device(device))

    assert flash("cuda", precision__dtype="bf16") and not flash("cuda", precision__dtype="fp32")
    assert flash("cpu") and not flash("cpu", performance__document_attention="mask")
    assert not flash("cuda", precision__dtype="bf16", attention__variant="synthesizer_random")
