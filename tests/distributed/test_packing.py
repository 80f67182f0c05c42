"""data.reset_at_document_end: documents of a sample know nothing of each other.

In any layout and variant.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

VARIANTS, POSITIONS = ("vanilla", "orthogonal"), ("learned", "rope")
LAYOUTS = [  # (tensor parallel, query groups, sequence parallel)
    (1, 4, False),
    (1, 2, False),
    (2, 4, False),
    (2, 4, True),
    (2, 2, True),
]
TRAININGS = [  # (ranks, tensor parallel, sequence parallel, micro batch size)
    (1, 1, False, 1),
    (1, 1, False, 8),
    (2, 1, False, 2),
    (4, 1, False, 1),
    (2, 2, True, 4),
    (4, 2, True, 2),
]


@pytest.fixture(scope="module")
def reports() -> dict[tuple[Any, ...], dict[str, float]]:
    found = {}
    for size in (1, 2):
        cases = [
            (variant, positions, groups, sequence_parallel)
            for variant, positions in itertools.product(VARIANTS, POSITIONS)
            for tensor_parallel, groups, sequence_parallel in LAYOUTS
            if tensor_parallel == size
        ]
        names = ("variant", "positions", "groups", "sequence_parallel")
        payload = {"cases": [dict(zip(names, case, strict=True)) for case in cases]}
        answers = run_ranks(size, "tests.distributed.workers.packing:cases", payload)
        found.update({(size, *case): answer for case, answer in zip(cases, answers, strict=True)})
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_documents_in_one_sample_are_as_each_alone(
    reports: dict[tuple[Any, ...], dict[str, float]],
    variant: str,
    positions: str,
    layout: tuple[int, int, bool],
) -> None:
    tensor_parallel, groups, sequence_parallel = layout
    report = reports[tensor_parallel, variant, positions, groups, sequence_parallel]
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
) -> dict[Any, dict[str, list[float]]]:
    """{training: curves}, samples holding a few documents each.

    Also of a run that packs them as one text.
    """
    runs = tmp_path_factory.mktemp("packing")
    found = {}
    for ranks in (1, 2, 4):
        cases = [training for training in TRAININGS if training[0] == ranks]
        cases += ["one text"] if ranks == 1 else []
        overrides = [
            tiny_overrides(
                tiny_shards,
                runs,
                f"run-{ranks}-{number}",
                data__reset_at_document_end=str(case != "one text").lower(),
                data__sequence_length=64,
                data__micro_batch_size=8 if case == "one text" else case[3],
                data__validation_samples=3,
                parallel__tensor_model_parallel_size=1 if case == "one text" else case[1],
                parallel__sequence_parallel=str(case != "one text" and case[2]).lower(),
                model__position_embedding="learned",
                optimizer__learning_rate=3e-4,
                schedule__steps=8,
                telemetry__tensorboard="false",
            )
            for number, case in enumerate(cases)
        ]
        asked = [{"overrides": own} for own in overrides]
        answers = run_ranks(ranks, "tests.distributed.workers.designs:train_all", {"runs": asked})
        found.update(zip(cases, answers, strict=True))
    return found


@pytest.mark.parametrize("training", TRAININGS[1:], ids=str)
def test_the_mean_is_over_counted_predictions_of_the_global_batch(
    curves: dict[Any, Any], training: tuple[int, int, bool, int]
) -> None:
    """Ranks and micro batches see different numbers of document ends.

    None may weigh more for it.
    """
    for quantity in ("loss", "gradient_norm", "validation"):
        assert curves[training][quantity] == pytest.approx(
            curves[TRAININGS[0]][quantity], rel=1e-5
        ), quantity


def test_the_option_changes_the_training(curves: dict[Any, Any]) -> None:
    for quantity in ("loss", "gradient_norm", "validation"):
        assert curves["one text"][quantity] != pytest.approx(
            curves[TRAININGS[0]][quantity], rel=1e-5
        ), quantity
