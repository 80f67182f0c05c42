"""Sealed hypotheses: what was to be shown, how and with which runs, in a hashed file before the first run.

    DIRECTORY/seals/0123456789ab.json    {"sealed": {hypotheses, stopping rule, seeds, settings, commit ...},
                                          "sha256": of the canonical JSON of "sealed"}

`compare` and `trial` read the seals beside the runs, judge their hypotheses, and say what has changed since.
A seal of `ladder` has predictions in place of hypotheses.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pretrain.config.keys import KEYS
from pretrain.errors import UserError
from pretrain.runs.directory import write_json
from pretrain.runs.environment import STARTED, git_commit
from pretrain.runs.finished import FinishedRun

SEALS = "seals"
_SENTENCE = re.compile(r"(\S+) (better|worse|within) (\d+(?:\.\d+)?) ?%? (?:than|of) (\S+)")
_SETTINGS = frozenset(
    name for name, key in KEYS.items() if key.method or name == "attention.adapters"
)
"""Settings that decide how a model is trained, but for the seeds."""


@dataclass(frozen=True)
class Hypothesis:
    """Claim about the perplexity of a design against a baseline's; `margin` in percent.

    better, worse: lower, higher; refuted where a difference of the margin or more is excluded. within: the
    ratio lies between 1 - margin and 1 + margin.
    """

    design: str
    question: str
    margin: float
    baseline: str

    def __post_init__(self) -> None:
        if not 0 < self.margin < 100:
            raise UserError(f"a margin of {self.margin:g} % must be above 0 and below 100 percent")

    @classmethod
    def parse(cls, text: str) -> Hypothesis:
        """Read `DESIGN better|worse|within 2% than|of BASELINE`; UserError where the text is none."""
        if match := _SENTENCE.fullmatch(" ".join(text.split())):
            return cls(match[1], match[2], float(match[3]), match[4])
        raise UserError(
            f"'{text}' is no hypothesis; write it as 'DESIGN better|worse|within 2% than|of BASELINE', as "
            "'orthogonal within 5% of vanilla'"
        )

    def __str__(self) -> str:
        link = "of" if self.question == "within" else "than"
        return f"{self.design} {self.question} {self.margin:g} % {link} {self.baseline}"

    @property
    def edges(self) -> tuple[float, float]:
        """Return the margin's lower and upper edge, in nats per token."""
        return math.log(1 - self.margin / 100), math.log(1 + self.margin / 100)

    def answer(self, yes: tuple[float, float], no: tuple[float, float]) -> str | None:
        """Return "yes", "no", or None for undecided, by intervals for the gap in nats per token.

        `yes`, `no`: the interval that each answer has to be read from, (low, high).
        """
        lower, upper = self.edges
        shown, refuted = {
            "better": (yes[1] < 0, no[0] > lower),
            "worse": (yes[0] > 0, no[1] < upper),
            "within": (lower < yes[0] and yes[1] < upper, no[0] > upper or no[1] < lower),
        }[self.question]
        return "yes" if shown else "no" if refuted else None


@dataclass(frozen=True)
class Seal:
    """A seal as its file has it; `intact` is whether the content still has the hash."""

    path: Path
    content: Mapping[str, Any]
    intact: bool

    @property
    def hypotheses(self) -> list[Hypothesis]:
        return [Hypothesis(**values) for values in self.content["hypotheses"]]

    def runs_of(self, design: str, runs: Iterable[FinishedRun]) -> list[FinishedRun]:
        """Return the runs beside the seal that are of this design and of a sealed seed."""
        place, seeds = self.path.resolve().parent.parent, self.content["seeds"]
        beside = [run for run in runs if run.path.resolve().parent == place and run.seed in seeds]
        return [run for run in beside if design_of(run.config["run"]["name"], run.seed) == design]

    def changes(self, runs: Sequence[FinishedRun]) -> list[str]:
        """Return, as clauses, what is not as it was sealed: file, grid, settings, code, data, time."""
        sealed, found = (
            self.content,
            [] if self.intact else [f"{self.path} no longer has its own hash"],
        )
        grid = Path(sealed["grid"]["file"])
        if not grid.is_file() or file_hash(grid) != sealed["grid"]["sha256"]:
            found.append(f"the grid file {grid} has changed or is gone")
        began = datetime.strptime(sealed["sealed"], STARTED)
        own = [(name, run) for name in sealed["settings"] for run in self.runs_of(name, runs)]
        lacking = len(sealed["settings"]) * len(sealed["seeds"]) - len(own)
        if lacking and sealed["fixed_n"]:
            found.append(f"{lacking} of the sealed runs are not among these")
        for name, run in own:
            now, was = design_settings(run.config), sealed["settings"][name]
            keys = sorted(key for key in now.keys() | was.keys() if now.get(key) != was.get(key))
            found += [
                f"{key} is {now.get(key)} in {run.name}, sealed {was.get(key)}" for key in keys[:3]
            ]
            first = (run.environment.get("segments") or [run.environment])[0]
            if "started" not in first or datetime.strptime(first["started"], STARTED) < began:
                found.append(f"{run.name} began before, or does not say when")
            if run.data_fingerprint not in sealed["data"]:
                found.append(f"{run.name} has other data")
        commits = sorted({str(run.environment.get("git_commit")) for _, run in own})
        others = [commit[:12] for commit in commits if commit != str(sealed["commit"])]
        found += [
            f"runs are of commit {commit}, sealed at {str(sealed['commit'])[:12]}"
            for commit in others
        ]
        if any(commit.endswith("+") for commit in (*commits, str(sealed["commit"]))):
            found.append("a checkout had uncommitted changes")
        return found

    def statement(self, runs: Sequence[FinishedRun]) -> str:
        """Return the seal's time, hash and changes as one sentence."""
        changes, sealed = "; ".join(self.changes(runs)), self.content
        since = f"changed since: {changes}" if changes else "nothing has changed since"
        return f"Sealed {sealed['sealed']} as {self.path.stem}, {sealed['stopping_rule']}; {since}."


def design_of(name: str, seed: int) -> str:
    """Return the name of a sweep's run without its seed."""
    return name.removesuffix(f"-seed_{seed}")


def design_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {section.key: value} of a resolved config that decide how a model is trained, but for seeds."""
    pairs = {
        f"{section}.{key}": value
        for section, own in config.items()
        for key, value in dict(own).items()
    }
    return json.loads(
        json.dumps({key: pairs[key] for key in sorted(_SETTINGS & pairs.keys())}, default=str)
    )


def write_seal(directory: Path, content: Mapping[str, Any], begun: Sequence[str]) -> Seal | None:
    """Write a seal beside the runs, or return the one of the same content that is there already.

    `content`: hypotheses, stopping_rule, fixed_n, grid, seeds, settings {design: `design_settings`}, data.
    `begun`: names of those of the runs that are there; with any, nothing can be sealed and None comes back.
    """
    content = json.loads(json.dumps(content))
    for seal in read_seals([directory]):
        if {key: seal.content.get(key) for key in content} == content:
            return seal
    if begun:
        return None
    content = {
        **content,
        "commit": git_commit(),
        "sealed": datetime.now().astimezone().strftime(STARTED),
    }
    digest = _hash(content)
    path = directory / SEALS / f"{digest[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"sealed": content, "sha256": digest})
    return Seal(path, content, intact=True)


def read_seals(directories: Iterable[Path]) -> list[Seal]:
    """Read the seals of directories of runs. Raises UserError: a file there is no seal."""
    seals = []
    for path in sorted(
        path for place in set(directories) for path in (place / SEALS).glob("*.json")
    ):
        try:
            content = json.loads(path.read_bytes())
            sealed, digest = content["sealed"], content["sha256"]
            seals.append(
                Seal(path, sealed, _hash(sealed) == digest and digest.startswith(path.stem))
            )
            seals[-1].hypotheses, datetime.strptime(sealed["sealed"], STARTED)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} is no seal ({error!r}); restore it, or move it away") from None
    return seals


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
