"""Content of a seal: hypotheses, measure, settings, seeds and data of the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from laboratory.study.hypothesis import Hypothesis
from pretrain.config.deepspeed import without_side_effects
from pretrain.config.keys import DEFAULTS, KEYS, by_section
from pretrain.config.removed import REMOVED_KEYS, present_key
from pretrain.config.types import SEED_MAX
from pretrain.errors import UserError
from pretrain.runs.environment import STARTED

_SEEDS = ("attention.seed", "data.seed")
"""Seeds that a run has beside its own, which they are unless set."""
_SETTINGS = {name for name, key in KEYS.items() if key.sealed} - {"run.seed", *_SEEDS}
"""Settings that decide how a model is trained and judged, but for the seeds."""


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
    """Measure that decides a sealed hypothesis, given the runs.

    Attributes:
        match: Quantity that a design and its baseline have used equally where their gap is; with
            steps, each is taken at its end, whatever it has used.
        subjects: facts or settings in which the runs may differ, as `compare --subject` has them.
        rule: Name and constants of the test, as in `verdict`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: Match
    subjects: list[Text]
    rule: dict[Text, Text | int | float]

    @property
    def reads_curves(self) -> bool:
        """Return whether a gap is read off curves through the runs of several lengths."""
        return self.match in ("flops", "seconds") and "tokens" in self.subjects

    def __str__(self) -> str:
        end = "at the end of the runs" if self.match == "steps" else f"at equal {self.match}"
        subjects = f" with --subject {' and '.join(self.subjects)}" if self.subjects else ""
        return f"{end}{subjects}"


class SealedGrid(BaseModel):
    """Grid file of the sealed runs, its SHA-256, and what was given beside it."""

    file: Text
    sha256: Text
    base: Text | None = None


def _of_this_version(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return settings of designs with the keys of this version, new keys at their defaults."""
    defaults = design_settings({})
    return {
        design: defaults
        | {present_key(key): value for key, value in sealed.items() if key not in REMOVED_KEYS}
        for design, sealed in settings.items()
    }


class Sealed(BaseModel):
    """Sealed content, as its file has it.

    Attributes:
        stopping_rule: Stopping rule as a clause.
        fixed_n: Exactly the runs of `seeds` were to be made; otherwise `seeds` are the most.
        measure: Measure that decides the hypotheses.
        seeds: Seeds of the runs, in the order in which pairs count.
        settings: {design: {section.key: value}}, of `design_settings`.
        other_seeds: {design: {section.key: value}}, of `seed_settings`.
        contents: {design: {section.key: SHA-256 of the file that it names}}, of `file_digests`.
        data: Fingerprints of the data.
        earlier_seals: SHA-256 of the seals beside the runs at that time; None: an older version
            did not record them.
        commit: Commit of the program; a + at its end stands for uncommitted changes.
        sealed: Time of the seal.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    hypotheses: list[Hypothesis]
    stopping_rule: Text
    fixed_n: bool
    measure: Measure
    grid: SealedGrid
    seeds: Seeds
    settings: Annotated[dict[Text, dict[Text, Any]], AfterValidator(_of_this_version)]
    other_seeds: dict[Text, dict[Text, int | None]]
    contents: dict[Text, dict[Text, Text | None]] = {}
    data: list[Text]
    earlier_seals: list[Text] | None = None
    commit: Text | None
    sealed: Annotated[str, AfterValidator(_is_time)]

    @model_validator(mode="after")
    def _is_of_its_own_runs(self) -> Sealed:
        claimed = {name for claim in self.hypotheses for name in (claim.design, claim.baseline)}
        if unknown := sorted(claimed - self.settings.keys()):
            raise ValueError(f"there are no settings of {unknown[0]}")
        return self

    @property
    def runs(self) -> set[tuple[str, int]]:
        """Return design and seed of every sealed run."""
        return {*product(self.settings, self.seeds)}


def design_of(name: str, seed: int) -> str:
    """Return the name of a sweep's run without its seed."""
    return name.removesuffix(f"-seed_{seed}")


def arm_of(name: str) -> str:
    """Return the first part of a run's or design's name, up to a dash.

    Args:
        name: Name such as vanilla-t500-seed_1, of which the part is vanilla.
    """
    return name.partition("-")[0]


def design_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {section.key: value} of the settings that decide training, without seeds.

    A key that an older version did not have gets its default.
    """
    pairs = DEFAULTS | {
        f"{section}.{key}": value
        for section, content in by_section(config).items()
        for key, value in dict(content).items()
    }
    # What only logs or stores is not sealed in DeepSpeed's settings either.
    pairs["deepspeed.overrides"] = without_side_effects(pairs["deepspeed.overrides"])
    # Through JSON, so that settings of a config compare equal to those of a seal.
    return json.loads(
        json.dumps({key: pairs[key] for key in sorted(_SETTINGS & pairs.keys())}, default=str)
    )


def seed_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Return {section.key: value} of the seeds beside a run's own; None: they are the run's own.

    Args:
        configs: Configurations of a design's runs.

    Raises:
        UserError: such a seed varies between runs, but not with the run's own.
    """
    settings: dict[str, int | None] = {}
    for key in _SEEDS:
        values = [config[key[:-5]]["seed"] for config in configs]
        settings[key] = None
        # Equal to the run's own everywhere: it follows that one, whatever seeds are added.
        if values != [config["run"]["seed"] for config in configs]:
            settings[key] = values[0]
            if len(set(values)) > 1:
                raise UserError(f"runs of one variant have several {key}; nothing can be sealed")
    return settings
