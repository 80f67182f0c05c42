"""Which of the harness's 14,000 task files are needed: to parse all takes longer than a small task does."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from pretrain.errors import UserError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry

HUB_SECONDS = 10.0
"""How long the hub has to answer at all."""
_DEFINITION = re.compile(rb"""^(?:task|group|tag):[ \t]*["']?([\w.:+-]+)["']?[ \t]*$""", re.MULTILINE)
_TAG_LIST = re.compile(rb"^tag:[ \t]*\n((?:[ \t]*-[^\n]*\n)+)", re.MULTILINE)
_TAG = re.compile(rb"""-[ \t]*["']?([\w.:+-]+)""")
_LOCAL = {"arrow", "csv", "json", "pandas", "parquet", "text", "xml"}
"""What `dataset_path` is where the data lie in files (the builders that `datasets` brings along)."""


def task_manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """The harness's manager of at least these tasks, groups and tags; those of `include_path` win.

    Raises:
        UserError: `include_path` is no directory, or a name is not known.
    """
    from lm_eval import tasks

    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--include-path {include_path} is no directory; give one with task files (*.yaml)")
    own = [] if include_path is None else [str(include_path)]
    if own:
        manager = tasks.TaskManager(include_path=own, include_defaults=False)
        if _complete(manager.task_index, names):
            return manager
    places = _defined_in(Path(tasks.__file__).parent)
    known = {*places, *(_defined_in(include_path) if include_path else ())}
    if unknown := [name for name in names if name not in known]:
        raise UserError(_unknown(unknown, known, include_path))
    folders = {str(folder) for name in names for folder in places.get(name, ())}
    manager = tasks.TaskManager(include_path=[*sorted(folders, reverse=True), *own], include_defaults=False)
    if _complete(manager.task_index, names):
        return manager
    return tasks.TaskManager(include_path=own or None)


def _defined_in(root: Path) -> dict[str, set[Path]]:
    """{task, group or tag: the folders of `root` whose files define it}, by their text."""
    found: dict[str, set[Path]] = {}
    for path in root.rglob("*yaml"):
        if not path.is_file():
            continue
        text = path.read_bytes()
        names = _DEFINITION.findall(text)
        for listed in _TAG_LIST.findall(text):
            names += _TAG.findall(listed)
        folder = root / path.relative_to(root).parts[0]
        for name in names:
            found.setdefault(name.decode(), set()).add(folder if folder.is_dir() else root)
    return found


def _complete(index: Mapping[str, Entry], names: Iterable[str]) -> bool:
    """Whether the index has all of these, and all that their groups are made of."""
    return all(
        name in index and _complete(index, _members(index[name].cfg, index[name].tags, name))
        for name in names
    )


def _members(config: Mapping[str, Any] | None, tags: Iterable[str], name: str) -> list[str]:
    """The names that a group or a tag stands for; none for a task."""
    if config is None:
        return sorted(tags)
    parts = config.get("task")
    if "group" not in config or not isinstance(parts, list):
        return []
    named = [part.get("task", part.get("group")) if isinstance(part, Mapping) else part for part in parts]
    return [part for part in named if isinstance(part, str) and part != name]


def _unknown(unknown: Sequence[str], known: Iterable[str], include_path: Path | None) -> str:
    near = difflib.get_close_matches(unknown[0], sorted(known), n=3)
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    own = f" nor in --include-path {include_path}" if include_path else ""
    return (
        f"--tasks: there is no task, group or tag {', '.join(unknown)}{meant} in lm-evaluation-harness{own}; "
        "`lm-eval ls tasks` lists what there is"
    )


def require_hub(manager: TaskManager, names: Sequence[str]) -> None:
    """Fail soon, and in a sentence, where data must come from the hub and it does not answer.

    Raises:
        UserError: no answer in HUB_SECONDS. With HF_HUB_OFFLINE nothing is asked: what was fetched before
            is found in the cache.
    """
    asked = sorted(distant(manager.task_index, names))
    if not asked or offline():
        return
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urlopen(Request(hub, method="HEAD"), timeout=HUB_SECONDS).close()
    except HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise UserError(f"--tasks {asked[0]}: {hub} does not answer ({reason}); {remedy()}") from error


def offline() -> bool:
    """Whether huggingface_hub was told not to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def remedy() -> str:
    """What to do about data that cannot be had."""
    cached = (
        "fetch the data once without HF_HUB_OFFLINE"
        if offline()
        else "set HF_HUB_OFFLINE=1 if the data were fetched on this machine before"
    )
    return f"{cached}, or name local files in a task of --include-path (docs/evaluation.md)"


def distant(index: Mapping[str, Entry], names: Iterable[str]) -> set[str]:
    """Those of the tasks whose data are not in local files."""
    found: set[str] = set()
    for name in names:
        entry = index.get(name)
        config = (entry.cfg if entry else None) or {}
        members = _members(entry.cfg, entry.tags, name) if entry else []
        found |= distant(index, members)
        path = str(config.get("dataset_path", ""))
        if not members and path not in _LOCAL and not Path(path).exists():
            found.add(name)
    return found
