"""Owners of Muon's matrices, and the exchange of their pieces between ranks.

One rank owns each matrix. In an update the owner receives the pieces of the matrix that other ranks
hold (rows or columns by tensor parallelism, ranges by ZeRO), orthogonalises it and sends the pieces
back. Where data-parallel ranks hold the same values (ZeRO stage 0), the owner receives the pieces
of its own replica only, and every replica gets the update.
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
from pretrain.optimizer.orthogonalise import Copy, joined, newton_schulz
from pretrain.ranks.groups import ParallelContext


@dataclass(frozen=True)
class Matrix:
    """A matrix of the model.

    Attributes:
        tensor: Name of the tensor that holds the matrix.
        stack: Stack of equal matrices that this one belongs to.
        shares: Pieces that follow each other where tensor parallelism cuts the matrix's columns;
            else 1.
    """

    tensor: str
    stack: Stack
    shares: int

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return self.stack.rows * self.stack.columns

    @property
    def flops(self) -> int:
        """Return the FLOPs of one Newton-Schulz iteration."""
        return self.stack.flops(1) // self.stack.count


@dataclass(frozen=True)
class Piece:
    """Elements of a matrix in a rank's optimizer.

    Attributes:
        matrix: Number of the matrix.
        start: First element in the flattened matrix.
        length: Number of elements.
        flat: Number of the optimizer's flat tensor in its group.
        at: First element in that flat tensor.
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
        numbers: Numbers of the matrices.
        like: Any of the matrices.
        incoming: Copies of their pieces out of the received buffer.
        outgoing: Copies into the buffer to send back.
    """

    numbers: tuple[int, ...]
    like: Matrix
    incoming: tuple[Copy, ...]
    outgoing: tuple[Copy, ...]


def matrices_of(inventory: Iterable[Tensor], size: int) -> tuple[list[Matrix], dict[Any, int]]:
    """Return the matrices of tensors, and the number of the first of each (tensor, stack).

    Args:
        inventory: The tensors that Muon takes.
        size: tensor-parallel size.
    """
    matrices: list[Matrix] = []
    first = {}
    for tensor in inventory:
        for number, stack in enumerate(stacks(tensor)):
            first[tensor.name, number] = len(matrices)
            matrix = Matrix(tensor.name, stack, size if tensor.cut == 1 else 1)
            matrices += [matrix] * stack.count
    return matrices, first


def pieces_of(
    slices: Iterable[Slice],
    inventory: Iterable[Tensor],
    flats: Sequence[torch.Tensor],
    context: ParallelContext,
) -> tuple[Piece, ...]:
    """Return this rank's pieces of the matrices in one parameter group, in order of the matrices.

    Args:
        slices: All slices of this rank's optimizer.
        inventory: The tensors that Muon takes.
        flats: Parameters of the group, as the optimizer holds them.
    """
    rank, size = context.tensor_parallel_rank, context.tensor_parallel_size
    tensors = {tensor.name: tensor for tensor in inventory}
    _, first = matrices_of(tensors.values(), size)
    number = {id(flat): index for index, flat in enumerate(flats)}
    pieces = []
    for part in slices:
        if id(part.flat) not in number or part.name not in tensors:
            continue
        for run in runs(tensors[part.name], rank, size):
            begins = max(run.rank_start, part.start)
            length = min(run.rank_start + run.length, part.start + part.length) - begins
            if length > 0:
                pieces.append(
                    Piece(
                        matrix=first[part.name, run.stack] + run.matrix,
                        start=run.start + begins - run.rank_start,
                        length=length,
                        flat=number[id(part.flat)],
                        at=part.offset + begins - part.start,
                    )
                )
    return tuple(sorted(pieces, key=lambda piece: (piece.matrix, piece.start)))


def owners_of(matrices: Sequence[Matrix], held: Sequence[Holding]) -> dict[int, int]:
    """Return {number of a matrix: its owner}, with about equal work for all ranks.

    The largest matrices go first. Each goes to the rank that holds most of it and still has room in
    its share of the work, or else to the rank with the least work.

    Args:
        held: Each rank's pieces of the parameter group.
    """
    elements_of: dict[int, Counter[int]] = defaultdict(Counter)
    for rank, holding in enumerate(held):
        for piece in holding.pieces:
            elements_of[piece.matrix][rank] += piece.length
    work = [0] * len(held)
    fair_share = sum(matrices[number].flops for number in elements_of) / len(held)
    owners = {}
    for number in sorted(elements_of, key=lambda number: (-matrices[number].flops, number)):
        flops = matrices[number].flops
        # Replicas hold equally much: the one with less work comes first.
        ranks = sorted(
            range(len(held)), key=lambda rank: (-elements_of[number][rank], work[rank], rank)
        )
        with_room = (rank for rank in ranks if work[rank] + flops <= fair_share)
        owner = next(with_room, min(ranks, key=lambda rank: work[rank]))
        owners[number] = owner
        work[owner] += flops
    return owners


class Exchange:
    """Routes of a parameter group's matrices to their owners and back.

    Args:
        matrices: All matrices of the model.
        held: Each rank's pieces of the parameter group.
        rank: Number of this rank.
        replicated: Whether data-parallel ranks hold the same values.
        factors: Factor of each matrix's update.
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
            replicas = {held[number].data_parallel_rank for number in (holder, owner)}
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
            flat_places = [(piece, piece.flat, piece.at) for piece in held[0].pieces]
            self.packed = self.unpacked = []
            self.chunks = _chunks(matrices, flat_places, flat_places, factors=factors)
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
        """Replace the matrices in flat tensors by their orthogonalised updates (collective).

        Args:
            flats: This rank's one-dimensional tensors; overwritten.
            steps: Newton-Schulz iterations.
            dtype: Type of the iterations, and of the elements that ranks send.

        Returns:
            The Frobenius norms of the owned matrices, orthogonalised and before their factors: one
            tensor for each chunk.
        """
        if self.alone:
            return self._orthogonalise(flats, flats, steps, dtype=dtype)
        device = flats[0].device
        sent = torch.empty(sum(self.sent), dtype=dtype, device=device)
        for copy in self.packed:
            copy.of_buffer(sent).copy_(copy.of_tensor(flats))
        received = _exchanged(sent, self.sent, self.received)
        del sent  # frees memory before the answers are allocated
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
    """Check that all ranks have the same parameter groups, and that every matrix is in one.

    Args:
        held: For each rank, its pieces in each of Muon's groups.
        matrices: All matrices of the model.

    Raises:
        MethodError: ranks would wait for each other, or a matrix would never move.
    """
    groups = [
        {piece.matrix for holding in holdings for piece in holding.pieces}
        for holdings in zip(*held, strict=False)
    ]
    if len({len(rank) for rank in held}) > 1 or sum(map(len, groups)) != len(set().union(*groups)):
        raise MethodError(
            "optimizer.kind=muon: some tensor-parallel ranks hold no weight of a parameter group; "
            "give queries and keys the learning rate of the other matrices, or use kind adamw"
        )
    elements: Counter[int] = Counter()
    for piece in (piece for rank in held for holding in rank for piece in holding.pieces):
        elements[piece.matrix] += piece.length
    left = sum(elements[number] < matrix.elements for number, matrix in enumerate(matrices))
    if left or not matrices:
        raise MethodError(
            f"optimizer.kind=muon would leave {left} of {len(matrices)} matrices of the layers as "
            "they are, so training was stopped before step 1"
        )


def _exchanged(
    sent: torch.Tensor, sent_lengths: list[int], received_lengths: list[int]
) -> torch.Tensor:
    """Return the elements that all ranks have sent to this one (collective)."""
    received = sent.new_empty(sum(received_lengths))
    dist.all_to_all_single(
        received, sent, output_split_sizes=received_lengths, input_split_sizes=sent_lengths
    )
    return received


def _lengths(pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """Return the number of elements in each rank's pieces."""
    return [sum(piece.length for piece in of_rank) for of_rank in pieces]


def _in_order(
    pieces: Sequence[Sequence[Piece]], factors: Sequence[float] | None = None
) -> Iterable[Copy]:
    """Yield copies between a rank's own tensors and a buffer with the pieces in order."""
    at = 0
    for piece in (piece for of_rank in pieces for piece in of_rank):
        scale = 1.0 if factors is None else factors[piece.matrix]
        yield Copy(piece.flat, piece.at, at, length=piece.length, scale=scale)
        at += piece.length


def _places(pieces: Sequence[Sequence[Piece]]) -> list[tuple[Piece, int, int]]:
    """Return (piece, 0, first element) for pieces laid end to end in one buffer."""
    flat = [piece for of_rank in pieces for piece in of_rank]
    starts = accumulate((piece.length for piece in flat), initial=0)
    return [(piece, 0, start) for piece, start in zip(flat, starts, strict=False)]


def _chunks(
    matrices: Sequence[Matrix],
    inputs: Sequence[tuple[Piece, int, int]],
    outputs: Sequence[tuple[Piece, int, int]],
    factors: Sequence[float] | None,
) -> list[Chunk]:
    """Group the matrices of `inputs` into chunks of equal shape."""
    kinds: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number in sorted({piece.matrix for piece, _, _ in inputs}):
        matrix = matrices[number]
        kinds[matrix.stack.rows, matrix.stack.columns, matrix.shares].append(number)
    chunks = []
    for numbers in kinds.values():
        like = matrices[numbers[0]]
        most = max(1, AT_A_TIME // like.elements)  # bounds the memory of the iterations
        for first in range(0, len(numbers), most):
            members = tuple(numbers[first : first + most])
            starts = {number: index * like.elements for index, number in enumerate(members)}
            copies = [_into(starts, pieces, factors) for pieces in (inputs, outputs)]
            chunks.append(Chunk(members, like, *copies))
    return chunks


def _into(
    starts: dict[int, int],
    pieces: Sequence[tuple[Piece, int, int]],
    factors: Sequence[float] | None,
) -> tuple[Copy, ...]:
    """Return the copies of pieces into a chunk, given where its matrices start."""
    copies = [
        Copy(
            tensor,
            at,
            starts[piece.matrix] + piece.start,
            length=piece.length,
            scale=1.0 if factors is None else factors[piece.matrix],
        )
        for piece, tensor, at in pieces
        if piece.matrix in starts
    ]
    # Which order joins into fewer copies depends on how the layout cuts the matrices.
    by_buffer = joined(sorted(copies, key=lambda copy: copy.buffer_at))
    by_tensor = joined(sorted(copies, key=lambda copy: (copy.tensor, copy.at)))
    return tuple(by_buffer if len(by_buffer) < len(by_tensor) else by_tensor)
