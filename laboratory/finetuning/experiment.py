"""Fine-tunings with several seeds, each of which is kept on disk, and the arms of `reservoir`.

| arm | query and key rows, with their biases |
| --- | --- |
| trained | as pretrained, and they train |
| frozen | as pretrained, frozen |
| per head | of our bank, orthonormal within each head, frozen; biases 0 |
| one matrix | of our bank, orthonormal over all heads of a layer, frozen; biases 0 |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter
from typing_extensions import TypedDict

import pretrain
from data_pipeline.io.forms import Count
from laboratory.finetuning.glue_data import Task
from laboratory.finetuning.models import Pretrained, load_tokenizer
from laboratory.finetuning.query_key import Rows, all_rows, query_key, replace_rows
from laboratory.finetuning.report import Trial
from laboratory.finetuning.training import FineTuning, Prepare, Settings, device_name, encode
from laboratory.study.cache import ResultCache, content_digest

TRAINED = "trained"
"""Name of the arm that the others of `reservoir` are compared with."""


class _Result(TypedDict):
    metrics: dict[str, FiniteFloat]
    items: Count
    best_epoch: Count
    frozen_share: FiniteFloat


class _Kept(TypedDict):
    result: _Result


_KEPT = TypeAdapter(_Kept)


@dataclass(frozen=True)
class Arm:
    """Variant of a fine-tuning.

    Attributes:
        group: Name in the report.
        what: Everything that decides `prepare`, for the identity of a result.
        prepare: Function that chooses the rows to freeze.
    """

    group: str
    model: Pretrained
    what: str
    prepare: Prepare


def exported_arm(group: str, model: Pretrained, train_query_key: bool) -> Arm:
    """Return the arm of an export, whose frozen rows stay so unless told to train."""
    rows = {} if train_query_key else model.frozen_rows
    return Arm(group, model, content_digest(rows), lambda classifier, seed: rows)


def reservoir_arms(model: Pretrained) -> list[Arm]:
    """Return the four arms of the reservoir test."""
    functions: Mapping[str, Prepare] = {
        TRAINED: lambda classifier, seed: {},
        "frozen": lambda classifier, seed: all_rows(query_key(classifier)),
        "per head": partial(_replaced, "head"),
        "one matrix": partial(_replaced, "layer"),
    }
    return [Arm(name, model, name, prepare) for name, prepare in functions.items()]


def _replaced(scope: Any, classifier: Any, seed: int) -> Rows:
    projections = query_key(classifier)
    replace_rows(projections, seed, scope)
    return all_rows(projections)


def run_trials(
    arms: Sequence[Arm],
    data: Mapping[Task, Mapping[str, Any]],
    settings: Settings,
    seeds: int,
    metrics: tuple[str, ...],
    out: Path,
    begin: Callable[[str], None],
) -> tuple[list[Trial], list[dict[str, Any]]]:
    """Fine-tune every arm on every task with the seeds 1 … `seeds`; what is on disk is reused.

    Args:
        data: {task: {split: `datasets.Dataset`}}.
        metrics: Metrics that are reported beside those of each task.
        out: Directory, whose `trials` has the results.
        begin: Called with the title of each fine-tuning before it begins.

    Returns:
        The scores, and what report.json has of each; `kept`: the result was on disk already.

    Raises:
        UserError: a result cannot be written, or as `load_tokenizer` and `FineTuning.run`.
    """
    cache = ResultCache(out / "trials", _KEPT)
    packages = ("torch", "transformers", "accelerate")
    trials, details = [], []
    for arm in arms:
        model = arm.model
        tokenizer = load_tokenizer(model)
        for task, rows in data.items():
            splits = {
                split: encode(task, split_rows, tokenizer, settings.max_length)
                for split, split_rows in rows.items()
            }
            tuning = FineTuning(
                pretrained=model,
                tokenizer=tokenizer,
                task=task,
                metrics=metrics,
                splits=splits,
                prepare=arm.prepare,
                settings=settings,
            )
            identity = {
                "program": pretrain.__version__,
                "packages": {name: version(name) for name in packages},
                "device": device_name(),
                "model": model.digest,
                "arm": arm.what,
                "settings": asdict(settings),
                "task": task.name,
                "metrics": list(metrics),
                "examples": content_digest([split.to_dict() for split in splits.values()]),
            }
            path = str(model.directory.resolve()).encode()
            directory_digest = hashlib.sha256(path).hexdigest()[:8]
            for seed in range(1, seeds + 1):
                begin(title := f"{model.name}, {arm.group}, {task.name}, seed {seed}")
                name = f"{model.name}-{arm.group}-{task.name}-{seed}-{directory_digest}"

                def train(tuning: FineTuning = tuning, seed: int = seed) -> dict[str, Any]:
                    return {"result": tuning.run(seed)}

                content, kept = cache.read_or_make(
                    name.replace("/", "_").replace(" ", "_"),
                    {**identity, "seed": seed},
                    train,
                )
                result = content["result"]
                trials.append(
                    Trial(
                        task=task.name,
                        group=arm.group,
                        model=model.name,
                        pretraining_seed=model.seed,
                        seed=seed,
                        **{key: result[key] for key in Trial.MEASURED},
                    )
                )
                details.append({"name": title, "kept": kept, **result})
    return trials, details
