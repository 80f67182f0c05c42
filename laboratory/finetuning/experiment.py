"""Fine-tunings with several seeds, each of which is kept on disk, and the arms of `reservoir`.

| arm | query and key rows, with their biases |
| --- | --- |
| trained | as pretrained, and they train |
| frozen | as pretrained, frozen |
| per head | of our bank, orthonormal within each head, frozen; biases 0 |
| one matrix | of our bank, orthonormal over all heads of a layer, frozen; biases 0 |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import pretrain
from laboratory.finetuning.glue_data import Task
from laboratory.finetuning.models import Pretrained, load_tokenizer
from laboratory.finetuning.report import Result, Trial
from laboratory.finetuning.training import Arm, Settings, encode, fine_tune
from laboratory.reporting.progress import WorkDisplay
from laboratory.study.cache import ResultCache, content_digest
from pretrain.ranks.devices import use_cuda

TRAINED = "trained"
"""Name of the arm that the others of `reservoir` are compared with."""
RESULT = TypeAdapter(Result)


def reservoir_arms(model: Pretrained) -> list[Arm]:
    """Return the four arms of the reservoir test."""
    return [
        Arm(TRAINED, model, rows={}),
        Arm("frozen", model),
        Arm("per head", model, replaced="head"),
        Arm("one matrix", model, replaced="layer"),
    ]


def run_trials(
    arms: Sequence[Arm],
    data: Mapping[Task, Mapping[str, Any]],
    settings: Settings,
    seeds: int,
    out: Path,
) -> list[Trial]:
    """Fine-tune every arm on every task with the seeds 1 … `seeds`; what is on disk is reused.

    Args:
        data: {task: {split: `datasets.Dataset`}}.
        out: Directory, whose `trials` has the results.

    Raises:
        UserError: a result cannot be written, or as `load_tokenizer` and `fine_tune`.
    """
    cache = ResultCache(out / "trials", RESULT)
    environment = {
        "program": pretrain.__version__,
        "packages": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "device": "cuda" if use_cuda() else "cpu",
        "settings": asdict(settings),
    }
    trials = []
    with WorkDisplay(len(arms) * len(data) * seeds) as work:
        for arm, (task, rows) in product(arms, data.items()):
            tokenizer = load_tokenizer(arm.model)
            splits = {
                split: encode(task, split_rows, tokenizer, settings.max_length)
                for split, split_rows in rows.items()
            }
            examples = content_digest([split.to_dict() for split in splits.values()])
            for seed in range(1, seeds + 1):
                work.begin(f"{arm.model.name}, {arm.group}, {task.name}, seed {seed}")
                identity = {
                    **environment,
                    "model": arm.model.digest,
                    "frozen_rows": arm.rows,
                    "replaced": arm.replaced,
                    "task": task.name,
                    "examples": examples,
                    "seed": seed,
                }
                name = f"{task.name}-{seed}-{content_digest(identity)[:16]}"
                train = partial(
                    fine_tune, arm, task, splits, tokenizer=tokenizer, settings=settings, seed=seed
                )
                content, kept = cache.read_or_make(name, identity, train)
                trial = Trial(
                    task=task.name,
                    group=arm.group,
                    model=arm.model.name,
                    pretraining_seed=arm.model.seed,
                    seed=seed,
                    kept=kept,
                    result=RESULT.validate_python(content),
                )
                trials.append(trial)
    return trials
