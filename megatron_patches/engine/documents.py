"""Attention within the documents that share a sample, without a mask of seq × seq.

Flash attention takes documents of any lengths one behind the other, with the positions at which
they begin. On a GPU that is one kernel, in bf16. On the CPU a loop over the documents gives the
same numbers, which shows that documents are cut at the right positions.

Version-sensitive: calls torch's `_flash_attention_forward`, which torch 2.9 to 2.15 have and do not
document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

FEWEST = 16
"""Least length of `Documents.boundaries`.

It is padded to a power of two, so that compiled layers see few sizes.
"""


@dataclass(frozen=True)
class Documents:
    """Documents of a batch: a token attends to tokens of its own document only.

    Attributes:
        starts: `[batch, seq]` int64, position in its sample at which a token's document begins.
        boundaries: int32, the place of each document's beginning among all `batch * seq` tokens,
            sample by sample, padded at the end with the number of tokens, at least once; None
            before `with_boundaries`.
    """

    starts: torch.Tensor
    boundaries: torch.Tensor | None = None

    def mask(self) -> torch.Tensor:
        """Return the mask `[batch, 1, seq, seq]`, bool, True where a query must not see a key."""
        # Two tokens are in the same document exactly if their documents begin at the same place.
        other_document = self.starts[:, None, :, None] != self.starts[:, None, None, :]
        index = torch.arange(self.starts.size(1), device=self.starts.device)
        return other_document | (index[None, :] > index[:, None])

    def with_boundaries(self) -> Documents:
        """Return a copy with `boundaries`.

        On a GPU this waits: the number of documents decides a shape.
        """
        index = torch.arange(self.starts.size(1), device=self.starts.device)
        begins = (self.starts == index).flatten().nonzero()[:, 0]
        size = max(FEWEST, 1 << len(begins).bit_length())
        boundaries = torch.full(
            (size,), self.starts.numel(), dtype=torch.int32, device=self.starts.device
        )
        boundaries[: len(begins)] = begins
        return Documents(self.starts, boundaries)


Visible = torch.Tensor | Documents | None
"""Form of an attention mask: `Documents.mask`'s, the documents themselves, or None: causal."""


def attend_within_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    dropout: float,
    scale: float,
) -> torch.Tensor:
    """Attend causally within each document.

    Args:
        query: `[batch * seq, heads, head_dim]`, sample by sample.
        key: `[batch * seq, groups, head_dim]`.
        value: `[batch * seq, groups, head_dim]`.
        documents: where each document begins, with `boundaries`.
        dropout: probability of dropping an attention probability.
        scale: factor of the scores q·k.

    Returns:
        The context vectors, `[batch * seq, heads, head_dim]`.
    """
    assert documents.boundaries is not None
    if query.device.type == "cpu":
        return _one_by_one(
            query, key, value=value, boundaries=documents.boundaries, dropout=dropout, scale=scale
        )
    longest = documents.starts.size(1)
    context: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        documents.boundaries,
        documents.boundaries,
        longest,
        longest,
        dropout,
        True,  # causal
        False,  # no mask of dropout for debugging
        scale=scale,
    )[0]
    return context


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    dropout: float,
    scale: float,
) -> torch.Tensor:
    # The padding of `boundaries` adds documents of length 0, which are left out below.
    lengths = boundaries.diff().tolist()
    parts = (tensor.transpose(0, 1).split(lengths, dim=1) for tensor in (query, key, value))
    contexts = [
        scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=len(q) != len(k),
        )[0]
        for q, k, v in zip(*parts, strict=True)
        if q.size(1)
    ]
    return torch.cat(contexts, dim=1).transpose(0, 1)
