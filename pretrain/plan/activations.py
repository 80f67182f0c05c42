"""Activations that autograd keeps between forward and backward on one rank, one number per part.

Weights and logits are left out. With T tokens of a micro batch on a rank, T' of them outside of
attention and MLP (T divided by the tensor-parallel ranks under sequence parallelism), n
tensor-parallel ranks, e bytes an element, m bytes of a dropout mask (1, or 0 without dropout):

    attention   T' d (2 e + m)  +  T e (2 H + 2 G) h / n  +  T e (rows of the adapters)
    MLP         T' d (2 e + m)  +  T e (outputs of its first and inputs of its second product) / n
    outside     T' d (2 e + m)

Each part keeps the residual stream and its norm. Attention keeps queries, keys, values and context
vectors, queries and keys once more where they are normalised, and a mask where documents are kept
apart. An adapter keeps a copy of what it corrects. A synthesizer keeps probabilities in place of
queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.plan.products import layers_of_frozen_rows
from pretrain.plan.workload import FP32, Workload


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank, before any are recomputed.

    Attributes:
        attention, mlp: Of all layers.
        outside: Of the embeddings and the last norm.
        inputs: Of all layers' inputs, which alone are kept of recomputed layers.
        query_key: Of attention, the queries and keys that `recompute=query_key` makes again.
    """

    attention: int
    mlp: int
    outside: int
    inputs: int
    query_key: int

    def kept(self, recompute: str) -> int:
        """Return the bytes kept under a value of `performance.recompute`."""
        layers = {
            "none": self.attention + self.mlp,
            "query_key": self.attention + self.mlp - self.query_key,
            "attention": self.inputs + self.mlp,
            "full": self.inputs,
        }
        return self.outside + layers[recompute]

    def made_again(self, recompute: str) -> int:
        """Return the bytes of all layers that backward makes again."""
        layers = {
            "none": 0,
            "query_key": self.query_key,
            "attention": self.attention,
            "full": self.attention + self.mlp,
        }
        return layers[recompute]


def activations_of(work: Workload, rank: int) -> Activations:
    """Return what autograd keeps on a rank of tensor parallelism."""
    shape, element, layers = work.shape, work.element, work.shape.num_layers
    size = work.tensor_parallel_size
    inputs = work.tokens_between * shape.hidden_size * element
    # A mask of dropout has one byte an element.
    around = 2 * inputs + (work.tokens_between * shape.hidden_size if work.dropout else 0)
    adapters = inside_mlp = 0
    for tensor in work.tensors():
        rows, *columns = tensor.rank_shape(rank, size)
        if tensor.kind == "adapter":
            adapters += rows
        elif ".mlp." in tensor.name:
            inside_mlp += columns[0] if tensor.cut == 1 else rows
    query_key = work.tokens * (shape.query_size + shape.key_size) // size * element
    if work.policy.synthesizer:
        attention = query_key + _probabilities(work)  # context vectors and values
    else:
        attention = query_key * (3 if shape.qk_norm else 2)
        if work.dense_mask:
            attention += work.batch * shape.sequence_length**2 * element
    return Activations(
        attention=layers * (around + attention) + work.tokens * adapters * element,
        mlp=layers * around + work.tokens * inside_mlp * element,
        outside=around,
        inputs=layers * inputs,
        query_key=query_key * len(layers_of_frozen_rows(work.tensors())),
    )


def _probabilities(work: Workload) -> int:
    """Return the bytes of a synthesizer's probabilities in one layer.

    All samples share them, unless a mask or dropout makes them differ.
    """
    heads = work.shape.num_attention_heads // work.tensor_parallel_size
    square = heads * work.shape.sequence_length**2
    applied = square * (work.batch if work.masked or work.dropout else 1) * work.element
    if not work.policy.trainable:
        return applied
    return applied + square * (work.batch if work.masked else 1) * FP32
