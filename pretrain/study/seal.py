"""Sealed hypotheses: what is to be shown, by which measure and runs, hashed before the first run.

    DIRECTORY/seals/0123456789ab.json    {"sealed": {hypotheses, measure, seeds, settings, …},
                                          "sha256": of the canonical JSON of "sealed"}

`verdict` says what the runs beside a seal make of its hypotheses. A seal of `ladder` has
predictions in their place.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pretrain.config.keys import DEFAULTS, KEYS
from pretrain.config.types import SEED_MAX
from pretrain.errors import UserError
from pretrain.reporting.text import setting_text
from pretrain.runs.directory import strict_json, write_json
from pretrain.runs.environment import STARTED, git_commit
from pretrain.runs.finished import FinishedRun

SEALS = "seals"
QUESTIONS = ("better", "worse", "within")
_SENTENCE = re.compile(r"(\S+) (better|worse|within) (\d+(?:\.\d+)?) ?%? (?:than|of) (\S+)")
_SETTINGS = frozenset(
    name for name, key in KEYS.items() if key.method or name == "attention.adapters"
)
"""Settings that decide how a model is trained, but for the seeds."""
_SEEDS = ("attention.seed", "data.seed")
"""Seeds that a run has beside its own, which they are unless set."""
_NEWER = frozenset({"measure", "other_seeds"})
"""Keys of `Sealed` that older seals lack."""
_SHOWN_KEYS = 3
"""Changed settings of a run that are named."""
_LONGEST = 80
"""Characters of a setting that are shown."""
_LARGEST = 1 << 24
"""Bytes of a seal file that are read."""


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
        if self.question not in QUESTIONS:
            raise UserError(f"a question is one of {', '.join(QUESTIONS)}, not '{self.question}'")
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
            f"'{text}' is not a hypothesis; write 'VARIANT better|worse|within MARGIN% than|of "
            "BASELINE', such as 'orthogonal within 5% of vanilla' or 'orthogonal worse 1% than "
            "vanilla'"
        )

    def __str__(self) -> str:
        link = "of" if self.question == "within" else "than"
        return f"{self.design} {self.question} {self.margin:g} % {link} {self.baseline}"

    @property
    def edges(self) -> tuple[float, float]:
        """Return the margin's lower and upper edge, in nats per token."""
        return math.log(1 - self.margin / 100), math.log(1 + self.margin / 100)

    @property
    def claimed(self) -> tuple[float, float]:
        """Return the lower and upper end of the gaps that are claimed, in nats per token."""
        return {"better": (-math.inf, 0.0), "worse": (0.0, math.inf), "within": self.edges}[
            self.question
        ]

    def answer(self, yes: tuple[float, float], no: tuple[float, float]) -> str | None:
        """Return "yes", "no", or None for undecided.

        Args:
            yes: interval of the gap that a "yes" is read from, (low, high) in nats per token.
            no: interval of the gap that a "no" is read from.
        """
        lower, upper = self.edges
        low, high = self.claimed
        refuted = {
            "better": no[0] > lower,
            "worse": no[1] < upper,
            "within": no[0] > upper or no[1] < lower,
        }[self.question]
        return "yes" if low < yes[0] and yes[1] < high else "no" if refuted else None

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


def _is_time(text: str) -> str:
    datetime.strptime(text, STARTED)
    return text


def _once(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError("a seed stands there twice")
    return seeds


Text = Annotated[str, Field(max_length=4096)]
Seeds = Annotated[
    list[Annotated[int, Field(ge=0, le=SEED_MAX)]],
    Field(min_length=1, max_length=10_000),
    AfterValidator(_once),
]
Match = Literal["tokens", "flops", "seconds", "steps"]


class Measure(BaseModel):
    """What decides a sealed hypothesis, but for the runs.

    Attributes:
        match: what a design and its baseline have used the same of where their gap is; steps: each
            is taken at its end, whatever it has used.
        subjects: facts or settings in which the runs may differ, as `compare --subject` has them.
        rule: name and constants of the test, as in `verdict`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: Match
    subjects: list[Text]
    rule: dict[Text, Text | int | float]

    def __str__(self) -> str:
        end = "at the end of the runs" if self.match == "steps" else f"at equal {self.match}"
        subjects = f" with --subject {' and '.join(self.subjects)}" if self.subjects else ""
        return f"{end}{subjects}"


class SealedGrid(BaseModel):
    """Grid file of the sealed runs, its SHA-256, and what was given beside it."""

    file: Text
    sha256: Text
    base: Text | None = None


Finite = Annotated[float, Field(gt=-1e100, lt=1e100)]


class Prediction(BaseModel):
    """Loss of a cell of a ladder: predicted mean over `seeds`, and its 90 % interval."""

    design: Text
    parameters: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=0)]
    seeds: Seeds
    loss: Finite
    low: Finite
    high: Finite


def _with_newer_keys(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return settings of designs with the defaults of keys that an older version did not have."""
    defaults = design_settings({})
    return {design: defaults | own for design, own in settings.items()}


class Sealed(BaseModel):
    """Sealed content, as its file has it.

    Attributes:
        stopping_rule: as a clause.
        fixed_n: exactly the runs of `seeds` were to be made; otherwise `seeds` are the most.
        measure: None where nothing but predictions is sealed, and in a seal of an older version,
            which does not say by what its hypotheses are decided.
        seeds: of the runs, in the order in which pairs count.
        settings: {design: {section.key: value}}, of `design_settings`.
        other_seeds: {design: {section.key: value}}, of `seed_settings`; {} in an older seal.
        data: fingerprints of the data.
        commit: of the program; a + at its end stands for uncommitted changes.
        sealed: time of the seal.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    hypotheses: list[Hypothesis]
    stopping_rule: Text
    fixed_n: bool
    measure: Measure | None = None
    grid: SealedGrid
    seeds: Seeds
    settings: Annotated[dict[Text, dict[Text, Any]], AfterValidator(_with_newer_keys)]
    other_seeds: dict[Text, dict[Text, int | None]] = {}
    data: list[Text]
    commit: Text | None
    sealed: Annotated[str, AfterValidator(_is_time)]
    predictions: list[Prediction] = []

    @model_validator(mode="after")
    def _is_of_its_own_runs(self) -> Sealed:
        claimed = {name for claim in self.hypotheses for name in (claim.design, claim.baseline)}
        named = claimed | {prediction.design for prediction in self.predictions}
        if unknown := sorted(named - self.settings.keys()):
            raise ValueError(f"there are no settings of {unknown[0]}")
        if not {seed for own in self.predictions for seed in own.seeds} <= {*self.seeds}:
            raise ValueError("a prediction is of seeds that are not sealed")
        return self

    @property
    def runs(self) -> set[tuple[str, int]]:
        """Return design and seed of every sealed run."""
        if self.predictions:
            return {(own.design, seed) for own in self.predictions for seed in own.seeds}
        return {*product(self.settings, self.seeds)}


class _SealFile(BaseModel):
    sealed: Sealed
    sha256: Text


@dataclass(frozen=True)
class Seal:
    """A seal as its file has it.

    Attributes:
        path: the file.
        place: directory of the runs, without links.
        sealed: what is sealed.
        raw: the same as plain JSON, which the hash is of.
        intact: whether the content still has the hash.
    """

    path: Path
    place: Path
    sealed: Sealed
    raw: Mapping[str, Any]
    intact: bool

    def beside(self, runs: Iterable[FinishedRun]) -> list[FinishedRun]:
        """Return those of the runs that lie beside the seal."""
        return [run for run in runs if run.path.resolve().parent == self.place]

    def own_runs(self, runs: Iterable[FinishedRun]) -> dict[str, dict[int, FinishedRun]]:
        """Return {design: {seed: run}} of those of the runs that are sealed and lie beside it."""
        sealed = self.sealed.runs
        own: dict[str, dict[int, FinishedRun]] = {design: {} for design in self.sealed.settings}
        for run in self.beside(runs):
            design = design_of(run.config["run"]["name"], run.seed)
            if (design, run.seed) in sealed:
                own[design][run.seed] = run
        return own

    def strangers(self, runs: Sequence[FinishedRun], designs: Iterable[str]) -> list[FinishedRun]:
        """Return those of the runs that are of sealed designs, by name or settings, but not sealed.

        Args:
            runs: any finished runs.
            designs: of the seal.
        """
        settings = {design: self.sealed.settings[design] for design in designs}
        own = {run.path for of in self.own_runs(runs).values() for run in of.values()}
        return [
            run
            for run in runs
            if run.path not in own
            and (
                design_of(run.config["run"]["name"], run.seed) in settings
                or design_settings(run.config) in settings.values()
            )
        ]

    def changes_of(self, run: FinishedRun, design: str) -> list[str]:
        """Return clauses on what makes a run another than the sealed one: settings, data, time.

        Args:
            run: a run of `own_runs`.
            design: of the run.
        """
        was = dict(self.sealed.settings[design])
        now = design_settings(run.config)
        for key, value in self.sealed.other_seeds.get(design, {}).items():
            section, _, name = key.partition(".")
            was[key] = run.seed if value is None else value
            now[key] = run.config.get(section, {}).get(name)
        keys = sorted(key for key in now.keys() | was.keys() if now.get(key) != was.get(key))
        found = [
            f"{key} is {_short(now.get(key))} in {run.name}, sealed {_short(was.get(key))}"
            for key in keys[:_SHOWN_KEYS]
        ]
        first = (run.environment.get("segments") or [run.environment])[0]
        began = datetime.strptime(self.sealed.sealed, STARTED)
        if "started" not in first or datetime.strptime(first["started"], STARTED) < began:
            found.append(f"{run.name} began before, or does not say when")
        if run.data_fingerprint not in self.sealed.data:
            found.append(f"{run.name} has other data")
        return found

    def notes(self, own: Mapping[str, Mapping[int, FinishedRun]]) -> list[str]:
        """Return clauses on what has changed around the runs: grid file, number, commit.

        Args:
            own: the sealed runs, of `own_runs`.
        """
        sealed = self.sealed
        found = []
        if not _is_still(Path(sealed.grid.file), sealed.grid.sha256):
            found.append(f"the grid file {sealed.grid.file:.{_LONGEST}} has changed or is gone")
        runs = [run for of_design in own.values() for run in of_design.values()]
        lacking = len(sealed.runs) - len(runs)
        if lacking and sealed.fixed_n:
            found.append(f"{lacking} of the sealed runs are not among these")
        sealed_commit = str(sealed.commit)
        commits = sorted({str(run.environment.get("git_commit")) for run in runs})
        found += [
            f"runs are of commit {commit[:12]}, sealed at {sealed_commit[:12]}"
            for commit in commits
            if commit != sealed_commit
        ]
        if any(commit.endswith("+") for commit in (*commits, sealed_commit)):
            found.append("a checkout had uncommitted changes")
        return found


def _short(value: Any) -> str:
    return f"{setting_text(value):.{_LONGEST}}"


def _is_still(path: Path, sha256: str) -> bool:
    try:
        return path.is_file() and file_hash(path) == sha256
    except OSError:  # a name that no file can have, or a file that may not be read
        return False


def design_of(name: str, seed: int) -> str:
    """Return the name of a sweep's run without its seed.

    Args:
        name: of the run.
        seed: of the run.
    """
    return name.removesuffix(f"-seed_{seed}")


def design_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {section.key: value} of what decides how a model is trained, but for the seeds.

    A key that an older version did not have gets its default.
    """
    pairs = DEFAULTS | {
        f"{section}.{key}": value
        for section, own in config.items()
        for key, value in dict(own).items()
    }
    # Through JSON, so that settings of a config compare equal to those of a seal.
    return json.loads(
        json.dumps({key: pairs[key] for key in sorted(_SETTINGS & pairs.keys())}, default=str)
    )


def seed_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Return {section.key: value} of the seeds beside a run's own; None: they are the run's own.

    Args:
        configs: of the runs of a design.

    Raises:
        UserError: such a seed changes from run to run otherwise than the run's own.
    """
    found: dict[str, int | None] = {}
    for key in _SEEDS:
        values = [config[key[:-5]]["seed"] for config in configs]
        found[key] = None
        if values != [config["run"]["seed"] for config in configs]:
            found[key] = values[0]
            if len(set(values)) > 1:
                raise UserError(f"runs of one variant have several {key}; nothing can be sealed")
    return found


def write_seal(directory: Path, content: Mapping[str, Any], begun: Sequence[str]) -> Seal | None:
    """Write a seal beside the runs, or return the one of the same content that is there already.

    Args:
        directory: directory of the runs.
        content: fields of `Sealed`, and any others, but for `commit` and `sealed`.
        begun: names of those of the runs that are there.

    Returns:
        The seal; None where a run has begun, because nothing can be sealed then.

    Raises:
        UserError: the seal cannot be written.
    """
    content = json.loads(json.dumps(strict_json(content)))
    for seal in read_seals([directory]).seals:
        if not (seal.intact or begun):
            continue
        lacking = content.keys() - seal.raw.keys()
        was = {**seal.raw, "settings": seal.sealed.settings}
        same = {key: was[key] for key in content.keys() - lacking}
        # An older version could not write all of it: nothing is sealed anew once a run is there.
        if same == {key: content[key] for key in same} and lacking <= (
            _NEWER if begun else frozenset()
        ):
            return seal
    if begun:
        return None
    now = datetime.now().astimezone().strftime(STARTED)
    raw = {**content, "commit": git_commit(), "sealed": now}
    digest = _hash(raw)
    path = directory / SEALS / f"{digest[:12]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"sealed": raw, "sha256": digest})
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"the seal {path} cannot be written ({reason}); fix {path.parent}"
        ) from None
    return Seal(path, directory.resolve(), Sealed.model_validate(raw), raw=raw, intact=True)


@dataclass(frozen=True)
class SealsRead:
    """Seals of directories of runs.

    Attributes:
        seals: those that could be read.
        problems: a sentence on each file that could not.
    """

    seals: tuple[Seal, ...]
    problems: tuple[str, ...]


def read_seals(directories: Iterable[Path]) -> SealsRead:
    """Read the seals of directories of runs; a file that cannot be read leaves the others be."""
    seals = []
    problems = []
    places = {directory.resolve(): directory for directory in directories}
    for place, directory in sorted(places.items()):
        folder = directory / SEALS
        try:
            paths = [folder / name for name in sorted(os.listdir(folder)) if name.endswith(".json")]
        except OSError as error:
            if folder.is_symlink() or not isinstance(error, FileNotFoundError):
                problems.append(_problem(folder, error))
            continue
        for path in paths:
            try:
                seals.append(_read_seal(path, place))
            except (OSError, ValueError, RecursionError) as error:
                problems.append(_problem(path, error))
    return SealsRead(tuple(seals), tuple(problems))


def _read_seal(path: Path, place: Path) -> Seal:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a FIFO would block
        raise ValueError("not a regular file")
    if status.st_size > _LARGEST:
        raise ValueError(f"{status.st_size:,} bytes")
    text = path.read_bytes()
    file = _SealFile.model_validate_json(text, strict=True)
    raw = json.loads(text, object_pairs_hook=_no_key_twice)["sealed"]
    intact = _hash(raw) == file.sha256 and file.sha256.startswith(path.stem)
    return Seal(path, place, file.sealed, raw=raw, intact=intact)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key stands there twice")
    return content


def _problem(path: Path, error: Exception) -> str:
    """Return the sentence on a seal file that cannot be read."""
    reason = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = ": ".join(
            part for part in (".".join(map(str, first["loc"])), first["msg"]) if part
        )
    if isinstance(error, OSError):
        reason = error.strerror or reason
    said = f"{path} is not a valid seal file ({reason:.200}); restore it, or move it away"
    return str(UserError(said))  # which escapes what does not print


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
