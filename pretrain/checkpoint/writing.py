"""Writing a checkpoint: a snapshot in host memory at a step boundary, then files.

    snapshot = take_snapshot(engine, context, buffer)    # at a step boundary: copies only
    write_snapshot(snapshot, path, abandoned)            # files only, in the background of training
    files = join_parts(path, world_size, ...)            # rank 0: waits for the others' files
    declare_complete(path, files)                        # rank 0: then the checkpoint counts

No function here calls a collective. Each rank writes one safetensors file with the slices that its
optimizer owns, hashes it while writing and makes it durable, and then writes a sidecar, a small
file with its size and hash. Nothing is gathered, and no element is written twice: the first
tensor-parallel rank writes replicated parameters, and at ZeRO stage 0 the data-parallel ranks share
the writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_pipeline.io.files import naming, replace_file, sync_directory, write_text_atomically
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
from pretrain.ranks.idle import AwakeTime
from pretrain.runs.directory import MARKER
from pretrain.runs.removal import remove_file

CHUNK = 2**24
"""Number of bytes that are hashed and written at a time."""
SYNCED = 2**28
"""Bytes between two fsyncs of a file; a single one at the end would hide that a slow disk works."""
POLL_SECONDS = 0.05


class Abandoned(Exception):
    """Error that ends a save which is cancelled while it is written."""


class HostBuffer:
    """Host memory for one rank's snapshot, reused by every save; pinned for CUDA."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of_size(self, elements: int, pinned: bool) -> torch.Tensor:
        """Return fp32 `[elements]`, uninitialised.

        Args:
            pinned: Page-locked memory, for a source on a GPU.
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
        rank: Number of the rank that took the snapshot.
        parameters: {logical name: the single slice that this rank writes of the parameter}.
        values: Values in fp32, in the order of the file (`file_order`).
    """

    rank: int
    parameters: Mapping[str, StoredParameter]
    values: torch.Tensor


def file_order(parameters: Mapping[str, StoredParameter]) -> Iterator[tuple[str, str]]:
    """Yield (kind, logical name) in the order of a rank's file: masters first, then by state."""
    kinds = dict.fromkeys(kind for parameter in parameters.values() for kind in parameter.kinds)
    for kind in kinds:
        for name, parameter in parameters.items():
            if kind in parameter.kinds:
                yield kind, name


def own_slices(engine: Any, context: ParallelContext) -> list[OwnSlice]:
    """Return the slices that this rank writes; every element is in the slices of one rank only.

    Args:
        engine: A deepspeed.DeepSpeedEngine.
    """
    slices = _of_parts(slices_of_rank(engine), engine, context)
    if engine.zero_optimization_stage() == 0:  # all data-parallel ranks have the same slices
        slices = list(_share(slices, context.data_parallel_rank, context.data_parallel_size))
    if context.data_parallel_rank == 0:
        slices += _of_parts(kept_slices(engine.module), engine, context)
    return slices


def _of_parts(sources: Iterable[Slice], engine: Any, context: ParallelContext) -> list[OwnSlice]:
    """Split slices by the parts of their tensors; only one rank gets replicated parts."""
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
    total = sum(part.length for part in slices)
    offset = 0
    for part in slices:
        first = max(total * rank // size - offset, 0)
        last = min(total * (rank + 1) // size - offset, part.length)
        if first < last:
            yield replace(
                part,
                start=part.start + first,
                source_start=part.source_start + first,
                length=last - first,
            )
        offset += part.length


def take_snapshot(engine: Any, context: ParallelContext, buffer: HostBuffer) -> Snapshot:
    """Copy this rank's slices; afterwards training may change the live values.

    Args:
        engine: A deepspeed.DeepSpeedEngine.
        buffer: Memory for the copies.
    """
    slices = {owned.part.name: owned for owned in own_slices(engine, context)}
    # Reading a step count waits for the device, so each of the optimizer's states is read once.
    counts = {id(owned.source.state): owned.source.step for owned in slices.values()}
    steps = {state: None if count is None else int(count) for state, count in counts.items()}
    file = rank_file(context.rank)
    parameters = {
        name: StoredParameter(
            shape=owned.part.shape,
            step=steps[id(owned.source.state)],
            slices=(StoredSlice(file, owned.part.block, owned.start, owned.length),),
            states=owned.source.states,
        )
        for name, owned in slices.items()
    }
    order = list(file_order(parameters))
    on_cuda = context.device.type == "cuda"
    values = buffer.of_size(sum(slices[name].length for _, name in order), on_cuda)
    offset = 0
    for kind, name in order:
        target = values.narrow(0, offset, slices[name].length)
        target.copy_(slices[name].values(kind), non_blocking=on_cuda)
        offset += slices[name].length
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
        path: The checkpoint's directory, which exists.
        abandoned: Set by another thread to end the writing soon.
        moved: Called before each chunk of the file.

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
            while chunk:  # a write to a nearly full disk may end early without an error
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
    """Wait for every rank's file, then write the joint index and checkpoint.json (rank 0).

    Args:
        path: The checkpoint's directory.
        world_size: Number of ranks that write.
        about: Content of checkpoint.json.
        timeout: Seconds within which every rank has to write its file.
        abandoned: Set by another thread to end the waiting soon.

    Returns:
        {name: size and SHA-256} of every file, for `declare_complete`.

    Raises:
        UserError: names a rank that did not write its file in time.
        Abandoned: the event was set meanwhile.
    """
    waited = AwakeTime(timeout)
    parts = []
    for rank in range(world_size):
        while not sidecar_of(path, rank).is_file():
            if waited.look() > timeout:
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
        path: The checkpoint's directory.
        files: Every other file of the checkpoint.
    """
    for directory in (path, path.parent):  # the files' names, and the new directory's own
        sync_directory(directory)
    # The marker must be durable, because older checkpoints may be removed from now on.
    replace_file(path / MARKER, entries_json(files).encode())


def sidecar_of(path: Path, rank: int) -> Path:
    """Return the path of a rank's sidecar.

    Args:
        path: The checkpoint's directory.
        rank: The rank whose file is complete once the sidecar exists.
    """
    return path / f"rank_{rank:05d}.written"
