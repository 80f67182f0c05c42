"""data.reset_at_document_end: documents of a sample know nothing of each other.

In each variant; on one rank and on two of tensor and sequence parallelism.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow

VARIANTS, POSITIONS = ("vanilla", "orthogonal"), ("learned", "rope")
LAYOUTS = {1: (4, False), 2: (2, True)}
"""{tensor-parallel ranks: (query groups, sequence parallel)}"""


@pytest.fixture(scope="module")
def reports() -> dict[tuple[int, str, str], dict[str, float]]:
    """{(tensor-parallel ranks, variant, positions): report}"""
    all_reports = {}
    for ranks, (groups, sequence_parallel) in LAYOUTS.items():
        kinds = list(itertools.product(VARIANTS, POSITIONS))
        cases = [
            {
                "variant": variant,
                "positions": positions,
                "groups": groups,
                "sequence_parallel": sequence_parallel,
            }
            for variant, positions in kinds
        ]
        answers = run_ranks(ranks, "tests.distributed.workers.packing:cases", {"cases": cases})
        all_reports |= {(ranks, *kind): report for kind, report in zip(kinds, answers, strict=True)}
    return all_reports


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_two_documents_in_one_sample_are_as_each_alone(
    reports: dict[tuple[int, str, str], dict[str, float]], variant: str, positions: str, ranks: int
) -> None:
    report = reports[ranks, variant, positions]
    # With rope megatron-core counts positions through the sample: equal logits show that it does
    # not matter.
    assert report["logits"] < 1e-5
    assert report["gradients"] < 1e-5 * max(1.0, report["largest gradient"])
    assert report["second, first changed"] == 0.0  # exactly
    # The comparisons do notice documents packed as one text, and there is something to notice.
    assert report["first, itself changed"] > 1e-2
    assert report["logits as one text"] > 1e-2 and report["gradients as one text"] > 1e-2


@pytest.fixture(scope="module")
def curves(
    tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[float]]]:
    """Curves of samples that hold a few documents each, and of a run that has them as one text."""
    runs = tmp_path_factory.mktemp("packing")

    def asked(name: str, **changes: object) -> dict[str, list[str]]:
        keys = {
            "data__reset_at_document_end": "true",
            "data__sequence_length": 64,
            "data__validation_samples": 3,
            "model__position_embedding": "learned",
            "optimizer__learning_rate": 3e-4,
            "schedule__steps": 8,
            "telemetry__tensorboard": "false",
        }
        return {"overrides": tiny_overrides(tiny_shards, runs, name, **{**keys, **changes})}

    worker = "tests.distributed.workers.designs:train_all"
    alone = [
        asked("samples", data__micro_batch_size=1),
        asked("batches", data__micro_batch_size=8),
        asked("one-text", data__reset_at_document_end="false"),
    ]
    reports = dict(
        zip(("samples", "batches", "one text"), run_ranks(1, worker, {"runs": alone}), strict=True)
    )
    (reports["ranks"],) = run_ranks(2, worker, {"runs": [asked("ranks")]})
    return reports


@pytest.mark.parametrize("spread", ["batches", "ranks"])
def test_the_mean_is_over_counted_predictions_of_the_global_batch(
    curves: dict[str, Any], spread: str
) -> None:
    """Ranks and micro batches see different numbers of document ends.

    None may weigh more for it.
    """
    for quantity in ("loss", "gradient_norm", "validation"):
        expected = pytest.approx(curves["samples"][quantity], rel=1e-5)
        assert curves[spread][quantity] == expected, quantity
        assert curves["one text"][quantity] != expected, quantity
