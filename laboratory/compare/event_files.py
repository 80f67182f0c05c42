"""Scalars of a run's TensorBoard event files, of the attempt that lived, and no damaged file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.errors import UserError


class Point(NamedTuple):
    """Scalar of an event file."""

    path: Path
    step: int
    tag: str
    value: float


def read_points(paths: Sequence[Path]) -> list[Point]:
    """Return all scalars of a run's event files by step; at equal steps a later file comes last.

    As in TensorBoard, the start of a session discards the steps from there on that came before it:
    they are of an attempt that died.

    Raises:
        UserError: a file cannot be read, none has a scalar, or it is not said which is the last.
    """
    from tensorboard.compat.proto.event_pb2 import SessionLog
    from tensorboard.util.tensor_util import make_ndarray

    points: list[Point] = []
    for path in paths:
        for event in _events(path, is_last=path == paths[-1]):
            if event.session_log.status == SessionLog.START:
                points = [point for point in points if point.step < event.step]
            points += [
                Point(path, event.step, value.tag, make_ndarray(value.tensor).item())
                for value in event.summary.value
                if value.metadata.plugin_data.plugin_name == "scalars"
            ]
    if not points:
        raise UserError(f"{paths[0]} has no scalar; give the event file of a run")
    _refuse_two_ends(points)
    return sorted(points, key=lambda point: point.step)


def _events(path: Path, *, is_last: bool) -> Iterator[Any]:
    """Yield the events of a file, which TensorBoard's own loader leaves in silence at damage.

    Args:
        is_last: The file is the last of the run; of earlier ones, a record that was being written
            when the attempt died is left out.
    """
    from google.protobuf.message import DecodeError
    from tensorboard import data_compat, dataclass_compat
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    metadata: dict[str, Any] = {}
    try:
        reader = PyRecordReader_New(str(path))
        while True:
            reader.GetNext()
            event = data_compat.migrate_event(Event.FromString(reader.record()))
            yield from dataclass_compat.migrate_event(event, metadata)
    except OutOfRangeError:
        return
    except (OSError, DecodeError, DataLossError, ValueError) as error:
        if not is_last and "truncated record" in str(error):
            return
        raise UserError(
            f"{path} is not an event file of TensorBoard, or is damaged ({error}); restore it, or "
            "leave the run out"
        ) from None


def _refuse_two_ends(points: Sequence[Point]) -> None:
    """Refuse files of which an earlier one goes further than the last, which marks no session."""
    ends: dict[str, dict[Path, int]] = {}
    for point in points:
        of_tag = ends.setdefault(point.tag, {})
        of_tag[point.path] = max(point.step, of_tag.get(point.path, point.step))
    for tag, of_tag in ends.items():
        last = [*of_tag][-1]
        longest = max(of_tag, key=lambda path: of_tag[path])
        if of_tag[longest] > of_tag[last]:
            raise UserError(
                f"{longest} ends with {tag} at step {of_tag[longest]}, the later {last} at step "
                f"{of_tag[last]}; they do not say which attempt is the run's last: give its file"
            )
