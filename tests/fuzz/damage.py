"""What happens to files: strategies of hypothesis, and the judge of what a reader makes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from hypothesis import strategies as st

from data_pipeline.errors import DataError
from megatron_patches.errors import MethodError
from pretrain.errors import UserError

T = TypeVar("T")
REFUSED: Final = "refused with a sentence"
LONGEST_SENTENCE = 20_000  # what was typed may be said again
DEEP = 100_000
NO_OBJECTS = [
    b"",
    b"\x00",
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"{}",
    b"{",
    b"[" * DEEP,
    b'{"a":' * DEEP,
    b"\xff\xfe{}",
]
ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    2**31, 2**32 + 1, 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, 10**400,
    "", "x", "0", "-1", "1e3", "nan", "\ud800", "\x00", "a/b", "../x", "..",
    "/etc/passwd", "x" * 300,
    [], {}, [[]], [None], [0, 0], [-1], {"": {}}, {"x": None}, [["x", 1]],
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Flip, overwrite, remove, insert, repeat or cut, up to four times."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 40)))
        kind = draw(
            st.sampled_from(["flip", "overwrite", "remove", "insert", "repeat", "cut", "swap"])
        )
        if kind == "flip" and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "overwrite":
            data[start:stop] = draw(st.binary(min_size=stop - start, max_size=stop - start))
        elif kind == "remove":
            del data[start:stop]
        elif kind == "insert":
            data[start:start] = draw(st.binary(max_size=40))
        elif kind == "repeat":
            data[start:start] = data[start:stop]
        elif kind == "swap":
            data[start:stop] = data[start:stop][::-1]
        else:
            del data[start:]
    return bytes(data)


@st.composite
def odd_json(draw: st.DrawFn, value: Any) -> Any:
    """Replace, remove or add, at one to three places of a JSON value."""
    root = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 3))):
        container: Any = root
        key: Any = 0
        while (
            isinstance(container[key], (dict, list)) and container[key] and draw(st.integers(0, 4))
        ):
            container = container[key]
            keys = sorted(container) if isinstance(container, dict) else range(len(container))
            key = draw(st.sampled_from(keys))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "near"]))
        if kind == "remove" and container is not root:
            del container[key]
            if container is not root and not container:
                break
        elif kind == "add" and isinstance(container[key], (dict, list)):
            _add(container[key], draw(odd_keys), copy.deepcopy(draw(odd_values)))
        elif (
            kind == "near" and type(container[key]) in (int, float) and abs(container[key]) < 1e300
        ):
            container[key] += draw(st.sampled_from([-1, 1, 0.5, 2**32, 10**12]))
        else:
            # The next change is not to the list itself.
            container[key] = copy.deepcopy(draw(odd_values))
    return root[0]


def _add(container: Any, key: str, value: Any) -> None:
    if isinstance(container, dict):
        container[key] = value
    else:
        container.append(value)


odd_values = st.one_of(
    [
        st.sampled_from(ODD_VALUES),
        st.integers(),
        st.floats(),
        st.text(max_size=6),
        st.lists(st.integers(), max_size=3),
    ]
)
odd_keys = st.one_of(st.sampled_from(["", "x", "format", "\ud800"]), st.text(max_size=6))


def damaged_json(content: bytes) -> st.SearchStrategy[bytes]:
    """A JSON file after damage to its bytes, with odd values, or something else in its place."""
    odd = odd_json(json.loads(content)).map(lambda value: json.dumps(value).encode())
    return st.one_of(
        [damaged(content), odd, odd, st.binary(max_size=60), st.sampled_from(NO_OBJECTS)]
    )


def as_lines(records: Sequence[Any]) -> bytes:
    """Return a JSON value on each line."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def odd_lines(records: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """The lines of all records, one of which has odd values."""

    def with_odd(position: int) -> st.SearchStrategy[bytes]:
        before, after = records[:position], records[position + 1 :]
        return odd_json(records[position]).map(lambda odd: as_lines([*before, odd, *after]))

    return st.integers(0, len(records) - 1).flatmap(with_odd)


@contextmanager
def holding(path: Path, content: bytes) -> Iterator[None]:
    """Let a file hold something else for a while."""
    honest = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(honest)


def right_or_refused(action: Callable[[], T]) -> T | str:
    """Return what a reader returns, or REFUSED if it refuses with one sentence.

    All else fails the test.
    """
    try:
        return action()
    except (UserError, DataError, MethodError) as refusal:
        sentence = str(refusal)
        assert sentence.strip() and "\n" not in sentence and "Traceback" not in sentence, sentence
        assert len(sentence) < LONGEST_SENTENCE, f"{len(sentence)} characters: {sentence[:300]}"
        return REFUSED
