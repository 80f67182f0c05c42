"""Writing a checkpoint: a snapshot in host memory at a step boundary, then files.

    snapshot = take_snapshot(engine, context, buffer)    # at a step boundary: copies, nothing else
    write_snapshot(snapshot, path, abandoned)            # files only: in the background of training
    files = join_parts(path, world_size, ...)            # rank 0: waits for the others' files
    declare_complete(path, files)                        # rank 0: then the checkpoint counts

No function here calls a collective. Each rank writes one safetensors file with the slices that its
optimizer owns, hashed while writing and made durable, and then a sidecar: a small file that states
its size and hash. Nothing is gathered, and no element is written twice: the first tensor-parallel
rank writes replicated parameters, and at ZeRO stage 0 the data-parallel ranks share the writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_pipeline.io.files import naming, replace_file, sync_directory
from megatron_patches.recipe.optimizers import FP32
from pretrain.checkpoint.blocks import Part, overlaps, parts_of_rank
from pretrain.checkpoint.format import (
    ABOUT,
    PARAMETERS,
    About,
    Sidecar,
    StoredFile,
    StoredParameter,
    StoredSlice,
    about_json,
    entries_json,
    merged,
    rank_file,
    read_sidecar,
    safetensors_header,
    tensor_key,
)
from pretrain.checkpoint.slices import Slice, kept_slices, slices_of_rank
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.directory import MARKER, write_text_atomically
from pretrain.runs.removal import remove_file

CHUNK = 2**24
"""Number of bytes that are hashed and written at a time."""
SYNCED = 2**28
"""Bytes after which a file is made durable so far: else a slow file system would take all of it at
the end, without a sign that it takes any."""
POLL_SECONDS = 0.05


class Abandoned(Exception):
    """A save that was cancelled while it was being written."""


class HostBuffer:
    """Host memory for one rank's snapshot, kept from one save to the next; pinned for CUDA."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of_size(self, elements: int, pinned: bool) -> torch.Tensor:
        """Return fp32 `[elements]`, with any content.

        Args:
            elements: of the snapshot.
            pinned: the source is on a GPU.
        """
        if self._memory.numel() != elements:
            self._memory = torch.empty(0)  # free the old memory before allocating the new
            self._memory = torch.empty(elements, pin_memory=pinned)
        return self._memory


@dataclass(frozen=True)
class OwnSlice:
    """A slice that this rank writes: elements of a block, and their live source."""

    part: Part
    start: int
    source: Slice
    source_start: int
    length: int

    def values(self, kind: str) -> torch.Tensor:
        """Return a view `[length]` of the live values of a kind."""
        return self.source.values(kind).narrow(0, self.source_start, self.length)


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a checkpoint, in host memory.

    Attributes:
        rank: that took it.
        parameters: {logical name: the one slice that this rank writes of the parameter}.
        values: fp32, in the order of the file (`file_order`).
    """

    rank: int
    parameters: Mapping[str, StoredParameter]
    values: torch.Tensor


def file_order(parameters: Mapping[str, StoredParameter]) -> Iterator[tuple[str, str]]:
    """Yield (kind, logical name) as a rank's file has them: all masters, then state by state."""
    kinds = dict.fromkeys(kind for parameter in parameters.values() for kind in parameter.kinds)
    for kind in kinds:
        for name, parameter in parameters.items():
            if kind in parameter.kinds:
                yield kind, name


def own_slices(engine: Any, context: ParallelContext) -> list[OwnSlice]:
    """Return the slices that this rank writes; all ranks' slices together are every element once.

    Args:
        engine: a deepspeed.DeepSpeedEngine.
        context: this rank's place in the layout.
    """
    own = _of_parts(slices_of_rank(engine), engine, context)
    if engine.zero_optimization_stage() == 0:  # all data-parallel ranks have the same slices
        own = list(_share(own, context.data_parallel_rank, context.data_parallel_size))
    if context.data_parallel_rank == 0:
        own += _of_parts(kept_slices(engine.module), engine, context)
    return own


def _of_parts(sources: Iterable[Slice], engine: Any, context: ParallelContext) -> list[OwnSlice]:
    """Return slices by the parts of their tensors, replicated ones on one rank alone."""
    parts = parts_of_rank(
        engine.module.inventory, context.tensor_parallel_rank, context.tensor_parallel_size
    )
    return [
        OwnSlice(part, start, source, source_start, length=length)
        for source in sources
        for part, start, source_start, length in overlaps(
            source.start, source.length, parts[source.name]
        )
        if not part.replicated or context.tensor_parallel_rank == 0
    ]


def _share(slices: list[OwnSlice], rank: int, size: int) -> Iterator[OwnSlice]:
    """Yield the elements of share `rank` of `size` equal shares."""
    total = sum(own.length for own in slices)
    offset = 0
    for own in slices:
        first = max(total * rank // size - offset, 0)
        last = min(total * (rank + 1) // size - offset, own.length)
        if first < last:
            yield replace(
                own,
                start=own.start + first,
                source_start=own.source_start + first,
                length=last - first,
            )
        offset += own.length


def take_snapshot(engine: Any, context: ParallelContext, buffer: HostBuffer) -> Snapshot:
    """Copy this rank's slices, after which training may change the live values.

    Args:
        engine: a deepspeed.DeepSpeedEngine.
        context: this rank's place in the layout.
        buffer: that holds the copies.
    """
    own = {each.part.name: each for each in own_slices(engine, context)}
    # Once for each state of the optimizer: to read a step count is to wait for the device.
    counts = {id(each.source.state): each.source.step for each in own.values()}
    steps = {state: None if count is None else int(count) for state, count in counts.items()}
    file = rank_file(context.rank)
    parameters = {
        name: StoredParameter(
            shape=each.part.shape,
            step=steps[id(each.source.state)],
            slices=(StoredSlice(file, each.part.block, each.start, each.length),),
            states=each.source.states,
        )
        for name, each in own.items()
    }
    order = list(file_order(parameters))
    on_cuda = context.device.type == "cuda"
    values = buffer.of_size(sum(own[name].length for _, name in order), on_cuda)
    offset = 0
    for kind, name in order:
        target = values.narrow(0, offset, own[name].length)
        target.copy_(own[name].values(kind), non_blocking=on_cuda)
        offset += own[name].length
    if on_cuda:
        torch.cuda.synchronize(context.device)
    return Snapshot(context.rank, parameters, values)


def write_snapshot(
    snapshot: Snapshot,
    path: Path,
    abandoned: threading.Event,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Write and fsync this rank's file in a checkpoint's directory, then the file's sidecar.

    Args:
        snapshot: of this rank.
        path: the directory, which is there.
        abandoned: set by another thread to end the writing soon.
        moved: called before each chunk of the file.

    Raises:
        OSError: names the file, as when the disk is full.
        Abandoned: the event was set meanwhile.
    """
    file = path / rank_file(snapshot.rank)
    digest = hashlib.sha256()
    size = 0
    durable = 0
    content = snapshot.values.view(torch.uint8).numpy().data
    with naming(file), open(file, "wb", buffering=0) as output:
        chunks = (content[start : start + CHUNK] for start in range(0, len(content), CHUNK))
        for chunk in (memoryview(_header(snapshot)), *chunks):
            if abandoned.is_set():
                raise Abandoned
            moved()
            digest.update(chunk)
            size += len(chunk)
            while chunk:  # one write to a nearly full disk may write a part of it without an error
                chunk = chunk[output.write(chunk) :]
            if size - durable >= SYNCED:
                os.fsync(output.fileno())
                durable = size
        os.fsync(output.fileno())
    sidecar = Sidecar(StoredFile(size, digest.hexdigest()), dict(snapshot.parameters))
    write_text_atomically(sidecar_of(path, snapshot.rank), json.dumps(asdict(sidecar)))


def _header(snapshot: Snapshot) -> bytes:
    lengths = {name: parameter.slices[0].length for name, parameter in snapshot.parameters.items()}
    tensors = (
        (tensor_key(kind, name), "F32", (lengths[name],), FP32 * lengths[name])
        for kind, name in file_order(snapshot.parameters)
    )
    return safetensors_header(tensors, {"format": "pt"})


def join_parts(
    path: Path,
    world_size: int,
    about: About,
    *,
    timeout: float,
    abandoned: threading.Event,
) -> dict[str, StoredFile]:
    """Wait for every rank's file, and write the index of all of them and checkpoint.json (rank 0).

    Args:
        path: the checkpoint's directory.
        world_size: number of ranks that write.
        about: content of checkpoint.json.
        timeout: seconds in which every rank has to write its file.
        abandoned: set by another thread to end the waiting soon.

    Returns:
        Every file of the checkpoint, for `declare_complete`.

    Raises:
        UserError: names a rank that did not write its file in time.
        Abandoned: the event was set meanwhile.
    """
    deadline = time.monotonic() + timeout
    parts = []
    for rank in range(world_size):
        while not sidecar_of(path, rank).is_file():
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {rank} has not written its part of {path} within {timeout:.0f} s "
                    "(parallel.timeout_seconds); look for its own error, and at the file system",
                    passing=True,
                )
            if abandoned.wait(POLL_SECONDS):
                raise Abandoned
        parts.append(read_sidecar(sidecar_of(path, rank)))
    files = {rank_file(rank): part.file for rank, part in enumerate(parts)}
    parameters = merged(path, [part.parameters for part in parts])
    for name, text in ((PARAMETERS, entries_json(parameters)), (ABOUT, about_json(about))):
        write_text_atomically(path / name, text)
        files[name] = StoredFile(len(text.encode()), hashlib.sha256(text.encode()).hexdigest())
    for rank in range(world_size):
        remove_file(sidecar_of(path, rank))
    return files


def declare_complete(path: Path, files: Mapping[str, StoredFile]) -> None:
    """Write COMPLETE, durably and after everything else (rank 0).

    Args:
        path: the checkpoint's directory.
        files: every other file in it.
    """
    for directory in (path, path.parent):  # the names in it, and its own, which is new
        sync_directory(directory)
    # Durable, because older checkpoints may be removed from then on.
    replace_file(path / MARKER, entries_json(files).encode())


def sidecar_of(path: Path, rank: int) -> Path:
    """Return the path of a rank's sidecar.

    Args:
        path: the checkpoint's directory.
        rank: whose file is complete once the sidecar is there.
    """
    return path / f"rank_{rank:05d}.written"
