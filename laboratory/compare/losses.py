"""Losses of anybody's runs compared: the statistics of `compare`, without a run of this program.

compare_losses(["losses.csv"], baseline="trained", question="within", margin=1).gaps
compare_losses({"trained": {1: 3.31, 2: 3.29}, "frozen": {1: 3.40, 2: 3.37}}, out="comparison")
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from laboratory.compare.figures import gap_figure
from laboratory.compare.loss_files import Loss, by_model, number, read_losses, whole
from laboratory.compare.report import gap_definitions
from laboratory.reporting.plots import in_lines
from laboratory.study import sequential, tables
from laboratory.study.gaps import BITS, NATS, PairedGap, Scale, answers, gap_content, paired_gaps
from laboratory.study.hypothesis import QUESTIONS, Hypothesis
from laboratory.study.report import Block, Document, Picture, write
from laboratory.study.sequential import Decision
from pretrain.errors import UserError
from pretrain.reporting.tables import Table
from pretrain.reporting.text import mean_sd, spread

SCALES = {"nats": NATS, "bits": BITS}
_SHORT = (tables.PAIRS, tables.GAP, tables.INTERVAL, tables.PERPLEXITY, tables.T_HOLM)
_SEQUENTIAL = (tables.PAIRS, tables.GAP, tables.PERPLEXITY, tables.EFFECT)
_LONG = (*_SHORT[:-1], tables.LIES_WITHIN, tables.EFFECT, *tables.TESTS, tables.CLAIM)


@dataclass(frozen=True)
class LossComparison:
    """Losses of several models, each with the same seeds, against one of them.

    Attributes:
        baseline: Name of the model that the others are compared with.
        scale: Unit of the losses as they are shown.
        losses: {model: {seed: loss}}, in nats.
        gaps: {model: its gap to the baseline}, in nats.
        claims: {model: claim about it}; empty where nothing was asked.
        sequential: Whether the claims are judged after every pair, in the order of the seeds.
        notes: Sentences that a reader must know.
        command: Command that made the report; empty where a program did.
    """

    baseline: str
    scale: Scale
    losses: Mapping[str, Mapping[int, float]]
    gaps: Mapping[str, PairedGap]
    claims: Mapping[str, Hypothesis]
    sequential: bool
    notes: Sequence[str]
    command: Sequence[str] = ()

    @property
    def answers(self) -> dict[str, str | None]:
        """Return {model: "yes", "no", or None for undecided} of the claims."""
        if self.sequential:
            return {name: self._decision(name).answer for name in self.claims}
        return answers(self.gaps, self.claims)

    def document(self) -> Document:
        """Return page, JSON, figure and terminal output."""
        gaps = {} if self.sequential else self.gaps  # their tests are of a fixed number of pairs
        sentences = [tables.gap_sentence(name, gap) for name, gap in gaps.items()]
        sentences += [*map(self._verdict, self.claims), *self.notes]
        seeds = sorted(self.losses[self.baseline])
        headline = (
            f"Baseline: {self.baseline}. {len(self.losses)} models, each with the "
            f"{len(seeds)} seeds {', '.join(map(str, seeds))}; losses in {self.scale.unit}."
        )
        page: list[Block] = ["# Comparison of losses", headline, "## In short", sentences]
        page += [
            "## The gap to the baseline",
            "Paired by seed; positive is worse.",
            self._gaps(_SEQUENTIAL if self.sequential else _LONG),
            Picture("gap"),
            "## Losses",
            self._losses(),
        ]
        if self.sequential:
            page.append("## Pair by pair")
            page += [block for name in self.claims for block in self._looks(name)]
            page.append(f"Rule: {sequential.STOPPING_RULE}.")
        page += ["## How the numbers are made", self._definitions()]
        if self.command:
            page += ["## Made by", f"```\n{shlex.join(self.command)}\n```"]
        short = self._gaps(_SEQUENTIAL if self.sequential else _SHORT)
        shown_gaps = {in_lines(name): gap for name, gap in self.gaps.items()}
        axis = f"gap to {self.baseline} in {self.scale.unit}"
        return Document(
            page=page,
            content=self._content(),
            summary=[headline, short, sentences],
            figures={"gap": lambda: gap_figure(shown_gaps, axis)},
            content_file="comparison.json",
        )

    def _gaps(self, columns: Sequence[tables.GapColumn]) -> Table:
        rows = [tables.GapRow((name,), gap) for name, gap in self.gaps.items()]
        titled = [
            replace(column, title=f"gap, {self.scale.unit}") if column is tables.GAP else column
            for column in columns
        ]
        return tables.gap_table(("model",), rows, titled)

    def _losses(self) -> Table:
        """Return mean and deviation of each model, and every loss."""
        seeds = sorted(self.losses[self.baseline])
        rows = []
        for name, by_seed in self.losses.items():
            shown = [self.scale.factor * by_seed[seed] for seed in seeds]
            rows.append((name, mean_sd(spread(shown), 4), *(f"{loss:.4f}" for loss in shown)))
        return Table(("model", "mean ± sd", *(f"seed {seed}" for seed in seeds)), rows)

    def _decision(self, name: str) -> Decision:
        """Return the decision of a model's trial; pairs after the last look do not count."""
        return sequential.decide(self.gaps[name].differences[: sequential.LAST], self.claims[name])

    def _verdict(self, name: str) -> str:
        claim = self.claims[name]
        gap = self.gaps[name]
        if not self.sequential:
            answer = claim.answered(self.answers[name], "Not decided")
            return f"{answer}, by interval and test of {gap.n} pairs."
        decision = self._decision(name)
        if decision.n < sequential.FIRST:
            undecided = f"Not decided: a trial is first judged after {sequential.FIRST} pairs"
            return f"{claim.answered(None, undecided)}, and there are {decision.n}."
        needed = sequential.pairs_needed(decision.sd, claim)
        undecided = f"Not decided yet (a true yes is seen after {needed} pairs in 95 % of trials)"
        if decision.n == sequential.LAST:
            undecided = f"Not decided, and the rule ends after {sequential.LAST} pairs"
        return f"{sequential.verdict(claim, decision, undecided)}."

    def _looks(self, name: str) -> list[Block]:
        seeds = self.gaps[name].seeds[: self._decision(name).n]
        pairs = [(self.losses[self.baseline][seed], self.losses[name][seed]) for seed in seeds]
        return [sequential.look_table(self.claims[name], seeds, pairs, self.scale)]

    def _definitions(self) -> list[str]:
        unit = "In bits per byte, the perplexity is that of a byte: 2 to the power of the loss."
        how = [
            *gap_definitions(len(self.gaps)),
            "All this holds where the number of seeds was fixed before the first run. Who looks "
            "after each seed and stops when it is clear asks with --sequential.",
        ]
        if self.sequential:
            how = [
                "Gap: the mean of d_i = loss of the model - loss of the baseline at seed i. The "
                "perplexity gap is exp(mean(d)) - 1, Cohen's d is d_z = mean(d) / sd(d). Each of "
                f"the {len(self.claims)} trials by itself is wrong in at most 5 % of cases."
            ]
        return [
            "± is the standard deviation over seeds (n - 1 in the denominator).",
            *([unit] if self.scale is BITS else []),
            *how,
        ]

    def _content(self) -> dict[str, Any]:
        """Return the content of comparison.json; gaps are in nats, whatever the unit is."""
        return {
            "baseline": self.baseline,
            "unit": self.scale.unit,
            "losses": {
                name: {str(seed): self.scale.factor * loss for seed, loss in by_seed.items()}
                for name, by_seed in self.losses.items()
            },
            "gaps_in_nats": {
                name: gap_content(gap) | {"equivalent_within": gap.equivalent_within}
                for name, gap in self.gaps.items()
            },
            "hypotheses": [asdict(claim) for claim in self.claims.values()],
            "sequential": self.sequential,
            "answers": self.answers,
            "notes": list(self.notes),
        }


def compare_losses(
    losses: Mapping[str, Mapping[int, float]] | Sequence[str | os.PathLike[str]],
    baseline: str | None = None,
    metric: str | None = None,
    names: str | None = None,
    unit: str | None = None,
    question: str | None = None,
    margin: float = 2.0,
    sequential: bool = False,
    out: str | os.PathLike[str] | None = None,
) -> LossComparison:
    """Compare losses of any models, paired by seed, as the verb `compare-losses` does.

    Args:
        losses: {model: {seed: loss}}, or paths of tables and of metric files, the latter also as
            NAME:SEED=PATH.
        baseline: The model to compare with; None: the first.
        metric: Name of the loss in the files; None: the only one of held-out text.
        names: Column with the names in the tables; None: name, model, variant, run, design, arm.
        unit: nats (a token) or bits (a byte); None: bits where the metric is called bpb.
        question: Whether the others are better or worse by more than the margin, or within it;
            None: nothing is asked.
        margin: Percent of perplexity.
        sequential: Judge the question after every pair, so that one may have looked at any time.
        out: Directory for the report; None: none is written.

    Raises:
        UserError: a file cannot be read, a loss is not finite, there is one model only, or a model
            lacks a seed that the baseline has.
    """
    if sequential and question is None:
        raise UserError(f"--sequential needs a --question, one of {', '.join(QUESTIONS)}")
    notes: list[str] = []
    if not isinstance(losses, Mapping):
        files = [losses] if isinstance(losses, str | os.PathLike) else losses
        read = read_losses(files, metric, names)
        notes = _notes(read)
        unit = unit or ("bits" if any(loss.in_bits for loss in read) else "nats")
        losses = by_model(read)
    scale = SCALES.get(unit or "nats")
    if scale is None:
        raise UserError(f"there is no unit '{unit}'; give one of {', '.join(SCALES)}")
    values = _in_nats(losses, scale)
    if len(values) < 2:
        raise UserError(f"a comparison needs two models; here is {', '.join(values) or 'none'}")
    base = next(iter(values)) if baseline is None else baseline
    if base in values:
        _refuse_unpaired(values, base)
    gaps = paired_gaps(values, base, scale)
    asked = {name: Hypothesis(name, question, margin, base) for name in gaps if question}
    comparison = LossComparison(
        baseline=base,
        scale=scale,
        losses=values,
        gaps=gaps,
        claims=asked,
        sequential=sequential,
        notes=notes,
    )
    if out is not None:
        write(comparison.document(), Path(out))
    return comparison


def _in_nats(
    losses: Mapping[str, Mapping[int, float]], scale: Scale
) -> dict[str, dict[int, float]]:
    return {
        name: {
            whole(seed, f"'{name}'"): number(loss, f"'{name}', seed {seed}: the loss")
            / scale.factor
            for seed, loss in by_seed.items()
        }
        for name, by_seed in losses.items()
    }


def _refuse_unpaired(losses: Mapping[str, Mapping[int, float]], baseline: str) -> None:
    """Refuse models with different seeds, because dropping pairs afterwards selects a result."""
    for name in losses:
        for model, other in ((name, baseline), (baseline, name)):
            if lacking := sorted(losses[other].keys() - losses[model].keys()):
                seeds = ", ".join(map(str, lacking))
                remedy = "add it, or leave the seed out of all models"
                if max(map(len, losses.values())) == 1:
                    remedy = "if these are names of runs, give --name COLUMN with the models' names"
                raise UserError(
                    f"'{model}' has no loss of seed {seeds}, which '{other}' has; pairs need both: "
                    f"{remedy}"
                )


def _notes(losses: Sequence[Loss]) -> list[str]:
    """Return notes on the metric and the steps of the losses."""
    steps = sorted({str(loss.step) for loss in losses if loss.step not in (None, "")})
    if not losses:
        return []
    notes = [f"Metric: {losses[0].metric}" + (", its last value in each run." if steps else ".")]
    if len(steps) > 1:
        few = ", ".join(steps[:6]) + (", …" if len(steps) > 6 else "")
        notes.append(
            f"The losses are of different steps ({few}): unless that was meant, the runs are not "
            "of one length, and their gap is not of the model alone."
        )
    return notes
