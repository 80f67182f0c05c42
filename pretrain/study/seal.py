"""Sealed hypotheses: what is to be shown, how and with which runs, hashed before the first run.

    DIRECTORY/seals/0123456789ab.json    {"sealed": {hypotheses, stopping rule, seeds, settings, …},
                                          "sha256": of the canonical JSON of "sealed"}

`compare` and `trial` read the seals beside the runs, judge their hypotheses, and say what has
changed since. A seal of `ladder` has predictions in place of hypotheses.
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
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

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
_SHOWN_KEYS = 3
"""Changed settings of a run that are named."""


@dataclass(frozen=True)
class Hypothesis:
    """Claim about the perplexity of a design against a baseline's.

    `better` and `worse` claim a lower or higher perplexity, and are refuted where a difference of
    the margin or more is excluded. `within` claims a ratio between 1 - margin and 1 + margin.

    Attributes:
        design: name of a sweep's runs, without the seed.
        question: better, worse or within.
        margin: percent of perplexity.
        baseline: what the design is compared with, named like it.
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
        """Read `DESIGN better|worse|within 2% than|of BASELINE`.

        Raises:
            UserError: the text is not of this form.
        """
        if match := _SENTENCE.fullmatch(" ".join(text.split())):
            return cls(match[1], match[2], float(match[3]), match[4])
        raise UserError(
            f"'{text}' is no hypothesis; write it as 'DESIGN better|worse|within 2% than|of "
            "BASELINE', as 'orthogonal within 5% of vanilla'"
        )

    def __str__(self) -> str:
        link = "of" if self.question == "within" else "than"
        return f"{self.design} {self.question} {self.margin:g} % {link} {self.baseline}"

    @property
    def edges(self) -> tuple[float, float]:
        """Return the margin's lower and upper edge, in nats per token."""
        return math.log(1 - self.margin / 100), math.log(1 + self.margin / 100)

    def answer(self, yes: tuple[float, float], no: tuple[float, float]) -> str | None:
        """Return "yes", "no", or None for undecided.

        Args:
            yes: interval of the gap that a "yes" is read from, (low, high) in nats per token.
            no: interval of the gap that a "no" is read from.
        """
        lower, upper = self.edges
        shown, refuted = {
            "better": (yes[1] < 0, no[0] > lower),
            "worse": (yes[0] > 0, no[1] < upper),
            "within": (lower < yes[0] and yes[1] < upper, no[0] > upper or no[1] < lower),
        }[self.question]
        return "yes" if shown else "no" if refuted else None

    def answered(self, answer: str | None, undecided: str) -> str:
        """Return question and answer, without a full stop.

        Args:
            answer: "yes", "no" or None.
            undecided: what is said for None.
        """
        within = self.question == "within"
        asked = f"within ± {self.margin:g} % of" if within else f"{self.question} than"
        no = "No" if within else f"No, not by {self.margin:g} %"
        said = {"yes": "Yes", "no": no, None: undecided}[answer]
        return f"Is {self.design} {asked} {self.baseline}? {said}"

    def outcome(self, answer: str | None, undecided: str) -> str:
        """Return as a sentence whether the hypothesis held.

        Args:
            answer: "yes", "no" or None.
            undecided: what is said for None.
        """
        word = {"yes": "HIT", "no": "MISS", None: undecided}[answer]
        return f"Hypothesis '{self}': {word}."


def _is_time(text: str) -> str:
    datetime.strptime(text, STARTED)
    return text


class SealedGrid(BaseModel):
    """Grid file of the sealed runs, its SHA-256, and what was given beside it."""

    file: str
    sha256: str
    base: str | None = None


class Prediction(BaseModel):
    """Loss of a cell of a ladder: predicted mean over `seeds`, and its 90 % interval."""

    design: str
    parameters: int
    tokens: int
    seeds: list[int]
    loss: float
    low: float
    high: float


class Sealed(BaseModel):
    """Sealed content, as its file has it.

    Attributes:
        fixed_n: exactly the runs of `seeds` were to be made; otherwise `seeds` are the most.
        settings: {design: {section.key: value}}, of `design_settings`.
        data: fingerprints of the data.
        commit: of the program; a + at its end stands for uncommitted changes.
        sealed: time of the seal.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    hypotheses: list[Hypothesis]
    stopping_rule: str
    fixed_n: bool
    grid: SealedGrid
    seeds: list[int]
    settings: dict[str, dict[str, Any]]
    data: list[str]
    commit: str | None
    sealed: Annotated[str, AfterValidator(_is_time)]
    predictions: list[Prediction] = []


class _SealFile(BaseModel):
    sealed: Sealed
    sha256: str


@dataclass(frozen=True)
class Seal:
    """A seal as its file has it.

    Attributes:
        path: the file.
        sealed: what is sealed.
        raw: the same as plain JSON, which the hash is of.
        intact: whether the content still has the hash.
    """

    path: Path
    sealed: Sealed
    raw: Mapping[str, Any]
    intact: bool

    def runs_of(self, design: str, runs: Iterable[FinishedRun]) -> list[FinishedRun]:
        """Return the runs beside the seal that are of a design and of a sealed seed.

        Args:
            design: name of the runs without the seed.
            runs: any finished runs.
        """
        place = self.path.resolve().parent.parent
        return [
            run
            for run in runs
            if run.path.resolve().parent == place
            and run.seed in self.sealed.seeds
            and design_of(run.config["run"]["name"], run.seed) == design
        ]

    def changes(self, runs: Sequence[FinishedRun]) -> list[str]:
        """Return clauses on what is not as sealed: file, grid, settings, code, data, time."""
        sealed = self.sealed
        found = [] if self.intact else [f"{self.path} no longer has its own hash"]
        grid = Path(sealed.grid.file)
        if not grid.is_file() or file_hash(grid) != sealed.grid.sha256:
            found.append(f"the grid file {grid} has changed or is gone")
        own = [(name, run) for name in sealed.settings for run in self.runs_of(name, runs)]
        lacking = len(sealed.settings) * len(sealed.seeds) - len(own)
        if lacking and sealed.fixed_n:
            found.append(f"{lacking} of the sealed runs are not among these")
        for name, run in own:
            found += self._changes_of(run, sealed.settings[name])
        sealed_commit = str(sealed.commit)
        commits = sorted({str(run.environment.get("git_commit")) for _, run in own})
        found += [
            f"runs are of commit {commit[:12]}, sealed at {sealed_commit[:12]}"
            for commit in commits
            if commit != sealed_commit
        ]
        if any(commit.endswith("+") for commit in (*commits, sealed_commit)):
            found.append("a checkout had uncommitted changes")
        return found

    def _changes_of(self, run: FinishedRun, was: Mapping[str, Any]) -> list[str]:
        now = design_settings(run.config)
        keys = sorted(key for key in now.keys() | was.keys() if now.get(key) != was.get(key))
        found = [
            f"{key} is {now.get(key)} in {run.name}, sealed {was.get(key)}"
            for key in keys[:_SHOWN_KEYS]
        ]
        first = (run.environment.get("segments") or [run.environment])[0]
        began = datetime.strptime(self.sealed.sealed, STARTED)
        if "started" not in first or datetime.strptime(first["started"], STARTED) < began:
            found.append(f"{run.name} began before, or does not say when")
        if run.data_fingerprint not in self.sealed.data:
            found.append(f"{run.name} has other data")
        return found

    def statement(self, runs: Sequence[FinishedRun]) -> str:
        """Return the seal's time, hash and changes as one sentence."""
        changes = "; ".join(self.changes(runs))
        since = f"changed since: {changes}" if changes else "nothing has changed since"
        when = f"Sealed {self.sealed.sealed} as {self.path.stem}"
        return f"{when}, {self.sealed.stopping_rule}; {since}."


def design_of(name: str, seed: int) -> str:
    """Return the name of a sweep's run without its seed.

    Args:
        name: of the run.
        seed: of the run.
    """
    return name.removesuffix(f"-seed_{seed}")


def design_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {section.key: value} of what decides how a model is trained, but for the seeds."""
    pairs = {
        f"{section}.{key}": value
        for section, own in config.items()
        for key, value in dict(own).items()
    }
    # Through JSON, so that settings of a config compare equal to those of a seal.
    return json.loads(
        json.dumps({key: pairs[key] for key in sorted(_SETTINGS & pairs.keys())}, default=str)
    )


def write_seal(directory: Path, content: Mapping[str, Any], begun: Sequence[str]) -> Seal | None:
    """Write a seal beside the runs, or return the one of the same content that is there already.

    Args:
        directory: directory of the runs.
        content: fields of `Sealed`, and any others, but for `commit` and `sealed`.
        begun: names of those of the runs that are there.

    Returns:
        The seal; None where a run has begun, because nothing can be sealed then.
    """
    content = json.loads(json.dumps(content))
    for seal in read_seals([directory]):
        if {key: seal.raw.get(key) for key in content} == content:
            return seal
    if begun:
        return None
    now = datetime.now().astimezone().strftime(STARTED)
    raw = {**content, "commit": git_commit(), "sealed": now}
    digest = _hash(raw)
    path = directory / SEALS / f"{digest[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"sealed": raw, "sha256": digest})
    return Seal(path, Sealed.model_validate(raw), raw, intact=True)


def read_seals(directories: Iterable[Path]) -> list[Seal]:
    """Read the seals of directories of runs.

    Raises:
        UserError: a file there is not a seal.
    """
    places = {place / SEALS for place in directories}
    seals = []
    for path in sorted(path for place in places for path in place.glob("*.json")):
        try:
            text = path.read_bytes()
            file = _SealFile.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UserError(
                f"{path} is not a valid seal file ({reason}); restore it, or move it away"
            ) from None
        raw = json.loads(text)["sealed"]
        intact = _hash(raw) == file.sha256 and file.sha256.startswith(path.stem)
        seals.append(Seal(path, file.sealed, raw, intact))
    return seals


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
