"""Writing a checkpoint: a snapshot in host memory at a step boundary, then files, without any collective.

    snapshot = take_snapshot(engine, context, buffer)    # at a step boundary: copies, nothing else
    write_snapshot(snapshot, path, abandoned)            # file work only: in the background of training
    files = join_parts(path, world_size, about, timeout, abandoned)    # rank 0: waits for the others' files
    declare_complete(path, files)                        # rank 0: from then on the checkpoint counts

Each rank writes one safetensors file with the slices that its optimizer owns, hashed while writing and made
durable, and then a sidecar: a small file that states its size and hash. Nothing is gathered, and no element
is written twice: the first tensor-parallel rank writes replicated parameters, and at ZeRO stage 0 the
data-parallel ranks share the writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data_pipeline.io.files import naming, replace_file, sync_directory
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
    entries_json,
    merged,
    rank_file,
    read_sidecar,
    safetensors_header,
    tensor_key,
)
from pretrain.checkpoint.slices import Slice, slices_of_rank
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.directory import MARKER, write_text_atomically

CHUNK = 2**24
"""Number of bytes that are hashed and written at a time."""
POLL_SECONDS = 0.05


class Abandoned(Exception):
    """A save that was cancelled while it was being written."""


class HostBuffer:
    """Host memory for one rank's snapshot, kept from one save to the next; pinned for CUDA."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of_size(self, elements: int, pinned: bool) -> torch.Tensor:
        """Return fp32 `[elements]`, with any content."""
        if self._memory.numel() != elements:
            self._memory = torch.empty(0)  # free the old memory before allocating the new
            self._memory = torch.empty(elements, pin_memory=pinned)
        return self._memory


@dataclass(frozen=True)
class OwnSlice:
    """A slice that this rank writes: elements of a logical parameter's block, and their live source."""

    part: Part
    start: int
    source: Slice
    source_start: int
    length: int

    def values(self, kind: str) -> torch.Tensor | None:
        """Return a view `[length]` of the live values; None, for zeros, before AdamW has any state."""
        live = self.source.master if kind == "master" else self.source.moment(kind)
        return None if live is None else live.narrow(0, self.source_start, self.length)


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a checkpoint, in host memory.

    `values`: fp32, in the order of the file: all masters, all first moments, all second moments.
    """

    rank: int
    parameters: Mapping[str, StoredParameter]
    values: torch.Tensor


def own_slices(engine: Any, context: ParallelContext) -> list[OwnSlice]:
    """Return the slices that this rank writes; all ranks' slices together are every element once."""
    parts = parts_of_rank(
        engine.module.inventory, context.tensor_parallel_rank, context.tensor_parallel_size
    )
    own = []
    for source in slices_of_rank(engine):
        for part, start, source_start, length in overlaps(
            source.start, source.length, parts[source.name]
        ):
            if not part.replicated or context.tensor_parallel_rank == 0:
                own.append(OwnSlice(part, start, source, source_start, length))
    if engine.zero_optimization_stage() == 0:  # all data-parallel ranks have the same slices
        own = list(_share(own, context.data_parallel_rank, context.data_parallel_size))
    return own


def _share(slices: list[OwnSlice], rank: int, size: int) -> Iterator[OwnSlice]:
    """Yield the elements of share `rank` of `size` equal shares."""
    total, offset = sum(own.length for own in slices), 0
    for own in slices:
        first = max(total * rank // size - offset, 0)
        last = min(total * (rank + 1) // size - offset, own.length)
        if first < last:
            yield OwnSlice(
                own.part, own.start + first, own.source, own.source_start + first, last - first
            )
        offset += own.length


def take_snapshot(engine: Any, context: ParallelContext, buffer: HostBuffer) -> Snapshot:
    """Copy this rank's slices into `buffer`, after which training may change the live values."""
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
    """Return the step count of each AdamW state, read once: a read waits for the device."""
    states = {id(each.source.adam): each.source.adam for each in own}
    return {key: int(state["step"]) if state else 0 for key, state in states.items()}


def write_snapshot(
    snapshot: Snapshot,
    path: Path,
    abandoned: threading.Event,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Write and fsync this rank's file in the directory `path`, then the file's sidecar.

    `moved`: called before each piece of the file. Raises OSError: names the file, as when the disk is full;
    Abandoned: the event was set meanwhile.
    """
    file = path / rank_file(snapshot.rank)
    digest, size = hashlib.sha256(), 0
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
        os.fsync(output.fileno())
    sidecar = {
        "file": asdict(StoredFile(size, digest.hexdigest())),
        "parameters": {name: asdict(parameter) for name, parameter in snapshot.parameters.items()},
    }
    write_text_atomically(sidecar_of(path, snapshot.rank), json.dumps(sidecar))


def _header(snapshot: Snapshot) -> bytes:
    lengths = {name: parameter.slices[0].length for name, parameter in snapshot.parameters.items()}
    tensors = (
        (tensor_key(kind, name), "F32", (length,), 4 * length)
        for kind in KINDS
        for name, length in lengths.items()
    )
    return safetensors_header(tensors, {"format": "pt"})


def join_parts(
    path: Path, world_size: int, about: About, timeout: float, abandoned: threading.Event
) -> dict[str, StoredFile]:
    """Wait for every rank's file, and write the index of all of them and checkpoint.json (rank 0).

    Returns every file of the checkpoint, for `declare_complete`. Raises UserError: names a rank that did not
    write its file within `timeout` seconds; Abandoned: the event was set meanwhile.
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
    for name, text in ((PARAMETERS, entries_json(parameters)), (ABOUT, about_json(about))):
        write_text_atomically(path / name, text)
        files[name] = StoredFile(len(text.encode()), hashlib.sha256(text.encode()).hexdigest())
    for rank in range(world_size):
        sidecar_of(path, rank).unlink()
    return files


def declare_complete(path: Path, files: Mapping[str, StoredFile]) -> None:
    """Write COMPLETE, durably and after everything else (rank 0)."""
    sync_directory(path)
    replace_file(
        path / MARKER, entries_json(files).encode()
    )  # durable: older checkpoints may go then


def sidecar_of(path: Path, rank: int) -> Path:
    """Return the path of a rank's sidecar, which states that the rank's file is complete, and its content."""
    return path / f"rank_{rank:05d}.written"
