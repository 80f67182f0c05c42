"""What every key does when it is given anew to a run that goes on from a checkpoint.

Every key of the configuration stands in one of four classes; sections that are wholly in one are written
`section.*`. `tests/pretrain/config/test_resume_keys.py` fails for a key that nobody has classified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pretrain.config.tree import Config


class OnResume(Enum):
    """What another value of a key does on resume."""

    LAYOUT = "effective from the next step on, announced and recorded: the same training up to rounding"
    REFUSED = "refused: another model, bank, data order or precision is another run"
    EFFECTIVE = "effective from the next step on, announced and recorded"
    NO_EFFECT = "without effect on what the run computes or records"


REFUSED = (
    "run.seed",
    "model.*",
    "attention.*",
    "data.directory",  # by what the shards hold, wherever they lie; unless data.allow_change
    "data.blend",  # the same
    "data.sequence_length",  # unless data.allow_change
    "data.seed",  # unless data.allow_change
    "data.reset_at_document_end",  # unless data.allow_change
    "data.global_batch_size",
    "precision.*",
)
LAYOUT = (  # with the number of ranks and the ZeRO stage: see `checkpoint.layout`
    "data.micro_batch_size",
    "parallel.tensor_model_parallel_size",
    "parallel.sequence_parallel",
)
EFFECTIVE = (
    "run.device",
    "run.deterministic",
    "optimizer.learning_rate",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.gradient_clip",
    "schedule.steps",
    "schedule.tokens",
    "schedule.kind",
    "schedule.warmup_steps",
    "schedule.min_ratio",
    "schedule.cycles",
    "schedule.power",
    "data.validate_every",
    "data.validation_samples",
    "performance.overlap_reduction",  # the same sums; over three ranks and more in another order
    "performance.reduced_precision_reduction",
    "checkpoint.every",
    "checkpoint.keep_last",
    "performance.cross_entropy",  # the same numbers up to rounding
    "performance.compile",  # the same but for the masks of dropout
    "performance.document_attention",  # the same numbers up to rounding
    "performance.structured_products",  # the same numbers up to rounding
    "stability.max_skipped",
    "stability.spike_factor",
    "telemetry.every",
    "telemetry.tensorboard",
    "telemetry.wandb",
    "telemetry.variance_window",
    "telemetry.sample_prompts",
    "telemetry.sample_tokens",
    "deepspeed.config",  # another ZeRO stage is another layout too
    "deepspeed.overrides",  # the same
)
NO_EFFECT = (
    "run.name",
    "run.directory",
    "telemetry.profile",
    "data.loader_workers",
    "data.cache_directory",
    "data.allow_change",
    "performance.recompute",
    "parallel.timeout_seconds",
    "checkpoint.asynchronous",
    "checkpoint.verify",
    "checkpoint.fall_back",
    "checkpoint.export_at_end",
)
CLASSES = {
    **dict.fromkeys(REFUSED, OnResume.REFUSED),
    **dict.fromkeys(LAYOUT, OnResume.LAYOUT),
    **dict.fromkeys(EFFECTIVE, OnResume.EFFECTIVE),
    **dict.fromkeys(NO_EFFECT, OnResume.NO_EFFECT),
}


@dataclass(frozen=True)
class Change:
    """A key that is given anew, and takes effect."""

    key: str
    was: Any
    value: Any

    def __str__(self) -> str:
        return f"{self.key} is {_text(self.value)}, was {_text(self.was)}"


def class_of(section: str, key: str) -> OnResume:
    """The class of a key. Raises KeyError: nobody has classified it."""
    return CLASSES[f"{section}.*" if f"{section}.*" in CLASSES else f"{section}.{key}"]


def effective_changes(before: Mapping[str, Any], config: Config) -> Iterator[Change]:
    """What takes effect from now on.

    Args:
        before: the resolved configuration that the run had, as config.yaml holds it. What it lacks, because
            an older version wrote it, counts as unchanged.
    """
    for section, values in config.resolved().items():
        had = before.get(section, {})
        for key, value in values.items():
            was = had.get(key, value) if isinstance(had, Mapping) else value
            if was != value and class_of(section, key) is OnResume.EFFECTIVE:
                yield Change(f"{section}.{key}", was, value)


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
