"""File of initial weights, read instead of drawn: those of a model that was trained before.

The file is safetensors. The name of a tensor is that of the random stream from which its rows would
otherwise be drawn (see `initialize`), so that any rank reads just its own rows; norms have two
tensors, `.weight` and `.bias`. The header holds the sizes of the model, and the SHA-256 of every
head of W_Q and W_K in float32. The SHA-256 of the header thus identifies the whole bank, and every
head is checked when it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Json, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from megatron_patches.errors import MethodError

if TYPE_CHECKING:  # reading the header needs no torch, which takes seconds to import
    import torch

FORMAT = "ora-initial-weights-1"


class _Metadata(TypedDict):
    model: Json[dict[str, Any]]
    heads: Json[dict[str, list[str]]]


_HEADER = TypeAdapter(dict[str, dict[str, Any]])
_METADATA = TypeAdapter(_Metadata)


def bank_name(layer: int, role: str) -> str:
    """Return the name of the tensor of W_Q or W_K of a layer, `[heads * head_dim, hidden]`.

    Args:
        layer: number of the layer, from 0.
    """
    return f"layer.{layer}.attention.{role}"


@dataclass(frozen=True)
class GivenWeights:
    """File of initial weights; every property and method raises MethodError if it is none."""

    path: Path

    @cached_property
    def _header(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                # The limit of the safetensors format; a larger number means another kind of file.
                if size <= 100_000_000 and len(content := file.read(size)) == size:
                    return content
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error
        raise self._unreadable("it is not a safetensors file")

    @cached_property
    def _parsed_header(self) -> dict[str, Any]:
        try:
            header = _HEADER.validate_json(self._header)
            metadata = header.get("__metadata__", {})
            if metadata.get("format") == FORMAT:
                return {**_METADATA.validate_python(metadata), "names": frozenset(header)}
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise self._unreadable(f"its header cannot be read ({reason})") from error
        raise self._unreadable("`python -m pretrain import` did not make it")

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of the header, which has the digests of the heads."""
        return hashlib.sha256(self._header).hexdigest()

    @property
    def model(self) -> dict[str, Any]:
        """Return the sizes of the model, by the keys of the configuration's section `model`."""
        return dict(self._parsed_header["model"])

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor of this name."""
        return name in self._parsed_header["names"]

    def rows(self, name: str, numbers: Sequence[int], padded: bool = False) -> torch.Tensor:
        """Read rows of a tensor, in any order.

        Args:
            numbers: row numbers, in the order of the result.
            padded: whether rows beyond the tensor's last, which come last, are zeros: a vocabulary
                may be padded, by ids that no text has.

        Returns:
            `[len(numbers), columns]`, or `[len(numbers)]` of a norm, in the type in which the file
            has them.

        Raises:
            MethodError: the file has no such tensor, or cannot be read.
        """
        import torch

        try:
            with safe_open(self.path, framework="pt") as file:
                stored = file.get_slice(name)
                count = stored.get_shape()[0]
                held = [number for number in numbers if number < count or not padded]
                rows = torch.cat([stored[0:0], *(stored[a:b] for a, b in _runs(held))])
                return torch.cat([rows, rows.new_zeros(len(numbers) - len(held), *rows.shape[1:])])
        except (SafetensorError, OSError) as error:
            raise self._unreadable(f"{name}: {error}") from error

    def head(self, layer: int, role: str, head: int, head_dim: int) -> torch.Tensor:
        """Read W_Q or W_K of one head, float32 `[head_dim, hidden]`, and compare its digest.

        Args:
            layer: number of the layer, from 0.
            head: number of the head within its role, from 0.

        Raises:
            MethodError: the file lacks the head, or its rows do not have the digest.
        """
        name = bank_name(layer, role)
        rows = self.rows(name, range(head * head_dim, (head + 1) * head_dim)).float()
        digests = self._parsed_header["heads"].get(name, [])
        if not head < len(digests) or head_digest(rows) != digests[head]:
            raise self._unreadable(
                f"head {head} of {name} does not have the SHA-256 that its header says"
            )
        return rows

    def _unreadable(self, problem: str) -> MethodError:
        return MethodError(
            f"model.initial_weights={self.path} cannot be used: {problem}; restore the file, or "
            "make it again with `python -m pretrain import`"
        )


def head_digest(rows: torch.Tensor) -> str:
    """Return the SHA-256 of one head's rows in float32."""
    return hashlib.sha256(rows.float().contiguous().numpy().data).hexdigest()


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Join consecutive row numbers into ranges [first, end), each read at once."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
