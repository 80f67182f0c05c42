"""The sizes of one tensor-parallel rank on which activations, logits and times depend."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.tree import Config
from pretrain.plan.states import BYTES


@dataclass(frozen=True)
class Sizes:
    """Sizes of one tensor-parallel rank: its heads, its part of the MLP and of the vocabulary.

    Attributes:
        tokens: of a micro batch.
        between: tokens of which the rank keeps norms, residuals and dropout masks.
        element: bytes of the compute type.
        mask: bytes of an element of a dropout mask.
        on_cuda: whose kernels run.
    """

    batch: int
    length: int
    tokens: int
    between: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocabulary: int
    element: int
    mask: int
    on_cuda: bool


def rank_sizes(config: Config, on_cuda: bool) -> Sizes:
    """The sizes that the configuration gives every tensor-parallel rank."""
    size, element = config.parallel.tensor_model_parallel_size, BYTES[config.precision.dtype]
    batch, length = config.data.micro_batch_size, config.data.sequence_length
    tokens = batch * length
    return Sizes(
        batch=batch,
        length=length,
        tokens=tokens,
        between=tokens // size if config.parallel.sequence_parallel else tokens,
        hidden=config.model.hidden_size,
        heads=config.model.num_attention_heads // size,
        groups=config.num_query_groups // size,
        head_dim=config.head_dim,
        ffn=config.ffn_hidden_size // size,
        vocabulary=config.model.vocab_size // size,
        element=element,
        mask=1 if on_cuda else element,
        on_cuda=on_cuda,
    )
