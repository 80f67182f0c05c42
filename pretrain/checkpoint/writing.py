"""Writing a checkpoint: a snapshot in host memory at a step boundary, then files, without any collective.

    snapshot = take_snapshot(engine, context, buffer)    # at a step boundary: copies, nothing else
    write_snapshot(snapshot, path, abandoned)            # file work only: runs behind the training
    files = join_parts(path, world_size, about, timeout, abandoned)    # rank 0: waits for the others' files
    declare_complete(path, files)                        # rank 0: from then on it counts

Each rank writes one safetensors file with the slices that its optimizer owns, hashed on the way and made
durable, and then a small file that says so. Nothing is gathered, and no element is written twice: what is
replicated over tensor-parallel ranks is the first one's, and at ZeRO stage 0 data-parallel ranks share.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.blocks import Part, overlaps, parts_of_rank
from pretrain.checkpoint.format import (
    ABOUT,
    KINDS,
    PARAMETERS,
    About,
    StoredFile,
    StoredParameter,
    StoredSlice,
    about_json,
    index_json,
    marker_json,
    merged,
    rank_file,
    read_sidecar,
    tensor_key,
)
from pretrain.checkpoint.slices import Slice, slices_of_rank
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.directory import MARKER, write_text_atomically

CHUNK = 2**24
"""Bytes that are hashed and written at a time."""
POLL_SECONDS = 0.05


class Abandoned(Exception):
    """Who asked for a save wants it no more."""


class HostBuffer:
    """Host memory for one rank's snapshot, kept from one save to the next; pinned for CUDA."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of_size(self, elements: int, pinned: bool) -> torch.Tensor:
        """fp32 `[elements]`, with any content."""
        if self._memory.numel() != elements:
            self._memory = torch.empty(0)  # let go of the old before the new is there
            self._memory = torch.empty(elements, pin_memory=pinned)
        return self._memory


@dataclass(frozen=True)
class OwnSlice:
    """A slice that this rank writes: elements of a logical parameter's block, and where they are now."""

    part: Part
    start: int
    source: Slice
    source_start: int
    length: int

    def values(self, kind: str) -> torch.Tensor | None:
        """A view `[length]` of the live values; None where AdamW has no state yet, which stands for zeros."""
        live = self.source.master if kind == "master" else self.source.moment(kind)
        return None if live is None else live.narrow(0, self.source_start, self.length)


@dataclass(frozen=True)
class Snapshot:
    """All that one rank writes, in host memory.

    Attributes:
        parameters: its slices, by logical parameter.
        values: fp32, in the order of the file: all masters, all first moments, all second moments.
    """

    rank: int
    parameters: Mapping[str, StoredParameter]
    values: torch.Tensor


def own_slices(engine: Any, context: ParallelContext) -> list[OwnSlice]:
    """What this rank writes; together the ranks' are every element of every logical parameter, once."""
    parts = parts_of_rank(engine.module, context.tensor_parallel_rank, context.tensor_parallel_size)
    found = []
    for source in slices_of_rank(engine):
        for part, start, source_start, length in overlaps(source.start, source.length, parts[source.name]):
            if not part.replicated or context.tensor_parallel_rank == 0:
                found.append(OwnSlice(part, start, source, source_start, length))
    if engine.zero_optimization_stage() == 0:  # all data-parallel ranks have found the same
        found = list(_share(found, context.data_parallel_rank, context.data_parallel_size))
    return found


def _share(slices: list[OwnSlice], rank: int, size: int) -> Iterator[OwnSlice]:
    """One of `size` equal shares of all the elements, one behind the other."""
    total, offset = sum(own.length for own in slices), 0
    for own in slices:
        first = max(total * rank // size - offset, 0)
        last = min(total * (rank + 1) // size - offset, own.length)
        if first < last:
            yield OwnSlice(own.part, own.start + first, own.source, own.source_start + first, last - first)
        offset += own.length


def take_snapshot(engine: Any, context: ParallelContext, buffer: HostBuffer) -> Snapshot:
    """Copy what this rank owns into `buffer`: from then on the engine may go on."""
    own = own_slices(engine, context)
    on_cuda = context.device.type == "cuda"
    values = buffer.of_size(len(KINDS) * sum(each.length for each in own), on_cuda)
    offset = 0
    for kind in KINDS:
        for each in own:
            live, target = each.values(kind), values.narrow(0, offset, each.length)
            target.zero_() if live is None else target.copy_(live, non_blocking=on_cuda)
            offset += each.length
    if on_cuda:
        torch.cuda.synchronize(context.device)
    file, steps = rank_file(context.rank), _steps(own)
    parameters = {
        each.part.name: StoredParameter(
            each.part.shape,
            steps[id(each.source.adam)],
            (StoredSlice(file, each.part.block, each.start, each.length),),
        )
        for each in own
    }
    return Snapshot(context.rank, parameters, values)


def _steps(own: list[OwnSlice]) -> dict[int, int]:
    """Step counts by AdamW state: many slices share one, and reading it waits for the device."""
    states = {id(each.source.adam): each.source.adam for each in own}
    return {key: int(state["step"]) if state else 0 for key, state in states.items()}


def write_snapshot(snapshot: Snapshot, path: Path, abandoned: threading.Event) -> None:
    """Write and fsync this rank's file in the directory `path`, then the file beside it that says so.

    Raises:
        OSError: with the file's name, as when the disk is full.
        Abandoned: that was set meanwhile.
    """
    file = path / rank_file(snapshot.rank)
    digest, size = hashlib.sha256(), 0
    content = snapshot.values.view(torch.uint8).numpy().data
    with open(file, "wb", buffering=0) as output:
        try:
            for chunk in (memoryview(_header(snapshot)), *_chunks(content)):
                if abandoned.is_set():
                    raise Abandoned
                digest.update(chunk)
                size += len(chunk)
                _write_all(output.fileno(), chunk)
            os.fsync(output.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from None  # a write does not know its file
    sidecar = {
        "file": asdict(StoredFile(size, digest.hexdigest())),
        "parameters": {name: asdict(parameter) for name, parameter in snapshot.parameters.items()},
    }
    write_text_atomically(sidecar_of(path, snapshot.rank), json.dumps(sidecar))


def _header(snapshot: Snapshot) -> bytes:
    """The head of a safetensors file: the length of a JSON object in 8 bytes, and that object.

    Written here because the safetensors package copies every tensor before it writes, and cannot hash.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for kind in KINDS:
        for name, parameter in snapshot.parameters.items():
            (own,) = parameter.slices
            end = offset + 4 * own.length
            entries[tensor_key(kind, name)] = {
                "dtype": "F32",
                "shape": [own.length],
                "data_offsets": [offset, end],
            }
            offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(content: Any) -> Iterator[memoryview]:
    for start in range(0, len(content), CHUNK):
        yield content[start : start + CHUNK]


def _write_all(descriptor: int, content: memoryview) -> None:
    """A write to a nearly full disk may take a part of it without an error; the next then says why."""
    left = content
    while left:
        left = left[os.write(descriptor, left) :]


def join_parts(
    path: Path, world_size: int, about: About, timeout: float, abandoned: threading.Event
) -> dict[str, StoredFile]:
    """Wait for what every rank writes and join their indices (rank 0).

    Returns:
        Every file of the checkpoint, for `declare_complete`.

    Raises:
        UserError: a rank did not come within `timeout` seconds; it is named.
        Abandoned: that was set meanwhile.
    """
    deadline = time.monotonic() + timeout
    sidecars = []
    for rank in range(world_size):
        while not sidecar_of(path, rank).is_file():
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {rank} has not written its part of {path} within {timeout:.0f} s "
                    "(parallel.timeout_seconds); look for its own error, and at the file system"
                )
            if abandoned.wait(POLL_SECONDS):
                raise Abandoned
        sidecars.append(read_sidecar(sidecar_of(path, rank)))
    files = {rank_file(rank): file for rank, (file, _) in enumerate(sidecars)}
    parameters = merged(path, [parameters for _, parameters in sidecars])
    for name, text in ((PARAMETERS, index_json(parameters)), (ABOUT, about_json(about))):
        write_text_atomically(path / name, text)
        files[name] = StoredFile(len(text.encode()), hashlib.sha256(text.encode()).hexdigest())
    for rank in range(world_size):
        sidecar_of(path, rank).unlink()
    return files


def declare_complete(path: Path, files: Mapping[str, StoredFile]) -> None:
    """Write COMPLETE, durably and after everything else (rank 0)."""
    _fsync_directory(path)
    write_text_atomically(path / MARKER, marker_json(files))
    _fsync_directory(path)  # older checkpoints may go only once this one cannot be lost


def sidecar_of(path: Path, rank: int) -> Path:
    """Where a rank says that its file in the checkpoint `path` is written, and what is in it."""
    return path / f"rank_{rank:05d}.written"


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
