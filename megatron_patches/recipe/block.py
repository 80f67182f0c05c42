"""Parts of the block: norms, MLPs, embeddings, output projection and output layer. No torch.

The attention's queries, keys and values are in `tensors`, its adapters in `adapters`.
`megatron_patches.model.parts` has the modules of the norms and MLPs by the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from megatron_patches.recipe.parts import ModelShape, Part, Place, Start, Tensor


class Norm(Part):
    """Norm of each token's hidden state.

    Attributes:
        meaning: what the page of keys says of it.
    """

    meaning: ClassVar[str]


class Mlp(Part):
    """Map of each token's hidden state through a wider one.

    Attributes:
        meaning: what the page of keys says of it.
    """

    meaning: ClassVar[str]

    def width(self, hidden_size: int) -> int:
        """Return the inner width where the configuration leaves it open."""
        return 4 * hidden_size


class LayerNorm(Norm):
    """(x − mean) / sd ∘ weight + bias."""

    name = "layernorm"
    meaning = "weight and bias"
    kernels = r"layer_?norm"

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield weight and bias."""
        yield norm_vector(at, "weight", shape.hidden_size, "ones")
        yield norm_vector(at, "bias", shape.hidden_size, "zeros")


class RMSNorm(Norm):
    """x / √(mean x² + ε) ∘ weight."""

    name = "rmsnorm"
    meaning = "weight"
    kernels = r"rms_?norm|rsqrt"

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield the weight."""
        yield norm_vector(at, "weight", shape.hidden_size, "ones")


class Gelu(Mlp):
    """W_2 GELU(W_1 x)."""

    name = "gelu"
    meaning = "GELU of the first product"
    kernels = "gelu"

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield W_1 and W_2."""
        hidden, inner = shape.hidden_size, shape.ffn_hidden_size
        yield matrix(
            f"{at.module}.linear_fc1.weight", f"{at.stream}.fc1", (inner, hidden), at.layer
        )
        yield into_residual(
            f"{at.module}.linear_fc2.weight", f"{at.stream}.fc2", (hidden, inner), at.layer
        )


class SquaredRelu(Gelu):
    """W_2 ReLU(W_1 x)²: the tensors of a GELU MLP."""

    name = "relu2"
    meaning = "the square of ReLU"
    kernels = "relu|pow"


class SwiGlu(Mlp):
    """W_2 (SiLU(W_gate x) ∘ W_up x); gate and up are one matrix of two parts."""

    name = "swiglu"
    meaning = "SiLU of a gate times a third matrix's product"
    kernels = "silu"

    @override
    def width(self, hidden_size: int) -> int:
        """Return 8/3 of the hidden size, with which three matrices have the elements of two.

        Rounded up to a multiple of 128, or of 16 in a narrow model: ranks have equal shares.
        """
        # Multiples of 128 suit the tiles of tensor cores.
        multiple = 128 if hidden_size >= 384 else 16
        return -(-8 * hidden_size // (3 * multiple)) * multiple

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield W_gate over W_up, and W_2."""
        hidden, inner = shape.hidden_size, shape.ffn_hidden_size
        yield Tensor(
            f"{at.module}.linear_fc1.weight",
            (2 * inner, hidden),
            "ordinary",
            cut=0,
            parts=((f"{at.stream}.gate", inner), (f"{at.stream}.up", inner)),
            layer=at.layer,
        )
        yield into_residual(
            f"{at.module}.linear_fc2.weight", f"{at.stream}.fc2", (hidden, inner), at.layer
        )


NORMS: Mapping[str, Norm] = {part.name: part for part in (LayerNorm(), RMSNorm())}
MLPS: Mapping[str, Mlp] = {part.name: part for part in (Gelu(), SwiGlu(), SquaredRelu())}


class Embeddings(Part):
    """Vectors of tokens, and of positions where these are learned."""

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield the table of tokens, and that of positions."""
        name = f"{at.module}.word_embeddings.weight"
        words = matrix(name, f"{at.stream}.word", (shape.vocab_size, shape.hidden_size))
        yield replace(words, multiplied=shape.tied_embeddings, start="embedding")
        if shape.learned_positions:
            name = f"{at.module}.position_embeddings.weight"
            size = (shape.sequence_length, shape.hidden_size)
            positions = matrix(name, f"{at.stream}.position", size)
            yield replace(positions, cut=None, multiplied=False, start="embedding")


class Projection(Part):
    """The attention's output projection."""

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield W_O."""
        size = (shape.hidden_size, shape.query_size)
        yield into_residual(f"{at.module}.weight", at.stream, size, at.layer)


class Output(Part):
    """The output layer, where it has a weight of its own."""

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield the weight."""
        yield matrix(f"{at.module}.weight", at.stream, (shape.vocab_size, shape.hidden_size))


def matrix(name: str, stream: str, shape: tuple[int, int], layer: int | None = None) -> Tensor:
    """Return an ordinary matrix whose rows are cut into equal shares.

    Args:
        stream: name of its random stream.
        shape: `[rows, columns]`.
        layer: number of the layer, from 0; None: outside of the layers.
    """
    return Tensor(name, shape, "ordinary", cut=0, parts=((stream, shape[0]),), layer=layer)


def into_residual(name: str, stream: str, shape: tuple[int, int], layer: int | None) -> Tensor:
    """Return a matrix whose columns are cut and whose product is added to the residual stream.

    Args:
        stream: name of its random stream.
        shape: `[rows, columns]`.
        layer: number of the layer, from 0.
    """
    return replace(matrix(name, stream, shape, layer), cut=1, start="residual")


def norm_vector(at: Place, name: str, size: int, start: Start) -> Tensor:
    """Return a norm's vector, whole on every rank.

    A rank's gradient of it covers the rank's slice of the sequence.

    Args:
        name: "weight" or "bias".
    """
    return Tensor(
        f"{at.module}.{name}",
        (size,),
        "norm",
        cut=None,
        parts=((f"{at.stream}.{name}", size),),
        decay=False,
        multiplied=False,
        start=start,
        partial="sequence",
        layer=at.layer,
    )
