"""The page of a replayed step, and the first difference between two runs.

A difference is looked for in the records, then in the checkpoints that both runs have, then by
making the steps around the first one again with both and comparing master weights and the
optimizer's states tensor by tensor. Where the state before a step was equal, AdamW's first moments
differ by (1 - β1) times the difference of the clipped gradients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from laboratory.replay.prepare import Past, first_own_step, look_up, replayed
from laboratory.study.report import Block, Document
from pretrain.config.keys import KEYS, by_section
from pretrain.errors import UserError
from pretrain.reporting.tables import Column, Table, table_of
from pretrain.runs.directory import RunDirectory, step_of
from pretrain.runs.facts import read_facts
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import GRADIENT_NORM, LOSS, Page, metric_of

SHOWN, LETTERS = 10, 70
"""Rows, and letters of a document, on the terminal; the page has all documents whole."""
NONE_RECORDED = "no step is recorded by both"
NONE_SAVED = "no step has a checkpoint of both"
BEFORE = 2
"""Steps before the first recorded difference whose states are compared too."""
_NO_CAUSE = {"seals"}.union(
    # branched_from: schedule.branch_from says it
    ["started", "host", "first_step", "changes", "run.name", "run.directory", "branched_from"]
)


def agreement(record: Mapping[str, Any], loss: float | None, norm: float | None) -> str:
    """Return a clause that compares loss and gradient norm of a replayed step with its record.

    Args:
        record: Record of the step, from metrics.jsonl.
        loss: Replayed loss; None: not finite.
        norm: Replayed gradient norm; None: not finite.
    """
    then = [float(record.get(metric.tag) or "nan") for metric in (LOSS, GRADIENT_NORM)]
    if math.isnan(sum(then)):
        return "without a finite record of the step"
    if then == [loss, norm]:
        return "bit-equal to the record"
    recorded = f"the record (loss {then[0]!r}, gradient norm {then[1]!r})"
    if loss is None or norm is None:
        return f"unlike {recorded}"
    apart = max(abs(now - was) / abs(was) for now, was in zip((loss, norm), then, strict=True))
    return f"within {apart:.1e} of {recorded}"


def _number(value: float | None, form: str = "{!r}") -> str:
    return "not finite" if value is None else form.format(value)


def replay_document(past: Past, answer: Mapping[str, Any], *, another_layout: bool) -> Document:
    """Return the findings of a replay as page, JSON and terminal output.

    Args:
        answer: Answer of `replay.__main__`.
        another_layout: Whether the replay had another layout than the run.
    """
    _, loss, norm = answer["trace"][-1]
    layout = "another layout than the run" if another_layout else "the layout of the run"
    head = (
        f"Step {past.step} of {past.run.path}: loss {_number(loss)}, gradient norm "
        f"{_number(norm)}; "
        f"{agreement(past.record, loss, norm)} (from step {answer['begins_after']} on, {layout})."
    )
    documents = answer["documents"]
    whole = []
    for rank, entry in enumerate(documents, start=1):
        samples = ", ".join(map(str, entry["samples"]))
        share = entry["share"]
        loss_share = "loss not finite" if share is None else f"{100 * share:.2f} % of the loss"
        whole += [
            f"### {rank}. {entry['document']} (sample {samples}, {loss_share})",
            "\n".join(f"    {line}" for line in entry["text"].splitlines()),
        ]
    table = table_of(enumerate(documents, start=1), _DOCUMENT)
    parts = layer_norms(answer["gradient_norms"]).items()
    norms = [
        (name, f"{part_norm:.6g}", f"{100 * (part_norm / norm) ** 2:.1f} %")
        for name, part_norm in parts
    ]
    layers: Block = "There was no update, hence no gradient that the optimizer got."
    if norms:
        layers = Table(("part", "gradient norm", "share of its square"), norms)
    more = len(documents) - SHOWN
    return Document(
        page=[
            f"# Replay of step {past.step}",
            head,
            "## Gradient norm by part",
            layers,
            "## Documents by their share",
            table,
            "## Their text in the batch",
            *whole,
        ],
        content={
            "run": str(past.run.path),
            "step": past.step,
            "recorded": dict(past.record),
            **answer,
        },
        summary=[
            head,
            replace(table, rows=table.rows[:SHOWN]),
            f"{more} more documents are on the page." if more > 0 else "",
            layers,
        ],
        content_file="replay.json",
    )


def _start_of(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    return text[:LETTERS] + ("…" if len(text) > LETTERS else "")


def _mean_loss(entry: Mapping[str, Any]) -> float | None:
    loss: float | None = entry["loss"]
    return None if loss is None else loss / max(1, entry["tokens"])


_DOCUMENT: tuple[Column[tuple[int, Mapping[str, Any]]], ...] = (
    Column("", lambda row: str(row[0])),
    Column("document", lambda row: row[1]["document"], in_words=True),
    Column("tokens", lambda row: str(row[1]["tokens"])),
    Column("loss a token", lambda row: _number(_mean_loss(row[1]), "{:.3f}")),
    Column("share of the loss", lambda row: _number(row[1]["share"], "{:.2%}").replace("%", " %")),
    Column("text", lambda row: _start_of(row[1]["text"]), in_words=True),
)
"""Columns of the documents of a step, each with its rank."""


def layer_norms(norms: Mapping[str, float | None]) -> dict[str, float]:
    """Return {part of the model: norm of its gradient}, in the order of the forward pass.

    Norms that are not finite (None) are left out.
    """
    squares: dict[str, float] = {}
    finite = {name: norm for name, norm in norms.items() if norm is not None}
    for name in sorted(finite, key=forward_order):
        layer = re.search(r"layers\.(\d+)\.", name)
        part = f"layer {layer[1]}" if layer else name.rpartition(".")[0] or name
        squares[part] = squares.get(part, 0.0) + finite[name] ** 2
    return {part: math.sqrt(square) for part, square in squares.items()}


def forward_order(name: str) -> tuple[int, int, str]:
    """Return a key that sorts parameters as the forward pass uses them."""
    layer = re.search(r"layers\.(\d+)\.", name)
    return (0 if "embedding" in name else 1 if layer else 2, int(layer[1]) if layer else 0, name)


def diff_document(one: Path, other: Path) -> Document:
    """Find the first difference of two runs; return it as page, JSON and terminal output.

    Args:
        one: Run directory.
        other: Run directory.
    """
    pair = (one, other)
    begins = [first_own_step(path) for path in pair]
    causes = _causes(*(look_up(path, step) for path, step in zip(pair, begins, strict=True)))
    step, records = first_recorded(one, other)
    saved, equal_until, tensors = first_saved(one, other)
    first = min(
        (differing_step for differing_step in (step, tensors and tensors.step) if differing_step),
        default=None,
    )
    nothing = (records, saved) == (NONE_RECORDED, NONE_SAVED)
    answer = f"{'Nothing to compare' if nothing else 'No difference'}: {records}; {saved}."
    reproduced: list[str] = []
    if first is not None and first < max(begins):
        answer = (
            f"{records}; {saved}. Step {first} is of a trunk, before a branch begins (step "
            f"{max(begins)}): compare the trunks."
        )
    elif first is not None:
        try:
            words, reproduced, tensors = _repeated(pair, first, equal_until)
        except (UserError, DataError) as error:  # say, the data have moved
            words = f"Step {first} was not repeated: {error}."
        answer = f"{records}; {saved}. {words}"
    page: list[Block] = [f"# {one} and {other}", answer, "## Settings, data and versions", causes]
    if reproduced:
        page += [f"## Step {first} repeated", reproduced, tensors.table() if tensors else ""]
    elif tensors is not None:
        page += [f"## Checkpoints of step {tensors.step}", tensors.table()]
    content = {
        "runs": [*map(str, pair)],
        "answer": answer,
        "first_step": first,
        "causes": causes,
        "reproduced": reproduced,
        "tensors": [*tensors.rows] if tensors else [],
    }
    return Document(page, content, (answer, causes), content_file="diff.json")


def _repeated(
    pair: Sequence[Path], first: int, equal_until: int
) -> tuple[str, list[str], Tensors | None]:
    """Repeat the steps around the first difference with both runs.

    Args:
        pair: Run directories.
        first: The first step that differs.
        equal_until: The last step whose checkpoints are equal.

    Returns:
        What that shows, how each agrees with its record, and the first tensors that differ.

    Raises:
        UserError, DataError: one of them cannot be repeated.
    """
    alike = [first_own_step(path, first) for path in pair]
    # Runs whose weights are equal throughout may differ in what they measured.
    keep = range(max(min(equal_until, first - 1) + 1, first - BEFORE, *alike), first + 1)
    pasts = [look_up(path, first, keep.start) for path in pair]
    with (
        replayed(pasts[0], keep=keep) as (a, answer_a),
        replayed(pasts[1], keep=keep) as (b, answer_b),
    ):
        tensors = next(
            (difference for step in keep if (difference := compare_states(a, b, step))), None
        )
    traces = (answer_a["trace"], answer_b["trace"])
    reproduced = [
        f"{past.run.path}: {agreement(past.record, *trace[-1][1:])}"
        for past, trace in zip(pasts, traces, strict=True)
    ]
    return _made_again(*traces, tensors), reproduced, tensors


def _made_again(trace_a: Sequence[Any], trace_b: Sequence[Any], tensors: Tensors | None) -> str:
    """Compare the traces of two replays, each [[step, loss, gradient norm], ...], in a sentence."""
    losses = {row[0]: row for row in trace_a}
    apart = next((row for row in trace_b if losses.get(row[0], row) != row), None)
    if apart is None and tensors is None:
        return (
            "Repeated by this version on this machine, losses, gradient norms and tensors are "
            "equal: the difference is of what was measured beside them, or came with the code, the "
            "versions or the machine that trained them."
        )
    words = "Repeated, losses and gradient norms are equal up to there."
    if apart is not None:
        step, loss, norm = losses[apart[0]]
        _, other_loss, other_norm = apart
        words = (
            f"Repeated, they part at step {step}: loss {_number(loss)} and "
            f"{_number(other_loss)}, gradient norm {_number(norm)} and {_number(other_norm)}."
        )
    return f"{words} {'All tensors are still equal then.' if tensors is None else tensors.first()}"


@dataclass(frozen=True)
class Tensors:
    """States of tensors that differ after a step, in the order of the forward pass.

    Attributes:
        rows: (name, kind, largest |a - b|, that over the largest |a|).
        alone: Parameters of one run only.
    """

    step: int
    rows: Sequence[tuple[str, str, float, float]]
    alone: Sequence[str]

    def table(self) -> Table:
        """Return the first of them as a table."""
        header = ("tensor", "state", "largest difference", "relative to the largest value")
        shown = [
            (name, kind, f"{apart:.3g}", f"{ratio:.3g}") for name, kind, apart, ratio in self.rows
        ]
        return Table(header, shown[:SHOWN], (0, 1))

    def first(self) -> str:
        """Return the first of them as a sentence."""
        words = (
            f"{len(self.alone)} parameters are of one run only, first {self.alone[0]}."
            if self.alone
            else ""
        )
        if not self.rows:
            return words
        name, kind, apart, ratio = self.rows[0]
        return (
            f"After step {self.step} {len(self.rows)} states of tensors differ, the first in the "
            f"forward pass {kind} of {name} by at most {apart:.3g}, {ratio:.2g} of its largest "
            f"value. {words}"
        )


def _causes(*pasts: Past) -> list[str]:
    """Return settings, data, versions and layout in which the runs differ, as sentences."""
    both = []
    for past in pasts:
        environment = read_facts(past.run.environment)
        config = by_section(read_facts(past.run.config))
        parts = {key: key.rpartition(".") for key in KEYS}
        values = {
            key: config.get(section, {}).get(name) for key, (section, _, name) in parts.items()
        }
        facts = {
            "data": read_facts(past.run.data)["fingerprint"],
            "python": environment.get("python"),
        }
        both.append(values | environment.get("packages", {}) | dict(past.segment) | facts)
    first, second = both
    keys = [key for key in first | second if key not in _NO_CAUSE]
    differing = [key for key in keys if first.get(key) != second.get(key)]
    return [f"{key}: {first.get(key)} and {second.get(key)}" for key in differing] or ["the same"]


def first_recorded(one: Path, other: Path) -> tuple[int | None, str]:
    """Return the first step whose records differ in more than times and memory, and a clause.

    Args:
        one: Run directory.
        other: Run directory.
    """
    both = [
        {r["step"]: r for r in read_metrics(RunDirectory(path).metrics)} for path in (one, other)
    ]
    common = sorted(both[0].keys() & both[1].keys())
    for step in common:
        a, b = (records[step] for records in both)
        for tag in [tag for tag in a if "/" in tag and tag in b and a[tag] != b[tag]]:
            metric = metric_of(tag)
            if not metric.measured and metric.page in (Page.QUALITY, Page.INSIDE):
                values = f"{tag} {a[tag]!r} and {b[tag]!r}"
                return step, f"the records differ from step {step} on, {values}"
    equal = f"all {len(common)} steps that both recorded are equal"
    return None, equal if common else NONE_RECORDED


def first_saved(one: Path, other: Path) -> tuple[str, int, Tensors | None]:
    """Compare the checkpoints of the steps that two runs both saved.

    Args:
        one: Run directory.
        other: Run directory.

    Returns:
        A clause, the last step whose checkpoints are equal (0: none), and the first that differ.
    """
    a, b = (RunDirectory(path) for path in (one, other))
    saved = [set(map(step_of, run.complete_checkpoints())) for run in (a, b)]
    steps = sorted(saved[0] & saved[1])
    equal = 0
    for step in steps:
        if differing := compare_states(a, b, step):
            return f"the checkpoints of step {step} differ", equal, differing
        equal = step
    listed = f"the checkpoints of steps {', '.join(map(str, steps))} are equal"
    return listed if steps else NONE_SAVED, equal, None


def compare_states(a: RunDirectory, b: RunDirectory, step: int) -> Tensors | None:
    """Compare two checkpoints of a step tensor by tensor, whatever their layouts.

    Args:
        a: A run.
        b: Another run.
        step: Step whose checkpoints are compared.

    Returns:
        What differs; None where all bits are equal.
    """
    from pretrain.checkpoint.loading import StoredCheckpoint  # imports the model

    first, second = (StoredCheckpoint(run.checkpoint(step)) for run in (a, b))
    shapes = [
        {
            name: (parameter.shape, parameter.kinds)
            for name, parameter in checkpoint.parameters.items()
        }
        for checkpoint in (first, second)
    ]
    common = [name for name in shapes[0] if shapes[0][name] == shapes[1].get(name)]
    alone = sorted(set(shapes[0] | shapes[1]) - set(common), key=forward_order)
    rows = []
    for name in sorted(common, key=forward_order):
        for kind in first.parameters[name].kinds:
            mine = first.full(kind, name)
            yours = second.full(kind, name)
            if not mine.equal(yours):
                apart, largest = (float(values.abs().max()) for values in (mine - yours, mine))
                rows.append((name, kind, apart, apart / max(largest, 1e-300)))
    return Tensors(step, rows, alone) if rows or alone else None
