"""Rows of weights that stay frozen in fine-tuning, and the proof, bit for bit, that they did.

A weight of which all rows are frozen does not require a gradient. Where only some are (a fused QKV
weight, frozen heads beside trained ones), the weight is computed from a trained one and the frozen
rows: a gradient of zero alone would not do, because weight decay shrinks whatever the optimizer
holds. A bias of frozen rows is frozen with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from pretrain.errors import UserError

Rows = Mapping[str, Sequence[Sequence[int]]]
"""{name of a weight: [first, end] of its frozen rows, those of W in W x}, as export.json has it."""


State = tuple[str, dict[str, bytes]]
"""Digests of a model's frozen rows, and of every tensor that trains."""


class _Kept(nn.Module):
    """Weight with frozen entries that are not those of the trained parameter."""

    frozen: torch.Tensor
    entries: torch.Tensor

    def __init__(self, weight: torch.Tensor, entries: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("frozen", weight.detach().clone())
        self.register_buffer("entries", entries)

    def forward(self, trained: torch.Tensor) -> torch.Tensor:
        return torch.where(self.entries, self.frozen, trained)


class _Part(NamedTuple):
    """Weight or bias of a module that has frozen rows; `entries` is a mask of its shape."""

    name: str
    module: nn.Module
    attribute: str
    tensor: torch.Tensor
    entries: torch.Tensor


def freeze(model: nn.Module, rows: Rows) -> None:
    """Freeze rows of weights, and the biases that belong to them.

    Raises:
        UserError: the model has no such weight, or not so many rows.
    """
    for part in _frozen_parts(model, rows):
        if bool(part.entries.all()):
            part.tensor.requires_grad_(False)
        else:
            kept = _Kept(part.tensor, part.entries)
            # A masked gradient is not enough: weight decay would still shrink the frozen entries.
            parametrize.register_parametrization(part.module, part.attribute, kept)


def frozen_digest(model: nn.Module, rows: Rows) -> str:
    """Return the SHA-256 of the bits of rows and their biases, as the model computes with them."""
    digest = hashlib.sha256()
    for part in _frozen_parts(model, rows):
        digest.update(f"{part.name} {part.attribute}".encode())
        digest.update(_bits(part.tensor.detach()[part.entries]))
    return digest.hexdigest()


def remember(model: nn.Module, rows: Rows) -> State:
    """Return the state of the model before training."""
    return frozen_digest(model, rows), _trained_digests(model)


def what_changed(model: nn.Module, rows: Rows, state: State, head: str) -> dict[str, Any]:
    """Check that frozen rows kept their bits and that other weights changed.

    Args:
        model: Model after its training.
        state: What `remember` returned.
        head: First letters of the name of the new head's weight.

    Returns:
        Numbers of frozen tensors and entries, the digest, and tensors that changed and did not.

    Raises:
        RuntimeError: a frozen bit changed.
        UserError: no weight, or not the head, has changed.
    """
    (frozen, trained) = state
    (after, now) = remember(model, rows)
    if after != frozen:
        raise RuntimeError(
            "frozen rows of queries and keys changed in fine-tuning: this is a defect"
        )
    changed = [name for name in now if now[name] != trained[name]]
    if not any(name.startswith(head) for name in changed):
        unchanged = "no weight" if not changed else f"not the head ({head})"
        raise UserError(f"fine-tuning changed {unchanged}: raise --learning-rate or --epochs")
    return {
        "frozen_tensors": len(rows),
        "frozen_entries": sum(int(part.entries.sum()) for part in _frozen_parts(model, rows)),
        "frozen_sha256": after,
        "frozen_bits_equal": True,
        "changed_tensors": len(changed),
        "unchanged_tensors": sorted(set(now) - set(changed)),
    }


def _frozen_parts(model: nn.Module, rows: Rows) -> Iterator[_Part]:
    """Yield every weight and bias that has frozen rows, by name."""
    for name, ranges in sorted(rows.items()):
        try:
            module = model.get_submodule(name.removesuffix(".weight"))
        except AttributeError as error:
            raise UserError(
                f"export.json says that {name} is frozen, but the model has no such weight"
            ) from error
        for attribute in ("weight", "bias"):
            tensor = getattr(module, attribute, None)
            if tensor is not None:
                yield _Part(
                    name=name,
                    module=module,
                    attribute=attribute,
                    tensor=tensor,
                    entries=_entries(name, module, tensor, ranges),
                )


def _entries(
    name: str, module: nn.Module, weight: torch.Tensor, ranges: Sequence[Sequence[int]]
) -> torch.Tensor:
    from transformers.pytorch_utils import Conv1D

    # GPT2's matrices are transposed, so that what W x makes is along the last axis.
    axis = weight.dim() - 1 if isinstance(module, Conv1D) else 0
    mask = torch.zeros_like(weight, dtype=torch.bool)
    for first, end in ranges:
        if not 0 <= first < end <= weight.size(axis):
            raise UserError(
                f"export.json says that rows {first} to {end} of {name} are frozen, but it has "
                f"{weight.size(axis)}"
            )
        mask.narrow(axis, first, end - first).fill_(True)
    return mask


def _trained_digests(model: nn.Module) -> dict[str, bytes]:
    return {
        name: hashlib.sha256(_bits(weight.detach())).digest()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def _bits(values: torch.Tensor) -> bytes:
    return values.cpu().float().contiguous().numpy().tobytes()
