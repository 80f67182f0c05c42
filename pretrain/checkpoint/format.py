"""The format of a checkpoint: its files, their content, and the checks that find a damaged file.

    step_00000123/rank_00000.safetensors ...   1-D fp32 slices: master/NAME, and STATE/NAME for
                                               each state that the optimizer keeps of NAME
                  parameters.json              logical parameter -> shape, states, step, slices
                  checkpoint.json              identity of the run, position in training, layout
                  COMPLETE                     size and SHA-256 of every other file; written last

docs/checkpoints.md and docs/api.md describe the format for other readers. Every file is parsed by a
pydantic form with bounds, so a file with unexpected content is refused and never half used.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from data_pipeline.io.files import hash_file, read_regular
from data_pipeline.io.forms import Count, parse_json
from megatron_patches.recipe.optimizers import FP32
from pretrain.checkpoint.damage import damaged, unreadable
from pretrain.config.keys import type_problem
from pretrain.errors import UserError
from pretrain.runs.directory import ABOUT, MARKER
from pretrain.runs.position import Position

FORMAT: Literal[2] = 2
READS = (1, 2)
"""Formats that this version reads; in format 1 every parameter has FORMAT_1_STATES."""
FORMAT_1_STATES = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""The kind of the fp32 weights; the other kinds are the states of the optimizer."""
PARAMETERS = "parameters.json"

T = TypeVar("T")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def tensor_key(kind: str, name: str) -> str:
    """Return the key of a slice in a rank's file.

    Args:
        kind: MASTER, or a state of the optimizer.
        name: Name of the logical parameter.
    """
    return f"{kind}/{name}"


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the head of a safetensors file: a JSON object, and before it its length in 8 bytes.

    Built here because the safetensors package copies every tensor before it writes, and cannot
    hash.

    Args:
        tensors: (name, the format's name of the type, shape, bytes) in the order of the file.
        metadata: Entries for other readers.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, size in tensors:
        offsets = [offset, offset + size]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for tensors aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Block:
    """A block of a tensor: the elements whose index along `dim` is in [first, last)."""

    dim: Count
    first: Count
    last: Count

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Block:
        """Return the block of a whole tensor."""
        return cls(0, 0, shape[0])

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Return the block's own shape, in a tensor of shape `full`."""
        return (*full[: self.dim], self.last - self.first, *full[self.dim + 1 :])

    def rows(self, full: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the block's range [start, stop) in the flattened tensor of shape `full`.

        None if the block is not contiguous there.
        """
        if self.shape(full) == full:
            return 0, math.prod(full)
        row = math.prod(full[1:])
        return (self.first * row, self.last * row) if self.dim == 0 else None


@dataclass(frozen=True)
class StoredFile:
    """Size and digest of a file, as COMPLETE names them."""

    bytes: Count
    sha256: str


@dataclass(frozen=True)
class StoredSlice:
    """Elements [start, start + length) of a flattened block; `file` holds all their kinds."""

    file: str
    block: Block
    start: Count
    length: Count


@dataclass(frozen=True)
class StoredParameter:
    """A logical parameter.

    Attributes:
        shape: Shape of the whole parameter.
        step: Updates that its states have seen; None if its optimizer does not count them.
        slices: Positions of its elements in the files.
        states: Kinds of values that the optimizer keeps beside the master weight.
        dtype: Type of every kind in the file.
    """

    shape: Annotated[tuple[Count, ...], Field(min_length=1)]
    step: Count | None
    slices: tuple[StoredSlice, ...]
    states: tuple[str, ...] = FORMAT_1_STATES
    dtype: Literal["float32"] = "float32"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of values stored of an element: the master weight, then the states."""
        return (MASTER, *self.states)

    def blocks(self) -> dict[Block, list[StoredSlice]]:
        """Return {block: its slices}, blocks and slices in order."""
        blocks: dict[Block, list[StoredSlice]] = defaultdict(list)
        for piece in sorted(self.slices, key=lambda piece: (piece.block.first, piece.start)):
            blocks[piece.block].append(piece)
        return blocks

    def gap(self) -> str | None:
        """Return a clause about elements in no slice, or in two; None if there are none."""
        blocks = self.blocks()
        reached = 0
        dims = {block.dim for block in blocks}
        if len(dims) != 1 or min(dims) not in range(len(self.shape)):
            return "its slices do not lie along one dimension"
        for block, pieces in blocks.items():
            if block.first != reached or block.last > self.shape[block.dim]:
                return f"nothing lies at {reached} of dimension {block.dim}"
            reached = block.last
            elements = 0
            for piece in pieces:
                if piece.start != elements:
                    break
                elements += piece.length
            else:
                if elements == math.prod(block.shape(self.shape)):
                    continue
            return f"nothing lies at element {elements} of its part from {block.first} on"
        size = self.shape[min(dims)]
        return None if reached == size else f"nothing lies at {reached} of dimension {min(dims)}"


class Counters(TypedDict):
    """DeepSpeed's own counters of an engine."""

    global_steps: Count
    global_samples: Count
    micro_steps: Count
    skipped_steps: Count


class FrozenBank(TypedDict):
    """The recipe of the frozen Query/Key bank, and {(layer, role) as text: SHA-256}."""

    recipe: dict[str, Any] | None
    sha256: dict[str, str]


class _Source(TypedDict):
    documents: Count
    tokens: Count
    sha256: str


class _Directory(TypedDict):
    directory: str
    fingerprint: str
    sources: dict[str, _Source]


class _Part(TypedDict):
    fingerprint: str
    source: str | None
    share: str


class Data(TypedDict):
    """The blend of the training data, as `Blend.describe` returns it."""

    tokenizer: str
    directories: list[_Directory]
    parts: list[_Part]


@dataclass(frozen=True)
class About:
    """The content of checkpoint.json.

    Attributes:
        keys: Settings that tie the checkpoint to the run (`identity.run_identity`).
        data: Blend of the training data.
        frozen_bank: Recipe and digests of the frozen bank.
        position: Progress of the run.
        counters: DeepSpeed's own counters.
        layout: Layout that wrote the checkpoint, from `identity.Layout.as_dict`.
        format: Number of the checkpoint's format.
    """

    keys: dict[str, Any]
    data: Data
    frozen_bank: FrozenBank
    position: Position
    counters: Counters
    layout: dict[str, bool | Count | str]
    format: Literal[1, 2] = FORMAT


@dataclass(frozen=True)
class Sidecar:
    """The record of one rank's writing: its file, and its slices by logical parameter."""

    file: StoredFile
    parameters: dict[str, StoredParameter]


class _Numbered(TypedDict):
    format: Count


_FILES = TypeAdapter(dict[str, StoredFile])
_INDEX = TypeAdapter(dict[str, StoredParameter])
_ABOUT = TypeAdapter(About)
_NUMBERED = TypeAdapter(_Numbered)
_SIDECAR = TypeAdapter(Sidecar)


def read_marker(checkpoint: Path) -> dict[str, StoredFile]:
    """Return {name: size and SHA-256} of every file of a checkpoint, from COMPLETE.

    Raises:
        UserError: COMPLETE cannot be read, or has another content.
    """
    files = _read(_FILES, checkpoint / MARKER)
    wrong = [name for name in files if Path(name).name != name or name in (MARKER, "..")]
    if wrong or not {PARAMETERS, ABOUT} <= files.keys():
        raise damaged(checkpoint / MARKER, "does not name the files of a checkpoint")
    return files


def marker_digest(checkpoint: Path) -> str:
    """Return the SHA-256 of COMPLETE, which changes if the checkpoint is written again.

    Raises:
        UserError: COMPLETE cannot be read.
    """
    try:
        return hash_file(checkpoint / MARKER)
    except OSError as error:
        raise unreadable(checkpoint / MARKER, error) from None


def read_about(checkpoint: Path) -> About:
    """Read checkpoint.json.

    Raises:
        UserError: it cannot be read, is of another format, or has a setting of another type.
    """
    number = _read(_NUMBERED, checkpoint / ABOUT)["format"]
    if number not in READS:
        raise UserError(
            f"{checkpoint} has format {number} and this version of the program reads "
            f"{' and '.join(map(str, READS))}; use the version that wrote it, or choose another "
            "run.name to start afresh"
        )
    about = _read(_ABOUT, checkpoint / ABOUT)
    for key, value in about.keys.items():
        if problem := type_problem(key, value):
            raise damaged(checkpoint / ABOUT, f"is damaged: {key} is {value!r}: {problem}")
    return about


def read_index(checkpoint: Path) -> dict[str, StoredParameter]:
    """Read parameters.json and check that the slices make whole parameters.

    Returns:
        {logical name: the stored parameter}.

    Raises:
        UserError: the file cannot be read, elements of a parameter are missing, or a file is not
            named in COMPLETE or is too short for them.
    """
    index_file = checkpoint / PARAMETERS
    index = _read(_INDEX, index_file)
    files = read_marker(checkpoint)
    needed: Counter[str] = Counter()
    for name, parameter in index.items():
        gap = parameter.gap()
        if gap is not None:
            raise damaged(index_file, f"does not have all of '{name}': {gap}")
        for piece in parameter.slices:
            needed[piece.file] += FP32 * len(parameter.kinds) * piece.length
    for file, size in needed.items():
        if file not in files:
            raise damaged(index_file, f"names {file}, which {MARKER} does not")
        if size > files[file].bytes:
            raise damaged(index_file, f"names {size} bytes of {file}, which has fewer")
    return index


def read_sidecar(file: Path) -> Sidecar:
    """Read the sidecar of one rank.

    Raises:
        UserError: the file cannot be read.
    """
    return _read(_SIDECAR, file)


def entries_json(entries: Mapping[str, Any]) -> str:
    """Return the content of parameters.json, or of COMPLETE, from the data classes in it."""
    return json.dumps({name: asdict(entry) for name, entry in sorted(entries.items())}, indent=1)


def about_json(about: About) -> str:
    """Return the content of checkpoint.json."""
    return json.dumps(asdict(about), indent=1)


def _read(form: TypeAdapter[T], file: Path) -> T:
    """Parse a JSON file of a checkpoint by a form, or refuse the file in one sentence."""
    try:
        content = read_regular(file)
        parse_json(content)  # refuses repeated keys, of which pydantic takes the last value
        return form.validate_json(content, strict=True)
    except FileNotFoundError:
        raise damaged(file, "is missing") from None
    except OSError as error:
        raise unreadable(file, error) from None
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"])) or "it"
        raise damaged(file, f"is damaged: {location}: {first['msg'].lower()}") from None
    except ValueError as error:
        raise damaged(file, f"is damaged: it is not JSON ({error})") from None


def merged(
    checkpoint: Path, of_ranks: Iterable[Mapping[str, StoredParameter]]
) -> dict[str, StoredParameter]:
    """Merge the ranks' indices into one.

    Args:
        checkpoint: The checkpoint's directory, for errors.
        of_ranks: For each rank, {logical name: the parameter as the rank wrote it}.

    Raises:
        RuntimeError: the ranks' slices do not add up to one model.
    """
    index: dict[str, StoredParameter] = {}
    for parameters in of_ranks:
        for name, written in parameters.items():
            joined = index.setdefault(name, replace(written, slices=()))
            if replace(written, slices=()) != replace(joined, slices=()):
                raise RuntimeError(
                    f"{checkpoint}: two ranks disagree about the shape, step or states of '{name}'"
                )
            index[name] = replace(written, slices=(*joined.slices, *written.slices))
    gaps = [f"'{name}': {gap}" for name, parameter in index.items() if (gap := parameter.gap())]
    if gaps:
        raise RuntimeError(f"{checkpoint}: what the ranks wrote does not have all of {gaps[0]}")
    return index
