"""Report of the head-wise test: that of all fine-tunings, with the norms of the new rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_patches.bank.orthonormal import ROLES
from pretrain.finetuning.bert.arms import Arm, Condition, Norm
from pretrain.finetuning.bert.experiment import ReservoirTest
from pretrain.finetuning.encoding import ASIDE
from pretrain.finetuning.report import Trial, fine_tuned_report
from pretrain.reporting.tables import Table
from pretrain.reporting.text import share
from pretrain.study.report import Report, text_table


def pairs(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Return the names of orthonormal arms, each with every control of the same layers."""
    controls = (Condition.frozen, Condition.gaussian, Condition.reorthonormalized)
    drawn = [arm for arm in arms if arm.condition is Condition.orthonormal]
    return [
        (arm.name, other.name) for arm in drawn for c in controls if (other := Arm(c, arm.layers)) in arms
    ]


def reservoir_report(
    test: ReservoirTest,
    arms: Sequence[Arm],
    trials: Sequence[Trial],
    results: Sequence[Mapping[str, Any]],
    tolerance: float,
) -> Report:
    """Return the report: every arm beside `unfrozen`, and orthonormal ones beside each control.

    Args:
        results: of the trials, as report.json has them.
        tolerance: the part of the accuracy of `unfrozen` at the same seed that an arm may lose.
    """
    return fine_tuned_report(
        "BERT reservoir",
        "BERT with replaced queries and keys",
        trials,
        Arm(Condition.unfrozen).name,
        tolerance,
        _notes(test, results),
        {"experiment": test.identity, "runs": results},
        pairs(arms),
        _norms(results),
    )


def _norms(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the table of the heads' norms before and after, over seeds, layers and heads."""

    def mean_of(values: np.ndarray, digits: int) -> str:
        low, high = f"{values.min():.{digits}f}", f"{values.max():.{digits}f}"
        return f"{values.mean():.{digits}f} ({low} to {high})"

    rows = []
    for arm in dict.fromkeys(run["arm"] for run in results):
        for role in ROLES:
            own = (part for run in results if run["arm"] == arm for part in run["replaced"])
            parts = [part for part in own if part["role"] == role]
            if parts:
                before, after = (np.array([p[key] for p in parts]) for key in ("norms_before", "norms"))
                error = max(max(part["errors"]) for part in parts)
                norms = (mean_of(before, 3), mean_of(after, 3), mean_of(after / before, 2))
                rows.append((arm, role, *norms, f"{error:.1e}"))
    header = ("arm", "role", "norm before", "norm", "ratio", "max |WWᵀ − I|")
    title = "Frobenius norm of a head's rows, mean (smallest to largest)"
    return [text_table(title, header, rows)] if rows else []


def _notes(test: ReservoirTest, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    config = test.bert.config
    norm = (config.hidden_size // config.num_attention_heads) ** 0.5
    scale = {
        Norm.match: "Each head's new rows have the Frobenius norm of what they replaced (--norm match).",
        Norm.unit: f"New rows have length 1 (gaussian: in expectation), a head norm √head_dim = {norm:.3f}; "
        "scores grow with the product of both ratios in the table of norms.",
    }
    notes = [
        f"The BERT: {config.num_hidden_layers} layers of {config.hidden_size}, {config.num_attention_heads} "
        "heads. Arms of one seed are pairs: docs/bert-reservoir.md says what they share.",
        scale[test.norm],
        f"Weights are those of the best look at {share(ASIDE)} of the training examples, set aside by the "
        f"seed; the {runs[0]['items']:,} validation examples chose nothing. The interval is of the mean over "
        "seeds, for this one pretrained model and these examples.",
        f"Always the most frequent label would have an accuracy of {100 * runs[0]['majority']:.2f} %.",
        "Frozen tensors were compared bit for bit after training; pooler and classifier changed in each run.",
    ]
    if new := sorted({name for run in runs for name in run["made_anew"]}):
        notes.append(f"Not in the directory, made anew by the seed: {', '.join(new)}.")
    if cut := max(run["shortened"] for run in runs):
        notes.append(f"{cut} examples were cut to {test.longest} pieces.")
    return notes
