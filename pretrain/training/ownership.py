"""Owners of Muon's matrices, and the exchange of their pieces between ranks.

Every matrix has one owner among all ranks. In an update the owner gets the pieces of it that other
ranks hold (rows or columns by tensor parallelism, ranges by ZeRO), and sends back what became of
them. Where data-parallel ranks hold the same (ZeRO stage 0), the owner gets the pieces of its own
replica, and every replica gets the update.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.errors import MethodError
from megatron_patches.recipe.matrices import AT_A_TIME, Stack, runs, stacks
from megatron_patches.recipe.parts import Tensor
from pretrain.checkpoint.slices import Slice
from pretrain.ranks.groups import ParallelContext
from pretrain.training.orthogonalise import Copy, joined, newton_schulz


@dataclass(frozen=True)
class Matrix:
    """A matrix of the model.

    Attributes:
        tensor: name of its tensor.
        stack: it is one of these.
        shares: pieces that follow each other where tensor parallelism cuts its columns; else 1.
    """

    tensor: str
    stack: Stack
    shares: int

    @property
    def elements(self) -> int:
        """Return its elements."""
        return self.stack.rows * self.stack.columns

    @property
    def flops(self) -> int:
        """Return the FLOPs of one Newton-Schulz iteration."""
        return self.stack.flops(1) // self.stack.count


@dataclass(frozen=True)
class Piece:
    """Elements of a matrix in a rank's optimizer.

    Attributes:
        matrix: its number.
        start: first element in the flattened matrix.
        length: elements.
        flat: number of the optimizer's flat tensor in its group.
        at: first element there.
    """

    matrix: int
    start: int
    length: int
    flat: int
    at: int


@dataclass(frozen=True)
class Holding:
    """A rank's pieces of the matrices of one parameter group."""

    data_parallel_rank: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Chunk:
    """Equal matrices that one rank orthogonalises at a time.

    Attributes:
        numbers: of the matrices.
        like: one of them.
        incoming: copies of their pieces from what was received.
        outgoing: copies to what is sent back.
    """

    numbers: tuple[int, ...]
    like: Matrix
    incoming: tuple[Copy, ...]
    outgoing: tuple[Copy, ...]


def matrices_of(inventory: Iterable[Tensor], size: int) -> tuple[list[Matrix], dict[Any, int]]:
    """Return the matrices of tensors, and the number of the first of each (tensor, stack).

    Args:
        inventory: the tensors that Muon takes.
        size: tensor-parallel size.
    """
    matrices: list[Matrix] = []
    first = {}
    for tensor in inventory:
        for number, stack in enumerate(stacks(tensor)):
            first[tensor.name, number] = len(matrices)
            one = Matrix(tensor.name, stack, size if tensor.cut == 1 else 1)
            matrices += [one] * stack.count
    return matrices, first


def pieces_of(
    own: Iterable[Slice],
    inventory: Iterable[Tensor],
    flats: Sequence[torch.Tensor],
    context: ParallelContext,
) -> tuple[Piece, ...]:
    """Return what this rank has of the matrices in one parameter group, in order of the matrices.

    Args:
        own: slices of this rank's optimizer.
        inventory: the tensors that Muon takes.
        flats: parameters of the group, as the optimizer has them.
        context: this rank's place in the layout.
    """
    rank, size = context.tensor_parallel_rank, context.tensor_parallel_size
    tensors = {tensor.name: tensor for tensor in inventory}
    _, first = matrices_of(tensors.values(), size)
    number = {id(flat): index for index, flat in enumerate(flats)}
    found = []
    for each in own:
        if id(each.flat) not in number or each.name not in tensors:
            continue
        for run in runs(tensors[each.name], rank, size):
            begins = max(run.rank_start, each.start)
            length = min(run.rank_start + run.length, each.start + each.length) - begins
            if length > 0:
                found.append(
                    Piece(
                        matrix=first[each.name, run.stack] + run.matrix,
                        start=run.start + begins - run.rank_start,
                        length=length,
                        flat=number[id(each.flat)],
                        at=each.offset + begins - each.start,
                    )
                )
    return tuple(sorted(found, key=lambda piece: (piece.matrix, piece.start)))


def owners_of(matrices: Sequence[Matrix], held: Sequence[Holding]) -> dict[int, int]:
    """Return {number of a matrix: its owner}, so that all ranks multiply about equally much.

    The largest go first: each to the rank that has most of it and whose part of the work is not
    full yet, or else to the one with the least work.

    Args:
        matrices: of the model.
        held: what each rank has.
    """
    has: dict[int, Counter[int]] = defaultdict(Counter)
    for rank, holding in enumerate(held):
        for piece in holding.pieces:
            has[piece.matrix][rank] += piece.length
    work = [0] * len(held)
    part = sum(matrices[number].flops for number in has) / len(held)
    owners = {}
    for number in sorted(has, key=lambda number: (-matrices[number].flops, number)):
        flops = matrices[number].flops
        # Replicas hold equally much: the one with less work comes first.
        ranks = sorted(range(len(held)), key=lambda rank: (-has[number][rank], work[rank], rank))
        roomy = (rank for rank in ranks if work[rank] + flops <= part)
        owner = next(roomy, min(ranks, key=lambda rank: work[rank]))
        owners[number] = owner
        work[owner] += flops
    return owners


class Exchange:
    """The way of a parameter group's matrices to their owners and back.

    Args:
        matrices: of the model.
        held: what each rank has of the group.
        rank: this one.
        replicated: data-parallel ranks hold the same.
        factors: of each matrix's update.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        held: Sequence[Holding],
        rank: int,
        replicated: bool,
        factors: Sequence[float],
    ) -> None:
        self.matrices = matrices
        owners = owners_of(matrices, held)
        ranks = range(len(held))

        def of_owner(holder: int, owner: int) -> list[Piece]:
            return [piece for piece in held[holder].pieces if owners[piece.matrix] == owner]

        def to_owner(holder: int, owner: int) -> list[Piece]:
            replicas = {held[one].data_parallel_rank for one in (holder, owner)}
            return [] if replicated and len(replicas) > 1 else of_owner(holder, owner)

        sent = [to_owner(rank, owner) for owner in ranks]
        received = [to_owner(holder, rank) for holder in ranks]
        answers = [of_owner(holder, rank) for holder in ranks]
        answered = [of_owner(rank, owner) for owner in ranks]
        self.sent = _lengths(sent)
        self.received = _lengths(received)
        self.answers = _lengths(answers)
        self.answered = _lengths(answered)
        self.alone = len(held) == 1
        if self.alone:
            where = [(piece, piece.flat, piece.at) for piece in held[0].pieces]
            self.packed = self.unpacked = []
            self.chunks = _chunks(matrices, where, where, factors=factors)
            return
        self.packed = joined(_in_order(sent))
        self.unpacked = joined(_in_order(answered, factors))
        self.chunks = _chunks(matrices, _places(received), _places(answers), factors=None)

    @property
    def owned(self) -> int:
        """Return how many matrices this rank orthogonalises."""
        return sum(len(chunk.numbers) for chunk in self.chunks)

    def orthogonalise(
        self, flats: list[torch.Tensor], steps: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Replace flat tensors' matrices by the updates that follow from them (collective).

        Args:
            flats: one-dimensional, of this rank; overwritten.
            steps: Newton-Schulz iterations.
            dtype: of them, and of what is sent.

        Returns:
            The Frobenius norm of each owned matrix, orthogonalised and without its factor, a tensor
            for each chunk.
        """
        if self.alone:
            return self._orthogonalise(flats, flats, steps, dtype=dtype)
        device = flats[0].device
        sent = torch.empty(sum(self.sent), dtype=dtype, device=device)
        for copy in self.packed:
            copy.of_buffer(sent).copy_(copy.of_tensor(flats))
        received = _exchanged(sent, self.sent, self.received)
        del sent  # what is not needed any more makes room for what comes
        answers = torch.empty(sum(self.answers), dtype=dtype, device=device)
        norms = self._orthogonalise([received], [answers], steps, dtype=dtype)
        del received
        answered = _exchanged(answers, self.answers, self.answered)
        for copy in self.unpacked:
            copy.of_tensor(flats).copy_(copy.of_buffer(answered)).mul_(copy.scale)
        return norms

    def _orthogonalise(
        self,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        steps: int,
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """Orthogonalise the owned matrices of `inputs` into `outputs`, a chunk at a time."""
        norms = []
        for chunk in self.chunks:
            stack, shares = chunk.like.stack, chunk.like.shares
            count = len(chunk.numbers)
            buffer = inputs[0].new_empty(count * chunk.like.elements, dtype=dtype)
            for copy in chunk.incoming:
                copy.of_buffer(buffer).copy_(copy.of_tensor(inputs))
            x = buffer.view(count, stack.rows, stack.columns)
            if shares > 1:
                x = buffer.view(count, shares, stack.rows, -1).transpose(1, 2).reshape_as(x)
            x = newton_schulz(x, steps)
            norms.append(torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float32))
            if shares > 1:
                x = x.reshape(count, stack.rows, shares, -1).transpose(1, 2)
            flat = x.reshape(-1)
            for copy in chunk.outgoing:
                target = copy.of_tensor(outputs).copy_(copy.of_buffer(flat))
                if copy.scale != 1.0:
                    target.mul_(copy.scale)
        return norms


def check_groups(held: Sequence[Sequence[Holding]], matrices: Sequence[Matrix]) -> None:
    """Refuse parameter groups that differ between ranks, and matrices that are in no group.

    Args:
        held: what each rank has, for each group of Muon.
        matrices: of the model.

    Raises:
        MethodError: ranks would wait for each other, or a matrix would never move.
    """
    groups = [
        {piece.matrix for holding in one for piece in holding.pieces}
        for one in zip(*held, strict=False)
    ]
    if len({len(one) for one in held}) > 1 or sum(map(len, groups)) != len(set().union(*groups)):
        raise MethodError(
            "optimizer.kind=muon: some tensor-parallel ranks hold no weight of a parameter group; "
            "give queries and keys the learning rate of the other matrices, or use kind adamw"
        )
    elements: Counter[int] = Counter()
    for piece in (piece for one in held for holding in one for piece in holding.pieces):
        elements[piece.matrix] += piece.length
    left = sum(elements[number] < one.elements for number, one in enumerate(matrices))
    if left or not matrices:
        raise MethodError(
            f"optimizer.kind=muon would leave {left} of {len(matrices)} matrices of the layers as "
            "they are, so training was stopped before step 1"
        )


def _exchanged(sent: torch.Tensor, own: list[int], others: list[int]) -> torch.Tensor:
    """Return what all ranks have sent here (collective)."""
    received = sent.new_empty(sum(others))
    dist.all_to_all_single(received, sent, output_split_sizes=others, input_split_sizes=own)
    return received


def _lengths(pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """Return the elements of each rank's pieces."""
    return [sum(piece.length for piece in own) for own in pieces]


def _in_order(
    pieces: Sequence[Sequence[Piece]], factors: Sequence[float] | None = None
) -> Iterable[Copy]:
    """Yield copies between a rank's own tensors and a buffer with the pieces in order."""
    at = 0
    for piece in (piece for own in pieces for piece in own):
        scale = 1.0 if factors is None else factors[piece.matrix]
        yield Copy(piece.flat, piece.at, at, length=piece.length, scale=scale)
        at += piece.length


def _places(pieces: Sequence[Sequence[Piece]]) -> list[tuple[Piece, int, int]]:
    """Return (piece, 0, first element) of pieces that follow each other in one buffer."""
    flat = [piece for own in pieces for piece in own]
    starts = accumulate((piece.length for piece in flat), initial=0)
    return [(piece, 0, start) for piece, start in zip(flat, starts, strict=False)]


def _chunks(
    matrices: Sequence[Matrix],
    inputs: Sequence[tuple[Piece, int, int]],
    outputs: Sequence[tuple[Piece, int, int]],
    factors: Sequence[float] | None,
) -> list[Chunk]:
    """Return the chunks of the matrices of `inputs`, equal ones together."""
    kinds: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number in sorted({piece.matrix for piece, _, _ in inputs}):
        one = matrices[number]
        kinds[one.stack.rows, one.stack.columns, one.shares].append(number)
    chunks = []
    for numbers in kinds.values():
        like = matrices[numbers[0]]
        most = max(1, AT_A_TIME // like.elements)
        for first in range(0, len(numbers), most):
            some = tuple(numbers[first : first + most])
            place = {number: index * like.elements for index, number in enumerate(some)}
            copies = [_into(place, each, factors) for each in (inputs, outputs)]
            chunks.append(Chunk(some, like, *copies))
    return chunks


def _into(
    place: dict[int, int],
    pieces: Sequence[tuple[Piece, int, int]],
    factors: Sequence[float] | None,
) -> tuple[Copy, ...]:
    """Return the copies of pieces into a chunk whose matrices begin at these places."""
    found = [
        Copy(
            tensor,
            at,
            place[piece.matrix] + piece.start,
            length=piece.length,
            scale=1.0 if factors is None else factors[piece.matrix],
        )
        for piece, tensor, at in pieces
        if piece.matrix in place
    ]
    by_buffer = joined(sorted(found, key=lambda copy: copy.buffer_at))
    by_tensor = joined(sorted(found, key=lambda copy: (copy.tensor, copy.at)))
    return tuple(by_buffer if len(by_buffer) < len(by_tensor) else by_tensor)
