"""Read losses of any trainer's runs from tables and metric files.

    table        CSV or JSON lines with a column of names: each row is the result of one run
    chart        CSV as W&B exports a chart: a column `RUN - METRIC` for each run
    metric file  of one run: trainer_state.json, TensorBoard event files, CSV or JSON lines without
                 names

Of a chart and a metric file the last value counts. Name and seed of such a run are in its path or
name, as `baseline-seed_1`; those of a metric file may be given as NAME:SEED=PATH.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_pipeline.io.files import read_regular
from data_pipeline.io.home import expand_home
from laboratory.compare.event_files import read_points
from pretrain.errors import UserError

NAMES = ("name", "model", "variant", "run", "design", "arm")
"""Columns that hold names, the first that is there."""
HELD_OUT = frozenset(
    f"{part}{of}"
    for part in ("val", "eval", "valid", "validation", "test")
    for of in ("loss", "bpb")
) | {"lossvalidation", "lossvalid", "lossval", "losseval", "bpb", "bitsperbyte"}
"""Names of losses of held-out text, without what is between their words."""
_NOT_LOSSES = re.compile("perplexity|ppl|accuracy|acc$")
"""Parts of the names of perplexities and accuracies, without what is between their words."""
STEPS = frozenset(
    {"step", "steps", "globalstep", "trainerglobalstep", "iteration", "iter", "epoch", "tokens"}
)
STATE = "trainer_state.json"
_FORMATS = (
    "a CSV or JSON lines, with columns name, seed, loss or of one run's metrics, nor Hugging "
    f"Face's {STATE}, nor an event file of TensorBoard"
)
_NOTHING = (None, "")
"""Values of a record that has no number there."""
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+|nan|inf|infinity)(e[+-]?\d+)?\s*", re.ASCII | re.I)
"""A number as text; Python alone reads 1_000 too."""
_WHOLE = re.compile(r"([+-]?\d{1,18})(\.0*)?", re.ASCII)
_LARGEST = 1e6
"""No loss in nats or bits is larger; squares of such numbers are finite."""
_SEED = re.compile(r"[-_./ (]*(?<![A-Za-z0-9])seed[-_= ]?(\d{1,18})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True)
class Loss:
    """Final loss of one run.

    Attributes:
        name: Name of the model, the same for all its seeds.
        seed: Seed of the run.
        value: Loss as the file has it.
        metric: Name of the loss in the file.
        step: Step of the measurement; None where the file does not say.
        origin: File and line, for messages.
    """

    name: str
    seed: int
    value: float
    metric: str
    step: Any
    origin: str

    @property
    def in_bits(self) -> bool:
        """Return whether the name says that the loss is in bits per byte."""
        return _plain(self.metric).endswith(("bpb", "bitsperbyte"))


@dataclass(frozen=True)
class _Record:
    """Row of a table, or one record of metrics."""

    origin: str
    values: Mapping[str, Any]


def read_losses(
    files: Sequence[str | os.PathLike[str]], metric: str | None = None, column: str | None = None
) -> list[Loss]:
    """Read the losses of runs, in the order of the files.

    Args:
        files: Paths, of one run's metrics also as NAME:SEED=PATH.
        metric: Name of the loss; None: the only one of held-out text.
        column: Column with the names of a table; None: the first of NAMES.

    Raises:
        UserError: a file is of no known format or lacks something, a run is there twice, a number
            is not finite, or the losses are not of one kind.
    """
    losses = [loss for file in files for loss in _losses_of(os.fspath(file), metric, column)]
    runs: dict[tuple[str, int], Loss] = {}
    for loss in losses:
        other = runs.setdefault((loss.name, loss.seed), loss)
        if other is not loss:
            curve = other.step != loss.step
            remedy = "keep each run's last line" if curve else "give one of them"
            raise UserError(
                f"{other.origin} and {loss.origin} are both '{loss.name}' with seed {loss.seed}; "
                f"{remedy}, or name a metric file as NAME:SEED=PATH"
            )
        if _plain(losses[0].metric) != _plain(loss.metric):
            raise UserError(
                f"{losses[0].origin} has {losses[0].metric} and {loss.origin} has {loss.metric}; "
                "choose one for all with --metric"
            )
    return losses


def by_model(losses: Sequence[Loss]) -> dict[str, dict[int, float]]:
    """Return {model: {seed: loss}}, as the files have them."""
    models: dict[str, dict[int, float]] = {loss.name: {} for loss in losses}
    for loss in losses:
        models[loss.name][loss.seed] = loss.value
    return models


def number(value: Any, label: str) -> float:
    """Return a loss as a number.

    Args:
        label: Place and name of the loss, for the message.

    Raises:
        UserError: the value is not a finite number.
    """
    text = "" if isinstance(value, bool) else str(value)  # True is no loss of 1
    if not _NUMBER.fullmatch(text):
        raise UserError(f"{label} is {text[:40]!r}, which is not a number; write it as 3.312")
    loss = float(text)
    if not abs(loss) <= _LARGEST:
        raise UserError(
            f"{label} is {loss:g}, not a finite loss, and no mean has it; leave this seed out of "
            "all models, and say so"
        )
    if loss < 0:
        raise UserError(
            f"{label} is {loss:g}, but no loss of text is below 0; choose another metric"
        )
    return loss


def _losses_of(file: str, metric: str | None, column: str | None) -> list[Loss]:
    path = expand_home(file)
    match = None if os.path.exists(path) else re.fullmatch(r"(.+?):(\d{1,18})=(.+)", file)
    if match:
        path = expand_home(match[3])
    records = _read(path)
    keys = list(dict.fromkeys(key for record in records for key in record.values))
    # Reversed, so that the first of two keys with the same letters wins.
    by_word = {_plain(key): key for key in reversed(keys)}
    names = column or next((by_word[word] for word in NAMES if word in by_word), None)
    charted = {key: key.rpartition(" - ") for key in keys if " - " in key}
    # W&B exports minimum and maximum beside each curve.
    charted = {key: cut for key, cut in charted.items() if not cut[2].endswith(("__MIN", "__MAX"))}
    if names is not None and names not in keys:
        raise UserError(f"{path} has no column '{names}'; it has {_listed(keys)}")
    if match and (names or charted):
        raise UserError(f"{path} has names of its own; give it without {match[1]}:{match[2]}=")
    if names:
        return _of_table(records, keys, names, metric, path=path)
    if charted:
        chosen = _metric(list(dict.fromkeys(cut[2] for cut in charted.values())), metric, path)
        return [
            _last(records, key, metric=chosen, run=_run_of([cut[0]], f"{path}: '{cut[0]}'"))
            for key, cut in charted.items()
            if cut[2] == chosen
        ]
    if not STEPS & by_word.keys():
        raise UserError(
            f"{path} has no column of names ({', '.join(NAMES)}; or say --name COLUMN); "
            f"it has {_listed(keys)}"
        )
    chosen = _metric(keys, metric, path)
    _refuse_lost_end(records, chosen)
    run = (match[1], int(match[2])) if match else _run_of(_names_in_path(path), str(path))
    return [_last(records, chosen, metric=chosen, run=run)]


def _of_table(
    records: Sequence[_Record], keys: Sequence[str], names: str, metric: str | None, *, path: Path
) -> list[Loss]:
    """Return the loss of each row; without a column of seeds, the names hold them."""
    columns = [key for key in keys if key != names]
    seeds = [key for key in columns if key.lower() == "seed"]
    seeds = seeds or [key for key in columns if re.split(r"[./]", key.lower())[-1] == "seed"]
    if len(seeds) > 1:
        raise UserError(f"{path} has several columns of seeds, {_listed(seeds)}; leave one")
    chosen = _metric([key for key in columns if key not in seeds], metric, path, table=True)
    losses = []
    for record in records:
        raw = record.values.get(names)
        text = "" if raw is None else " ".join(str(raw).split())
        if not text or not text.isprintable():
            raise UserError(f"{record.origin} has no readable '{names}'; give the model a name")
        if seeds:
            seed = whole(record.values.get(seeds[0]), record.origin)
            alone, seed_in_name = split_seed(text)
            name = alone if seed_in_name == seed and alone else text
        else:
            name, seed = _run_of([text], f"{record.origin}: there is no column seed, and '{text}'")
        losses.append(_loss(record, chosen, metric=chosen, run=(name, seed)))
    return losses


def _last(records: Sequence[_Record], key: str, *, metric: str, run: tuple[str, int]) -> Loss:
    """Return the loss of the last record that has one."""
    having = [record for record in records if record.values.get(key) not in _NOTHING]
    return _loss((having or records)[-1], key, metric=metric, run=run)


def _refuse_lost_end(records: Sequence[_Record], key: str) -> None:
    """Refuse a curve that ends in null or in an empty cell: a loss that is not finite, as written.

    Every row of a CSV has every column, so an empty cell may also be of a row of something else: it
    is where other rows before the last loss lack one too, and where it has a number beside its
    step.
    """
    measured = [record for record in records if key in record.values]
    has_value = [record.values[key] not in _NOTHING for record in measured]
    end = len(has_value) - has_value[::-1].index(True) if True in has_value else 0
    for record in measured[end:]:
        others = (name for name, value in record.values.items() if value not in _NOTHING)
        has_another_number = any(_plain(name) not in STEPS for name in others)
        is_of_another_kind = has_another_number and not all(has_value[:end])
        if record.values[key] is None or not is_of_another_kind:
            what = "null" if record.values[key] is None else "empty"
            raise UserError(
                f"{record.origin}: {key} is {what}, not a finite loss; leave the run out, or this "
                "record if nothing was measured there"
            )


def _loss(record: _Record, key: str, *, metric: str, run: tuple[str, int]) -> Loss:
    value = record.values.get(key)
    if value in _NOTHING:
        raise UserError(f"{record.origin} has no {key}; add it, or leave the run out")
    steps = [name for name in record.values if _plain(name) in STEPS]
    steps.sort(key=lambda name: _plain(name) == "epoch")  # the last: a step says more
    return Loss(
        name=run[0],
        seed=run[1],
        value=number(value, f"{record.origin}: {key}"),
        metric=metric,
        step=record.values[steps[0]] if steps else None,
        origin=record.origin,
    )


def _metric(keys: Sequence[str], requested: str | None, path: Path, *, table: bool = False) -> str:
    """Return the key of the loss; a plain `loss` counts in tables only."""
    if requested is not None:
        candidates = [key for key in keys if key == requested] or [
            key for key in keys if _plain(key) == _plain(requested)
        ]
    else:
        candidates = [key for key in keys if _plain(key) in HELD_OUT]
        if table and not candidates:
            candidates = [key for key in keys if _plain(key) == "loss"]
    if candidates and _NOT_LOSSES.search(_plain(candidates[0])):
        raise UserError(
            f"{path}: {candidates[0]} is not a loss by its name; give losses in nats per token, "
            "which are logarithms of perplexities, or in bits per byte"
        )
    if len(candidates) == 1:
        return candidates[0]
    asked = f"'{requested}'" if requested else "column 'loss'" if table else "loss of held-out text"
    problem = (
        f"has several of this kind, {_listed(candidates)}" if candidates else f"has no {asked}"
    )
    remedy = "" if candidates else f"; it has {_listed(keys)}"
    raise UserError(f"{path} {problem}: choose one with --metric{remedy}")


def split_seed(text: str) -> tuple[str, int | None]:
    """Return a run's name without its seed, and the seed: `baseline-seed_1`; None without one."""
    match = _SEED.search(text)
    if not match:
        return text, None
    return (text[: match.start()] + text[match.end() :]).strip("-_./ ()"), int(match[1])


def _run_of(parts: Sequence[str], label: str) -> tuple[str, int]:
    """Return name and seed of a run by the first of some texts that has a seed.

    A text that is a seed and nothing else has its name in the next one: `baseline/seed_1`.
    """
    for index, part in enumerate(parts):
        name, seed = split_seed(part)
        if seed is not None:
            name = name or next(iter(parts[index + 1 :]), "")
            if name:
                return name, seed
    raise UserError(f"{label} does not say name and seed, as 'baseline-seed_1' does; add them")


def _names_in_path(path: Path) -> list[str]:
    """Return the names in a path, the last first; without the file's where TensorBoard gave it."""
    parts = [*reversed(path.absolute().parts)]
    if "tfevents" in parts[0]:
        return parts[1:]
    return parts if path.is_dir() else [path.stem, *parts[1:]]


def whole(value: Any, origin: str) -> int:
    """Return a seed as a whole number; pandas writes 1.0.

    Args:
        origin: File and line of the seed, for the message.

    Raises:
        UserError: the value is not a whole number.
    """
    text = "" if isinstance(value, bool) else str(value).strip()
    if match := _WHOLE.fullmatch(text):
        return int(match[1])
    raise UserError(f"{origin}: the seed is {text[:40]!r}, which is not a whole number")


@lru_cache(maxsize=10_000)  # the names of columns come again in every record
def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _listed(names: Sequence[str]) -> str:
    """Return names for a message, at most twelve."""
    more = [f"{len(names) - 12} more"] if len(names) > 12 else []
    return ", ".join([*names[:12], *more]) or "nothing"


def _read(path: Path) -> list[_Record]:
    """Read a file of any format.

    Raises:
        UserError: it cannot be read, is of no known format, or has no record.
    """
    if os.path.isdir(path):
        events = sorted(path.glob("*tfevents*"))
        if not events and not (path / STATE).is_file():
            raise UserError(
                f"{path} is a directory with neither event files of TensorBoard nor a {STATE}; "
                "give a file"
            )
        return _of_events(events) if events else _read(path / STATE)
    if "tfevents" in path.name and os.path.isfile(path):
        return _of_events([path])
    try:
        # Excel begins a CSV with a byte order mark.
        text = read_regular(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8, so it is neither {_FORMATS}") from None
    if "\0" in text:
        raise UserError(f"{path} is neither {_FORMATS}")
    records = _of_json(text, path) if text.lstrip().startswith(("{", "[")) else _of_csv(text, path)
    if not records:
        raise UserError(f"{path} has no record; give a file with losses")
    return records


def _of_json(text: str, path: Path) -> list[_Record]:
    """Return the objects of JSON lines, of a list, or of the history of a trainer's state."""
    content = _parsed(text, str(path))
    if content is None:
        if _parsed(text.lstrip().partition("\n")[0], str(path)) is None:  # nor is its first line
            raise UserError(f"{path} is not JSON: it is cut short or damaged; copy it again")
        lines = {f"{path}, line {index}": line for index, line in enumerate(text.split("\n"), 1)}
        return [
            _record(_parsed(line, origin), origin) for origin, line in lines.items() if line.strip()
        ]
    history = content.get("log_history", [content]) if isinstance(content, dict) else content
    if not isinstance(history, list):
        raise UserError(f"{path}: log_history is not a list; give a {STATE} of Hugging Face")
    return [
        _record(entry, f"{path}, record {index}") for index, entry in enumerate(history, start=1)
    ]


def _parsed(text: str, origin: str) -> Any:
    """Return the value of a JSON text with NaN as trainers write it; None if it is none.

    Raises:
        UserError: an object has a key twice, of which the last would win.
    """

    def content_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len(content := dict(pairs)) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in content if keys.count(key) > 1)
            raise UserError(f"{origin} has the key '{twice}' twice in one object; leave one")
        return content

    try:
        return json.loads(text, object_pairs_hook=content_of)
    except UserError:
        raise
    except (ValueError, RecursionError):
        return None


def _record(value: Any, origin: str) -> _Record:
    if not isinstance(value, dict):
        raise UserError(f'{origin} is not a JSON object, such as {{"name": …, "seed": …}}')
    return _Record(origin, value)


def _of_csv(text: str, path: Path) -> list[_Record]:
    """Return the rows of a CSV, separated by commas, semicolons or tabs."""
    first = text.lstrip().partition("\n")[0]
    # European exports separate by semicolons; the header shows which it is.
    reader = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=first.count))
    rows = _rows(reader, path)
    header = next(rows, (0, []))[1]
    if len(header) < 2:
        raise UserError(f"{path} is neither {_FORMATS}")
    if twice := [name for name in header if header.count(name) > 1]:
        raise UserError(f"{path} has several columns '{twice[0]}'; rename all but one")
    records = []
    for line, row in rows:
        if len(row) != len(header):
            raise UserError(
                f"{path}, line {line} has {len(row)} cells, but the first line has {len(header)}; "
                "make them equal"
            )
        records.append(_Record(f"{path}, line {line}", dict(zip(header, row, strict=True))))
    return records


def _rows(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line numbers and cells; empty lines are left out."""
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, [cell.strip() for cell in row]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}; fix the CSV") from None


def _of_events(paths: Sequence[Path]) -> list[_Record]:
    """Return the scalars of a run's event files, each as a record."""
    return [
        _Record(f"{point.path}, step {point.step}", {"step": point.step, point.tag: point.value})
        for point in read_points(paths)
    ]
