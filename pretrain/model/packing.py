"""Documents inside a sample: their positions, their attention, and the predictions that count.

GPT-2 style packing (the default) ignores the boundaries: a sample is one text in which the
end-of-document id is an ordinary token. With data.reset_at_document_end every document stands
alone: positions restart at 0, attention does not reach back into earlier documents, and the
prediction made at the end-of-document id, which would have to guess the start of an unrelated
document, is left out of the loss.

Rotary embeddings need no restart. They enter attention only through the difference of two
positions in the same document. So megatron-core's GPTModel, which counts rotary positions from the
sample's start whatever position ids it gets, computes the same scores up to rounding. Learned
positions need the restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_patches.engine.documents import Documents


@dataclass(frozen=True)
class DocumentLayout:
    """The layout of a packed batch of inputs.

    Attributes:
        positions: `[batch, seq]` int64, from 0 in each document (a sample may begin inside one).
        documents: Grouping of the tokens into documents, for the attention; None: one text.
        counted: `[batch, seq]` bool, False where the input is the end-of-document id; None: every
            prediction counts.
    """

    positions: torch.Tensor
    documents: Documents | None
    counted: torch.Tensor | None


def document_layout(inputs: torch.Tensor, eod_id: int | None) -> DocumentLayout:
    """Return the layout of `[batch, seq]` ids.

    An end-of-document id belongs to the document it ends.

    Args:
        inputs: `[batch, seq]` ids.
        eod_id: The end-of-document id if documents stand alone; None: packed as one text.
    """
    index = torch.arange(inputs.size(1), device=inputs.device)
    if eod_id is None:
        return DocumentLayout(index.expand_as(inputs), None, None)
    ends = inputs == eod_id
    begins = torch.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    start = torch.where(begins, index, 0).cummax(dim=1).values
    return DocumentLayout(index - start, Documents(start), ~ends)


def count_predictions(tokens: torch.Tensor, eod_id: int | None) -> int:
    """Count the predictions that are trained on.

    Args:
        tokens: `[…, seq + 1]` ids.
        eod_id: The end-of-document id if documents stand alone; None: every prediction counts.
    """
    inputs = tokens[..., :-1]
    return inputs.numel() if eod_id is None else int((inputs != eod_id).sum())
