"""metrics.jsonl: one strict-JSON object per logged step, cut back when a run resumes.

The file is the authoritative record of the run's numbers: every other view (TensorBoard, `compare`,
a user's notebook) can be checked against it. Steps ascend, and none appears twice. JSON has no NaN
and no infinity, so a value that is not finite is written as `null`; TensorBoard keeps the value.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from data_pipeline.io.files import naming, open_regular, sync
from data_pipeline.io.forms import LARGEST, parse_json
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory
from pretrain.runs.position import Position
from pretrain.runs.tags import (
    CHECKPOINT_STALL_SECONDS,
    LOSS,
    PERPLEXITY,
    PERPLEXITY_OF_SOURCE,
    VALIDATION_LOSS,
)

_LONGEST_LINE = 1 << 24
"""Most bytes of a line; a record has a few thousand."""


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl in order, without a torn last line.

    Raises:
        UserError: a line is not an object with an ascending integer "step"; names the line.
    """
    for record, _ in _records(path):
        yield record


def file_telling_of_a_save(run: RunDirectory, ended: bool, withdrawn: bool) -> Path | None:
    """Return the file that tells of a complete checkpoint, not of a killed save alone; or None.

    Args:
        run: the run's directory.
        ended: its state says that it has ended.
        withdrawn: a checkpoint was withdrawn, of which the records tell too.
    """
    if run.summary.exists():
        return run.summary
    if not run.metrics.is_file():
        return run.state_file if ended else None
    saves = [CHECKPOINT_STALL_SECONDS.tag in record for record in read_metrics(run.metrics)]
    told = sum(saves) > 1 or (bool(saves) and ended)
    return run.metrics if told and not withdrawn else None


def cut_back(path: Path, resume_step: int, keep: int) -> deque[dict[str, Any]]:
    """Drop all records after a step and a torn last line.

    Steps ascend, so the kept records are a prefix of the file, and one atomic truncation is enough:
    a kill at any time leaves the old file or the cut one. A missing file counts as empty.

    Args:
        resume_step: Last step to keep.
        keep: Number of records to return.

    Returns:
        The last `keep` of the remaining records.
    """
    kept: deque[dict[str, Any]] = deque(maxlen=keep)
    if not path.exists():
        return kept
    end = 0
    if resume_step > 0:  # a fresh start keeps nothing, whatever the old file holds
        for record, record_end in _records(path):
            if record["step"] > resume_step:
                break
            kept.append(record)
            end = record_end
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
            sync(file)
    return kept


def last_record(path: Path) -> dict[str, Any]:
    """Return the last record of a metrics.jsonl; an empty dict without any."""
    newest: deque[dict[str, Any]] = deque(read_metrics(path), maxlen=1)
    return newest[0] if newest else {}


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (record, offset of the byte after its line) for each whole line of `path`."""
    end, last_step = 0, 0
    with _opened(path) as file:
        lines = iter(partial(file.readline, _LONGEST_LINE), b"")
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                return
            end += len(line)
            record = _parse(path, number, line)
            if record["step"] <= last_step:
                raise UserError(
                    f"{path}: line {number} is step {record['step']} but follows step {last_step}; "
                    "steps must ascend: move the file away and start again from the checkpoint"
                )
            last_step = record["step"]
            yield record, end


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; move it away, and restore the run's own"
        ) from error


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    step = record.get("step") if isinstance(record, dict) else None
    if type(step) is not int or step >= LARGEST:
        raise UserError(
            f'{path}: line {number} is not a JSON object with an integer "step"; '
            "move the file away and start again from the checkpoint"
        )
    # Only suspicious lines take the strict parser, whose hook would double the time of a read.
    if line.count(b'":') != len(record) or b"NaN" in line or b"Infinity" in line:
        try:
            parse_json(line)
        except ValueError as error:
            raise UserError(
                f"{path}: line {number}: {error}; restore the file, or move it away and start "
                "again from the checkpoint"
            ) from None
    return record


class MetricsFile:
    """Writer that appends records; one at a time.

    A record reaches the operating system before `append` returns, so a killed process loses none.
    It reaches the disk before `sync` returns, so a machine that fails loses none from before that
    call. An OSError names the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("ab")

    def append(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Write the record of the step that led to `position`.

        Args:
            position: Position after the step.
            metrics: {tag: value}.
        """
        record: dict[str, int | float | None] = {
            "step": position.step,
            "tokens": position.consumed_tokens,
            "samples": position.consumed_samples,
        }
        record.update(
            {tag: value if math.isfinite(value) else None for tag, value in metrics.items()}
        )
        with naming(self._path):
            self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def sync(self) -> None:
        with naming(self._path):
            sync(self._file)

    def close(self) -> None:
        self.sync()
        self._file.close()


def summary_of(last: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of summary.json, a run's result for scripts, from its last record."""
    return {
        "step": last["step"],
        "tokens": last["tokens"],
        "samples": last["samples"],
        "loss": last[LOSS.tag],
        "validation": {
            "loss": last[VALIDATION_LOSS.tag],
            "perplexity": last[PERPLEXITY.tag],
            "perplexity_by_source": PERPLEXITY_OF_SOURCE.members(last),
        },
    }
