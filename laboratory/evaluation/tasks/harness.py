"""Interface to lm-evaluation-harness: tasks with their data, and a model that is evaluated on them.

The harness scores, aggregates and estimates errors. This file adds a digest of a task's requests,
and turns every failure into one sentence.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import json
import logging
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import how_to_install
from laboratory.evaluation.tasks.scores import TaskScores, task_scores
from pretrain.errors import UserError
from pretrain.export.models import loading, read_language_model, require_trust

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

PACKAGES = ("lm-eval", "transformers", "torch")
"""Packages with a version that the report names."""
BOOTSTRAP = 1000
"""Resamples for the standard error of a metric that is not a mean, such as a perplexity."""
_REMEDY = (
    "fix the task, or leave it out; data of the hub must have been fetched once without "
    "HF_HUB_OFFLINE, or be local files in a task of --include-path (docs/evaluation.md)"
)
_SEED, _OTHER_SEED = 0, 1234  # the harness's own
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class LoadedTask:
    """Task of the harness.

    Attributes:
        shots: Worked examples before every item.
        asked: Digest of all requests, and of how answers are scored.
        task: The harness's own object.
    """

    name: str
    version: str
    shots: int
    asked: str
    task: Task


@dataclass(frozen=True)
class Measured:
    """Name in the report with its tasks.

    Attributes:
        name: Name of the task or group.
        tasks: The task, or all of the group.
        group: The harness's own object, for a group with a number of its own.
    """

    name: str
    tasks: tuple[LoadedTask, ...]
    group: Group | None = None


def require_harness(device: str) -> dict[str, str]:
    """Import the harness quietly.

    Args:
        device: cpu or cuda, for the models.

    Returns:
        The versions of PACKAGES.

    Raises:
        UserError: the extra `eval` is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if device == "cpu":  # else DeepSpeed, which accelerate imports, says that it has found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["DISABLE_MULTIPROC"] = "1"  # of its bootstrap, which else takes every core
    from importlib.metadata import version

    try:
        import datasets
        import lm_eval.evaluator
        import lm_eval.models.huggingface
        import lm_eval.tasks  # noqa: F401
        from transformers.utils import logging as chatter
    except ImportError as error:
        raise UserError(
            f"evaluate tasks needs lm-evaluation-harness ({error}): {how_to_install('eval')}"
        ) from error
    for name in ("lm_eval", "datasets", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    datasets.disable_progress_bars()
    return {name: version(name) for name in PACKAGES}


def load_tasks(
    names: Sequence[str], include_path: Path | None, shots: int | None, limit: int | None
) -> list[Measured]:
    """Load tasks with their data and their requests.

    Args:
        names: Names of tasks, groups and tags.
        include_path: Directory with task files of the user's own; None: none.
        shots: Worked examples before every item; None: as the task has it.
        limit: The first items of each task, at most; None: all.

    Raises:
        UserError: a name is not known, or its data or the task itself cannot be read.
    """
    with _quiet():
        manager = _task_manager(names, include_path)
        loaded: dict[str, Measured] = {}
        for name in names:
            try:
                parts = manager.load([name])
                tasks = {key: _prepared(task, shots, limit) for key, task in parts["tasks"].items()}
            except UserError:
                raise
            except Exception as error:  # whatever a task's file, its code and its data can raise
                raise UserError(
                    f"--tasks {name} cannot be loaded: {_reason(error)}; {_REMEDY}"
                ) from error
            for measured in _measured(parts.get("groups", {}).get(name), tasks):
                loaded.setdefault(measured.name, measured)
    return list(loaded.values())


def _task_manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return the harness's manager of these tasks, groups and tags; those of `include_path` win.

    The harness's own task files take it many seconds to read, so they are left out where
    `include_path` has all that is needed.
    """
    from lm_eval.tasks import TaskManager

    own_files = ""
    if include_path is not None:
        if not include_path.is_dir():
            raise UserError(
                f"--include-path {include_path} is not a directory; give one with task files "
                "(*.yaml)"
            )
        own_files = f" nor in --include-path {include_path}"
        custom_manager = TaskManager(include_path=str(include_path), include_defaults=False)
        if all(part in custom_manager.task_index for part in _task_names(custom_manager, names)):
            return custom_manager
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    if unknown := [name for name in names if name not in manager.task_index]:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3)
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise UserError(
            f"--tasks: there is no task, group or tag {', '.join(unknown)}{meant} in "
            f"lm-evaluation-harness{own_files}; `lm-eval ls tasks` lists what there is"
        )
    return manager


def _task_names(manager: TaskManager, names: Iterable[str]) -> Iterator[str]:
    """Yield the tasks in groups and tags, and names that the manager does not know."""
    for name in names:
        entry = manager.task_index.get(name)
        config = (entry.cfg if entry else None) or {}
        parts = config.get("task") if "group" in config else None
        if entry and entry.cfg is None:  # a tag
            yield from _task_names(manager, sorted(entry.tags))
        elif isinstance(parts, list):
            part_names = [
                part.get("task", part.get("group")) if isinstance(part, Mapping) else part
                for part in parts
            ]
            yield from _task_names(
                manager, (part for part in part_names if isinstance(part, str) and part != name)
            )
        else:
            yield name


def _measured(group: Group | None, tasks: Mapping[str, LoadedTask]) -> Iterator[Measured]:
    """Yield a group that has an aggregate score, or its parts if it has none."""
    if group is None:
        yield from (Measured(name, (task,)) for name, task in tasks.items())
    elif group.has_aggregation:
        yield Measured(
            group.name, tuple(tasks[task.task_name] for task in group.get_all_tasks()), group
        )
    else:
        for part in group.get_all_tasks(recursive=False):
            yield Measured(part.task_name, (tasks[part.task_name],))
        for inner in group.get_all_groups(recursive=False):
            yield from _measured(inner, tasks)


def _prepared(task: Task, shots: int | None, limit: int | None) -> LoadedTask:
    """Prepare a task as the harness does before an evaluation."""
    task_shots = task.get_config("num_fewshot")
    # A task that says 0 keeps it, as in the harness.
    if task_shots is None or (shots is not None and task_shots != 0):
        task.set_config("num_fewshot", shots or 0)
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"--tasks {task.task_name} runs code that the model writes, which is not done here; "
            "leave it out"
        )
    task.set_fewshot_seed(_OTHER_SEED)
    task.build_all_requests(limit=limit)
    config = task.dump_config()
    shots = int(config.get("num_fewshot") or 0)
    return LoadedTask(
        name=task.task_name,
        version=str(task.VERSION),
        shots=shots,
        asked=_digest(task, config),
        task=task,
    )


def _digest(task: Task, config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all requests, items and scoring settings."""
    counts = {
        key: config.get(key)
        for key in ("output_type", "metric_list", "filter_list", "process_results")
    }
    digest = hashlib.sha256(
        _ADDRESS.sub("", json.dumps(counts, default=str, sort_keys=True)).encode()
    )
    for instance in task.instances:
        # Requests follow from data, prompt and examples alike, whatever of them has changed.
        item = [instance.request_type, instance.args, instance.doc]
        digest.update(json.dumps(item, default=str, sort_keys=True).encode())
    return digest.hexdigest()


class Harness:
    """Model of transformers in the harness.

    Args:
        directory: Directory of the model.
        device: cpu or cuda.
        batch_size: Requests at once.
        trust_code: Whether code that lies in the directory may run.

    Raises:
        UserError: transformers cannot load it.
    """

    def __init__(self, directory: Path, device: str, batch_size: int, trust_code: bool) -> None:
        from lm_eval.models.huggingface import HFLM

        require_trust(directory, trust_code)
        with _quiet():
            model = read_language_model(directory, trust_code, "auto").to(device)
            with loading(directory):
                self._model = HFLM(
                    pretrained=model,
                    tokenizer=str(directory),
                    batch_size=batch_size,
                    trust_remote_code=trust_code,
                )

    def evaluate(self, loaded: LoadedTask, limit: int | None) -> TaskScores:
        """Evaluate the model on one task.

        Args:
            limit: Number of the first items, at most; None: all.

        Raises:
            UserError: the device's memory does not hold a batch, or the task's own code failed.
        """
        import numpy as np
        import torch
        from lm_eval import evaluator

        # Seeded for each task, so that a result does not depend on the tasks before it.
        random.seed(_SEED)
        np.random.seed(_OTHER_SEED)
        torch.manual_seed(_OTHER_SEED)
        loaded.task.set_fewshot_seed(_OTHER_SEED)
        with _quiet():
            try:
                results = evaluator.evaluate(
                    self._model,
                    {"tasks": {loaded.name: loaded.task}},
                    limit=limit,
                    bootstrap_iters=BOOTSTRAP,
                )
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"{loaded.name}: {_reason(error)}; give a smaller --batch-size"
                ) from error
            except Exception as error:
                reason = _reason(error)
                raise UserError(
                    f"--tasks {loaded.name} failed in the harness: {reason}; fix the task, or "
                    "leave it out"
                ) from error
        scores = task_scores(results, loaded.name, self._cut(loaded.task))
        if not scores.scores:
            raise UserError(f"--tasks {loaded.name} has no score that is a number; leave it out")
        return scores

    def _cut(self, task: Task) -> int:
        """Return the number of requests that, with their generation, exceed the model's context."""
        from lm_eval.models.utils import normalize_gen_kwargs

        model = self._model
        cut = 0
        for request in task.instances:
            if request.request_type == "generate_until":
                text, settings = request.args
                generated = normalize_gen_kwargs(settings, model.max_gen_toks)["max_gen_toks"]
                cut += len(model.tok_encode(text)) + generated > model.max_length
        pairs = [
            request.args for request in task.instances if request.request_type == "loglikelihood"
        ]
        lengths = (sum(map(len, model._encode_pair(*pair))) for pair in pairs if pair[0])
        return cut + sum(length > model.max_length + 1 for length in lengths)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:500].rstrip(".") or type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the harness's bars and notices; `WorkDisplay` shows progress."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
