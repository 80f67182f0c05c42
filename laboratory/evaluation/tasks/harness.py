"""lm-evaluation-harness on one model: its tasks, `simple_evaluate`, and what its results say.

The harness asks, scores, aggregates, estimates errors and caches responses. This file only turns
its failures into one sentence.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.io.files import write_text_atomically
from data_pipeline.sources.hub import one_line
from laboratory.finetuning.models import Pretrained
from laboratory.finetuning.verbs import require_packages
from laboratory.reporting.progress import WorkDisplay
from pretrain.errors import UserError
from pretrain.export.models import loading, read_language_model

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PACKAGES = ("lm-eval", "sacrebleu", "transformers", "torch")
"""Packages with a version that the report names."""
MODULES = ("datasets", "lm_eval.evaluator", "lm_eval.models.huggingface", "sacrebleu")
BOOTSTRAP = 1000
"""Resamples for the standard error of a metric that is not a mean, such as BLEU."""
TOY_TASKS = Path(__file__).parent.parent / "toy_tasks"
_REMEDY = (
    "fix the task, or leave it out; data of the hub must have been fetched once without "
    "HF_HUB_OFFLINE, or be local files in a task of --include-path (docs/evaluation.md)"
)


@dataclass(frozen=True)
class Score:
    """Score on a task by one metric.

    Attributes:
        value: The score.
        stderr: The harness's own standard error over items; None where there is none.
        higher_is_better: False for a perplexity.
        items: Values of the items, if all are numbers; of a group, task by task.
    """

    value: float
    stderr: float | None
    higher_is_better: bool
    items: tuple[float, ...] = ()


Scores = Mapping[str, Mapping[str, Score]]
"""{task or group: {metric: score}} of one model."""


@dataclass(frozen=True)
class Request:
    """Request to the harness, the same for every model.

    Attributes:
        names: Names of tasks, groups and tags.
        shots: Worked examples before every item; None: as the task has it.
        limit: The first items of each task, at most; None: all.
        device: cpu or cuda.
        results: Directory for the harness's results and responses.
    """

    names: Sequence[str]
    shots: int | None
    limit: int | None
    batch_size: int
    device: str
    results: Path


def require_harness() -> dict[str, str]:
    """Import the harness quietly.

    Returns:
        The versions of PACKAGES.

    Raises:
        UserError: the extra `eval` is not installed.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # of its bootstrap, which else takes every core
    require_packages("evaluate tasks", *MODULES)
    import datasets

    for name in ("lm_eval", "datasets", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    return {name: version(name) for name in PACKAGES}


def load_manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return the harness's manager of tasks, once they and their data were loaded.

    Tasks of `include_path` win over the harness's, whose files take it many seconds to read: they
    are left out where nothing of them is needed.

    Args:
        include_path: Directory with task files of the user's own; None: none.

    Raises:
        UserError: a name is not known, or its data or the task itself cannot be read.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise UserError(
            f"--include-path {include_path} is not a directory; give one with task files (*.yaml)"
        )
    paths: list[str | Path] = [TOY_TASKS, *([include_path] if include_path else [])]
    with _quiet():
        manager = TaskManager(include_path=paths, include_defaults=False)
        with contextlib.suppress(Exception):  # such as a task that includes one of the harness's
            manager.load(list(names))
            return manager
        manager = TaskManager(include_path=paths)
    if unknown := [name for name in names if name not in manager.task_index]:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3)
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        own_files = f" nor in --include-path {include_path}" if include_path else ""
        raise UserError(
            f"--tasks: there is no task, group or tag {', '.join(unknown)}{meant} in "
            f"lm-evaluation-harness{own_files}; `lm-eval ls tasks` lists what there is"
        )
    with _failures(f"--tasks {','.join(names)} cannot be loaded", _REMEDY), _quiet():
        manager.load(list(names))
    return manager


def evaluate(model: Pretrained, manager: TaskManager, request: Request) -> dict[str, Any]:
    """Evaluate a model, and write the harness's results and samples.

    Returns:
        The harness's own results.

    Raises:
        UserError: transformers cannot load the model, or a task fails on it.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    directory = request.results / f"{Path(model.name).name}-{model.digest[:12]}"
    with _quiet():
        language_model = read_language_model(model.directory, model.trusted, "auto")
        with loading(model.directory):
            wrapped = HFLM(
                pretrained=language_model.to(request.device),
                tokenizer=str(model.directory),
                batch_size=request.batch_size,
                trust_remote_code=model.trusted,
            )
        names = ",".join(request.names)
        remedy = "fix the task, leave it out, or give a smaller --batch-size if memory ran out"
        with _failures(f"--tasks {names} failed in the harness", remedy):
            results: dict[str, Any] = lm_eval.simple_evaluate(
                model=wrapped,
                tasks=list(request.names),
                task_manager=manager,
                num_fewshot=request.shots,
                limit=request.limit,
                batch_size=request.batch_size,
                device=request.device,
                bootstrap_iters=BOOTSTRAP,
                use_cache=str(directory / "responses"),
            )
    for task, samples in results["samples"].items():
        lines = (json.dumps(sample, default=str, ensure_ascii=False) for sample in samples)
        path = directory / f"samples_{task.replace('/', '_')}.jsonl"
        write_text_atomically(path, "\n".join(lines) + "\n")
    aggregated = {key: value for key, value in results.items() if key != "samples"}
    text = json.dumps(aggregated, default=str, ensure_ascii=False, indent=2)
    write_text_atomically(directory / "results.json", text)
    return results


def evaluate_models(
    models: Sequence[Pretrained], manager: TaskManager, request: Request
) -> tuple[dict[Path, Scores], dict[str, dict[str, Any]]]:
    """Evaluate all models.

    Returns:
        {path of a model: its scores}, and {task: its version, shots and number of items}.

    Raises:
        UserError: as `evaluate`, or a task has no score that is a number.
    """
    scores: dict[Path, Scores] = {}
    results: dict[str, Any] = {}
    with WorkDisplay(len(models)) as work:
        for model in models:
            work.begin(model.name)
            results = evaluate(model, manager, request)
            scores[model.path] = read_scores(results)
            if silent := [task for task, of_task in scores[model.path].items() if not of_task]:
                raise UserError(f"--tasks: {silent[0]} has no score that is a number; leave it out")
    facts = {
        task: {
            "version": results["versions"].get(task),
            "shots": results["n-shot"].get(task),
            "items": counts["effective"],
        }
        for task, counts in results["n-samples"].items()
    }
    return scores, facts


def read_scores(results: Mapping[str, Any]) -> Scores:
    """Return the scores of groups that have some, and of tasks that are in none of these."""
    groups = results.get("groups", {})
    parts = {name: list(_tasks_of(name, results["group_subtasks"])) for name in groups}
    in_groups = {task for tasks in parts.values() for task in tasks}
    in_groups |= {group for name in groups for group in results["group_subtasks"].get(name, ())}
    scores = {}
    for name, result in results["results"].items():
        if name not in in_groups and (name in groups or name in results["samples"]):
            tasks = parts.get(name, [name])
            scores[name] = _scores_of(result, tasks, results)
    return scores


def _tasks_of(name: str, subtasks: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the tasks of a group, also of groups in it."""
    for part in subtasks.get(name, ()):
        if subtasks.get(part):
            yield from _tasks_of(part, subtasks)
        else:
            yield part


def _scores_of(
    result: Mapping[str, Any], tasks: Sequence[str], results: Mapping[str, Any]
) -> dict[str, Score]:
    scores = {}
    for key, value in result.items():  # a metric and its filter: `acc,none`
        metric, comma, which = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = result.get(f"{metric}_stderr,{which}")
        if not isinstance(error, (int, float)) or not math.isfinite(error):
            error = None  # the harness has "N/A"
        items = [
            sample.get(metric)
            for task in tasks
            for sample in results["samples"][task]
            if sample["filter"] == which
        ]
        better = results["higher_is_better"].get(tasks[0], {}).get(metric)
        scores[metric if which == "none" else key] = Score(
            value=float(value),
            stderr=error,
            higher_is_better=better is not False,
            # What is aggregated from pairs, such as BLEU, has no numbers of items.
            items=tuple(map(float, items)) if all(map(_is_number, items)) else (),
        )
    return scores


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or getattr(value, "shape", None) == ()


@contextlib.contextmanager
def _failures(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever a task's file, code and data, and the device, can raise into one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = one_line(error)[:500].rstrip(".")
        raise UserError(f"{what}: {reason}; {remedy}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the harness's bars and notices; `WorkDisplay` shows progress."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
