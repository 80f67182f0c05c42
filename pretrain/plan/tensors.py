"""Every tensor of one tensor-parallel rank: what it trains, and what it holds frozen. Nothing is built.

The sizes are those of the model that `pretrain.model.build` makes; a test compares them with live engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_patches.recipe.phases import phases_of_layers
from megatron_patches.recipe.policy import QKPolicy
from pretrain.config.phases import phases_of
from pretrain.config.tree import Config


@dataclass(frozen=True)
class Weight:
    """One trainable tensor.

    Attributes:
        group: which of the optimizer's groups holds it: the phase in which it begins to train, and whether
            weight decay leaves it alone.
    """

    name: str
    elements: int
    group: tuple[int, bool]


@dataclass(frozen=True)
class LayerHeads:
    """Heads of one layer on one rank, by what becomes of their W_Q and W_K.

    Attributes:
        patched: the layer has the attention of `megatron_patches`, with W_V apart; else megatron-core's own
            fused W_QKV.
    """

    patched: bool

    frozen_queries: int
    frozen_keys: int
    trained_queries: int
    trained_keys: int


@dataclass(frozen=True)
class RankTensors:
    """What one tensor-parallel rank holds of the model, before ZeRO cuts it up.

    Attributes:
        frozen: elements of the frozen bank, or of frozen score matrices.
        layers: each layer's heads; empty for a model without queries and keys.
    """

    weights: tuple[Weight, ...]
    frozen: int
    layers: tuple[LayerHeads, ...]

    @property
    def trainable(self) -> int:
        """Elements that train."""
        return sum(weight.elements for weight in self.weights)


def rank_tensors(config: Config, rank: int) -> RankTensors:
    """The tensors of tensor-parallel rank `rank`, in the phase of the run in which most of them train."""
    policy, phase = config.policy(), len(phases_of(config)) - 1
    layers = () if policy.synthesizer else tuple(_layer_heads(config, policy, phase, rank))
    weights = [*_around_the_layers(config)]
    frozen = 0
    for number in range(config.model.num_layers):
        weights += _norms_and_mlp(config, number)
        if policy.synthesizer:
            own, kept = _score_matrices(config, policy, number)
        else:
            own, kept = _query_key_value(config, policy, number, layers[number])
        weights += own
        frozen += kept
    return RankTensors(tuple(weights), frozen, layers)


def _around_the_layers(config: Config) -> Iterator[Weight]:
    model, hidden = config.model, config.model.hidden_size
    vocabulary = model.vocab_size // config.parallel.tensor_model_parallel_size * hidden
    yield _matrix("word_embeddings", vocabulary)
    if model.position_embedding == "learned":
        yield _matrix("position_embeddings", config.data.sequence_length * hidden)
    yield from _norm("final_layernorm", hidden)
    if not model.tied_embeddings:
        yield _matrix("output_layer", vocabulary)


def _norms_and_mlp(config: Config, layer: int) -> Iterator[Weight]:
    hidden, size = config.model.hidden_size, config.parallel.tensor_model_parallel_size
    yield from _norm(f"layers.{layer}.input_layernorm", hidden)
    yield from _norm(f"layers.{layer}.pre_mlp_layernorm", hidden)
    heads = config.model.num_attention_heads // size
    yield _matrix(f"layers.{layer}.linear_proj", hidden * heads * config.head_dim)
    for name in ("linear_fc1", "linear_fc2"):
        yield _matrix(f"layers.{layer}.{name}", hidden * config.ffn_hidden_size // size)


def _layer_heads(config: Config, policy: QKPolicy, phase: int, rank: int) -> Iterator[LayerHeads]:
    """Rank r of N owns key heads [r · G / N, (r + 1) · G / N), each with its query heads."""
    groups = config.num_query_groups
    own = groups // config.parallel.tensor_model_parallel_size
    queries = config.model.num_attention_heads // groups
    for layer_groups in policy.frozen_groups(config.model.num_layers, groups, phase):
        frozen = sum(rank * own <= group < (rank + 1) * own for group in layer_groups)
        trained = own - frozen
        # A layer that becomes trainable later keeps the class of its attention.
        patched = bool(layer_groups or policy.unfreeze)
        yield LayerHeads(patched, frozen * queries, frozen, trained * queries, trained)


def _query_key_value(
    config: Config, policy: QKPolicy, layer: int, heads: LayerHeads
) -> tuple[list[Weight], int]:
    """(W_V with what trains of W_Q and W_K and the adapters, elements of the frozen bank)."""
    hidden, width = config.model.hidden_size, config.head_dim
    groups = config.num_query_groups // config.parallel.tensor_model_parallel_size
    name, trained = f"layers.{layer}", (heads.trained_queries + heads.trained_keys) * width * hidden
    if not heads.patched:
        return [_matrix(f"{name}.linear_qkv", groups * width * hidden + trained)], 0
    weights = [_matrix(f"{name}.value", groups * width * hidden)]
    if trained:
        begins = phases_of_layers(policy.unfreeze, config.model.num_layers)[layer] if policy.unfreeze else 0
        weights.append(Weight(f"{name}.trained_query_key", trained, (begins or 0, False)))
    weights += _adapters(config, policy, name, heads)
    columns = policy.stored_columns(hidden, width)
    return weights, (heads.frozen_queries + heads.frozen_keys) * width * columns


def _adapters(config: Config, policy: QKPolicy, name: str, heads: LayerHeads) -> Iterator[Weight]:
    width = config.head_dim
    query_size, key_size = heads.frozen_queries * width, heads.frozen_keys * width
    if "low_rank" in policy.adapters:
        yield _matrix(f"{name}.low_rank_down", 2 * policy.low_rank * config.model.hidden_size)
        yield _matrix(f"{name}.up_query", query_size * policy.low_rank)
        yield _matrix(f"{name}.up_key", key_size * policy.low_rank)
    if "core" in policy.adapters:
        yield _vector(f"{name}.core", query_size * width)
    if "qk_norm" in policy.adapters:
        yield _vector(f"{name}.query_gain", query_size)
        yield _vector(f"{name}.key_gain", key_size)
    if "logit_scale" in policy.adapters:
        yield _vector(f"{name}.logit_scale", heads.frozen_queries)


def _score_matrices(config: Config, policy: QKPolicy, layer: int) -> tuple[list[Weight], int]:
    """(W_V and the score matrices that train, elements of those that do not)."""
    size, length = config.parallel.tensor_model_parallel_size, config.data.sequence_length
    groups = config.num_query_groups // size
    weights = [_matrix(f"layers.{layer}.linear_v", groups * config.head_dim * config.model.hidden_size)]
    columns = [length] if policy.score_rank is None else [policy.score_rank] * 2
    rows = config.model.num_attention_heads // size * length
    if not policy.trainable:
        return weights, rows * sum(columns)
    return weights + [_matrix(f"layers.{layer}.scores", rows * count) for count in columns], 0


def _matrix(name: str, elements: int) -> Weight:
    return Weight(name, elements, (0, False))


def _vector(name: str, elements: int) -> Weight:
    """What weight decay leaves alone: norms, and what starts as the identity."""
    return Weight(name, elements, (0, True))


def _norm(name: str, hidden: int) -> Iterator[Weight]:
    yield _vector(f"{name}.weight", hidden)
    yield _vector(f"{name}.bias", hidden)
