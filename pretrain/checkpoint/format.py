"""The format of a checkpoint: its files, their content, and the checks that find a damaged file.

    step_00000123/rank_00000.safetensors ...   1-D fp32 slices: master/NAME, exp_avg/NAME, exp_avg_sq/NAME
                  parameters.json              logical parameter -> shape, step of its AdamW state, slices
                  checkpoint.json              identity of the run, position in training, layout
                  COMPLETE                     size and SHA-256 of every other file; written last

docs/checkpoints.md describes it for other readers.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pretrain.errors import UserError
from pretrain.runs.directory import MARKER
from pretrain.runs.position import Position

FORMAT = 1
KINDS = ("master", "exp_avg", "exp_avg_sq")
PARAMETERS, ABOUT = "parameters.json", "checkpoint.json"


class DamagedCheckpoint(UserError):
    """A checkpoint with a file that differs from what was saved."""


def damaged(file: Path, problem: str) -> DamagedCheckpoint:
    """Return the error for a damaged file; `problem` is a clause that follows the file's name."""
    return DamagedCheckpoint(
        f"{file} {problem}; restore it, or set checkpoint.fall_back=true to keep {file.parent.name} aside "
        "and go on from the checkpoint before"
    )


def unreadable(file: Path, error: OSError) -> DamagedCheckpoint:
    """Return the error for a file that the system does not let be read."""
    return damaged(file, f"cannot be read ({error.strerror})")


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def tensor_key(kind: str, name: str) -> str:
    """Return the key of a slice of the logical parameter `name` in a rank's file."""
    return f"{kind}/{name}"


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the head of a safetensors file: the length of a JSON object in 8 bytes, and that object.

    Written here because the safetensors package copies every tensor before it writes, and cannot hash.
    `tensors`: (name, the format's name of the type, shape, bytes) in the order of the file.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, size in tensors:
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Block:
    """A block of a tensor: the elements whose index along `dim` is in [first, last)."""

    dim: int
    first: int
    last: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Block:
        return cls(0, 0, shape[0])

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Return the block's own shape, in a tensor of shape `full`."""
        return (*full[: self.dim], self.last - self.first, *full[self.dim + 1 :])

    def rows(self, full: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the block's range [start, stop) in the flattened tensor; None if it is not contiguous."""
        if self.shape(full) == full:
            return 0, math.prod(full)
        row = math.prod(full[1:])
        return (self.first * row, self.last * row) if self.dim == 0 else None


@dataclass(frozen=True)
class StoredFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredSlice:
    """A slice: elements [start, start + length) of a flattened block; `file` has all three kinds of them."""

    file: str
    block: Block
    start: int
    length: int


@dataclass(frozen=True)
class StoredParameter:
    """A logical parameter: its whole shape, the step count of its AdamW state, and its slices."""

    shape: tuple[int, ...]
    step: int
    slices: tuple[StoredSlice, ...]
    dtype: str = "float32"

    def blocks(self) -> dict[Block, list[StoredSlice]]:
        """Return {block: its slices}, blocks and slices in order."""
        blocks: dict[Block, list[StoredSlice]] = defaultdict(list)
        for piece in sorted(self.slices, key=lambda piece: (piece.block.first, piece.start)):
            blocks[piece.block].append(piece)
        return blocks

    def gap(self) -> str | None:
        """Return a clause about elements that no slice has, or two have; None if each is there once."""
        blocks = self.blocks()
        reached, dims = 0, {block.dim for block in blocks}
        if len(dims) != 1 or min(dims) not in range(len(self.shape)):
            return "its slices do not lie along one dimension"
        for block, pieces in blocks.items():
            if block.first != reached or block.last > self.shape[block.dim]:
                return f"nothing lies at {reached} of dimension {block.dim}"
            reached, elements = block.last, 0
            for piece in pieces:
                if piece.start != elements:
                    return f"nothing lies at element {elements} of its part from {block.first} on"
                elements += piece.length
            if elements != math.prod(block.shape(self.shape)):
                return f"nothing lies at element {elements} of its part from {block.first} on"
        size = self.shape[min(dims)]
        return None if reached == size else f"nothing lies at {reached} of dimension {min(dims)}"


@dataclass(frozen=True)
class About:
    """The content of checkpoint.json.

    `keys`, `data`, `frozen_bank`: the run's identity, from `identity.run_identity`.
    """

    keys: dict[str, Any]
    data: dict[str, Any]
    frozen_bank: dict[str, Any]
    position: Position
    counters: dict[str, int]
    layout: dict[str, Any]
    format: int = FORMAT


_FILE = TypeAdapter(StoredFile)
_FILES = TypeAdapter(dict[str, StoredFile])
_INDEX = TypeAdapter(dict[str, StoredParameter])
_ABOUT = TypeAdapter(About)


def read_marker(checkpoint: Path) -> dict[str, StoredFile]:
    """Return {name: size and SHA-256} of every file of a checkpoint, from COMPLETE.

    Raises UserError: COMPLETE cannot be read, or has another content.
    """
    files = _parse(_FILES, checkpoint, MARKER, _read_json(checkpoint, MARKER))
    wrong = [name for name in files if Path(name).name != name or name in (MARKER, "..")]
    if wrong or not {PARAMETERS, ABOUT} <= files.keys():
        raise damaged(checkpoint / MARKER, "does not name the files of a checkpoint")
    return files


def read_about(checkpoint: Path) -> About:
    """Read checkpoint.json. Raises UserError: it cannot be read, or is of another format."""
    content = _read_json(checkpoint, ABOUT)
    number = content.get("format")
    if number != FORMAT:
        raise UserError(
            f"{checkpoint} has format {number} and this version of the program reads {FORMAT}; use the "
            "version that wrote it, or choose another run.name to start afresh"
        )
    return _parse(_ABOUT, checkpoint, ABOUT, content)


def read_index(checkpoint: Path) -> dict[str, StoredParameter]:
    """Read parameters.json and check that the slices make whole parameters.

    Raises UserError: the file cannot be read, elements of a parameter are missing, or a file is not named.
    """
    content = _read_json(checkpoint, PARAMETERS)
    index = _parse(_INDEX, checkpoint, PARAMETERS, content)
    files = read_marker(checkpoint)
    for name, parameter in index.items():
        gap = parameter.gap()
        if gap is not None:
            raise damaged(checkpoint / PARAMETERS, f"does not have all of '{name}': {gap}")
        for piece in parameter.slices:
            if piece.file not in files:
                raise damaged(
                    checkpoint / PARAMETERS, f"names {piece.file}, which {MARKER} does not"
                )
    return index


def read_sidecar(file: Path) -> tuple[StoredFile, dict[str, StoredParameter]]:
    """Return what one rank wrote: its file, and its slices by logical parameter."""
    content = json.loads(file.read_bytes())
    return _FILE.validate_python(content["file"]), _INDEX.validate_python(content["parameters"])


def entries_json(entries: Mapping[str, Any]) -> str:
    """Return the content of parameters.json, or of COMPLETE, of the data classes that they hold."""
    return json.dumps({name: asdict(entry) for name, entry in sorted(entries.items())}, indent=1)


def about_json(about: About) -> str:
    return json.dumps(asdict(about), indent=1)


def _read_json(checkpoint: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((checkpoint / name).read_bytes())
    except FileNotFoundError:
        raise damaged(checkpoint / name, "is missing") from None
    except OSError as error:
        raise unreadable(checkpoint / name, error) from None
    except (ValueError, RecursionError):
        raise damaged(checkpoint / name, "is damaged: it is not JSON") from None
    if not isinstance(content, dict):
        raise damaged(checkpoint / name, "is damaged: it is no JSON object")
    return content


def _parse(adapter: TypeAdapter[Any], checkpoint: Path, name: str, content: dict[str, Any]) -> Any:
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise damaged(checkpoint / name, f"is damaged: {place}: {first['msg'].lower()}") from None


def merged(
    checkpoint: Path, of_ranks: Iterable[Mapping[str, StoredParameter]]
) -> dict[str, StoredParameter]:
    """Merge the ranks' indices into one. Raises RuntimeError: they are not of one model."""
    index: dict[str, StoredParameter] = {}
    for parameters in of_ranks:
        for name, own in parameters.items():
            had = index.setdefault(name, StoredParameter(own.shape, own.step, ()))
            if (had.shape, had.step) != (own.shape, own.step):
                raise RuntimeError(
                    f"{checkpoint}: two ranks disagree about the shape or step of '{name}'"
                )
            index[name] = StoredParameter(own.shape, own.step, (*had.slices, *own.slices))
    gaps = [f"'{name}': {gap}" for name, parameter in index.items() if (gap := parameter.gap())]
    if gaps:
        raise RuntimeError(f"{checkpoint}: what the ranks wrote does not have all of {gaps[0]}")
    return index
