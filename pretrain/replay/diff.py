"""The verb `diff`: the first step and the first tensor in which two runs differ, and by how much.

First the records, then the checkpoints that both have, then the steps around the first difference made again
with both and compared tensor by tensor: master weights and AdamW's moments. Where the state before a step was
equal, the first moments differ by (1 - β1) times the difference of the clipped gradients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pretrain.replay.prepare import Past
    from pretrain.runs.directory import RunDirectory
    from pretrain.study.report import Block

SHOWN = 10
KEPT = 2
"""Steps before the first recorded difference whose states are compared too."""
_NOT_A_CAUSE = ("started", "host", "first_step", "changes")


def diff(
    one: Annotated[Path, typer.Argument(help="Run directory.")],
    other: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[Path, typer.Option(help="Directory for report.md and diff.json.")] = Path("diff"),
) -> None:
    """Find the first step and the first tensor in which two runs differ.

    Example: python -m pretrain diff demo/runs/vanilla demo/runs/orthogonal
    """
    from pretrain.replay.prepare import look_up, replayed
    from pretrain.replay.verb import agreement
    from pretrain.reporting.tables import Table
    from pretrain.study.report import Document, finish
    from pretrain.study.seeds import refuse_twice

    pair = (one, other)
    refuse_twice(pair)
    causes = _causes(*(look_up(path, 1) for path in pair))
    step, records = first_recorded(*pair)
    saved, equal_until, tensors = first_saved(*pair)
    page: list[Block] = [f"# {one} and {other}", "## What they were told and ran on", causes or ["the same"]]
    page += ["## Records", records, "## Checkpoints", saved]
    content: dict[str, Any] = {
        "runs": [*map(str, pair)],
        "causes": causes,
        "records": records,
        "saved": saved,
    }
    steps = [found for found in (step, tensors.step if tensors else None) if found is not None]
    answer = f"No difference: {records}; {saved}."
    if steps:
        first = min(steps)
        keep = range(max(equal_until + 1, first - KEPT), first + 1)
        pasts = [look_up(path, first, keep.start) for path in pair]
        with replayed(pasts[0], keep=keep) as (a, told), replayed(pasts[1], keep=keep) as (b, said):
            tensors = next((found for each in keep if (found := compare_states(a, b, each))), None)
        reproduced = [
            f"{past.run.path}: {agreement(past.record, *answer['trace'][-1][1:])}"
            for past, answer in zip(pasts, (told, said), strict=True)
        ]
        losses = {row[0]: row[1:] for row in told["trace"]}
        apart = next((row for row in said["trace"] if losses.get(row[0], row[1:]) != row[1:]), None)
        began = f"{records}; {saved}."
        if tensors is None and apart is None:
            answer = (
                f"{began} Made again by this version on this machine, both are equal through step {first}: "
                "the difference came with the code, the versions or the machine that trained them."
            )
        else:
            answer = f"{began} {_told(apart, losses)}{_first_tensor(tensors)}"
        page += [f"## Step {first} made again", reproduced, *([tensors.table(Table)] if tensors else [])]
        content |= {"first_step": first, "reproduced": reproduced, "tensors": tensors and tensors.rows}
    content["answer"] = answer
    finish(Document([*page[:1], answer, *page[1:]], content, (answer, causes), content_file="diff.json"), out)


@dataclass(frozen=True)
class Tensors:
    """States of tensors that differ after a step, in the order of the forward pass.

    Attributes:
        rows: (name, kind, largest |a - b|, that over the largest |a|).
        alone: parameters of one run only.
    """

    step: int
    rows: Sequence[tuple[str, str, float, float]]
    alone: Sequence[str]

    def table(self, kind: Any) -> Any:
        """Return the first of them as a table."""
        shown = [
            (name, what, f"{apart:.3g}", f"{ratio:.3g}") for name, what, apart, ratio in self.rows[:SHOWN]
        ]
        return kind(("tensor", "state", "largest difference", "relative to the largest value"), shown, (0, 1))


def _first_tensor(found: Tensors | None) -> str:
    if found is None:
        return " After the step every tensor is still equal."
    alone = (
        f" {len(found.alone)} parameters are of one run only, first {found.alone[0]}." if found.alone else ""
    )
    if not found.rows:
        return alone
    name, kind, apart, ratio = found.rows[0]
    return (
        f" After step {found.step} {len(found.rows)} states of tensors differ; the first in the forward pass "
        f"is {kind} of {name}, by at most {apart:.3g} ({ratio:.2g} of its largest value).{alone}"
    )


def _told(apart: Sequence[float] | None, losses: Mapping[int, Sequence[float]]) -> str:
    if apart is None:
        return "Made again, losses and gradient norms are equal up to there."
    step, loss, norm = apart
    return (
        f"Made again, they part at step {int(step)}: loss {losses[int(step)][0]!r} and {loss!r}, "
        f"gradient norm {losses[int(step)][1]!r} and {norm!r}."
    )


def _causes(a: Past, b: Past) -> list[str]:
    """Return settings, data, versions and layout in which the runs differ, as sentences."""
    import yaml

    from pretrain.config.keys import KEYS

    found = []
    mine, yours = (yaml.safe_load(past.run.config.read_text()) for past in (a, b))
    for key in KEYS:
        section, _, name = key.partition(".")
        was, now = (config.get(section, {}).get(name) for config in (mine, yours))
        if was != now and key not in ("run.name", "run.directory"):
            found.append(f"{key}: {was} and {now}")
    facts = []
    for past in (a, b):
        environment = json.loads(past.run.environment.read_text())
        facts.append({**environment.get("packages", {}), "python": environment.get("python"), **past.segment})
        data = json.loads(past.run.data.read_text()) if past.run.data.is_file() else {}
        facts[-1]["data"] = data.get("fingerprint")
    for key in dict.fromkeys([*facts[0], *facts[1]]):
        was, now = (each.get(key) for each in facts)
        if was != now and key not in _NOT_A_CAUSE:
            found.append(f"{key}: {was} and {now}")
    return found


def first_recorded(one: Path, other: Path) -> tuple[int | None, str]:
    """Return the first step whose records differ in more than times and memory, and a clause about it."""
    from pretrain.runs.directory import RunDirectory
    from pretrain.runs.metrics_file import read_metrics
    from pretrain.runs.tags import Page, metric_of

    both = [{r["step"]: r for r in read_metrics(RunDirectory(path).metrics)} for path in (one, other)]
    common = sorted(both[0].keys() & both[1].keys())
    for step in common:
        a, b = (records[step] for records in both)
        tags = [tag for tag in a if tag in b and tag not in ("step", "tokens", "samples")]
        for tag in tags:
            metric = metric_of(tag)
            quality = metric.chart is None or metric.chart[0] is Page.QUALITY
            if quality and not metric.measured and a[tag] != b[tag]:
                return step, f"the records differ from step {step} on: {tag} {a[tag]!r} and {b[tag]!r}"
    return None, f"all {len(common)} steps that both recorded are equal"


def first_saved(one: Path, other: Path) -> tuple[str, int, Tensors | None]:
    """Compare the checkpoints of the same steps.

    Returns:
        A clause, the last step whose checkpoints are equal (0: none), and the first that differ.
    """
    from pretrain.runs.directory import RunDirectory, step_of

    a, b = (RunDirectory(path) for path in (one, other))
    steps = sorted(set(map(step_of, a.complete_checkpoints())) & set(map(step_of, b.complete_checkpoints())))
    equal = 0
    for step in steps:
        if found := compare_states(a, b, step):
            return f"the checkpoints of step {step} differ", equal, found
        equal = step
    listed = f"the checkpoints of steps {', '.join(map(str, steps))} are equal"
    return listed if steps else "no step has a checkpoint of both", equal, None


def compare_states(a: RunDirectory, b: RunDirectory, step: int) -> Tensors | None:
    """Compare two checkpoints of a step tensor by tensor, of whatever layouts; None: all bits are equal."""
    from pretrain.checkpoint.loading import StoredCheckpoint
    from pretrain.replay.verb import forward_order

    one, other = (StoredCheckpoint(run.checkpoint(step)) for run in (a, b))
    alone = sorted(one.parameters.keys() ^ other.parameters.keys(), key=forward_order)
    alone += [n for n in one.parameters.keys() & other.parameters.keys() if not _alike(one, other, n)]
    names = sorted((one.parameters.keys() & other.parameters.keys()) - set(alone), key=forward_order)
    rows = [row for name in names for row in _differences(one, other, name)]
    return Tensors(step, rows, alone) if rows or alone else None


def _alike(one: Any, other: Any, name: str) -> bool:
    return bool(one.parameters[name].shape == other.parameters[name].shape)


def _differences(one: Any, other: Any, name: str) -> Iterator[tuple[str, str, float, float]]:
    from pretrain.checkpoint.format import KINDS

    for kind in KINDS:
        mine, yours = one.full(kind, name), other.full(kind, name)
        if not mine.equal(yours):
            apart = float((mine - yours).abs().max())
            yield name, kind, apart, apart / max(float(mine.abs().max()), 1e-300)
