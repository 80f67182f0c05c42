"""The peer of a training step: the vanilla model in plain PyTorch, as nanoGPT or Llama is written.

LayerNorm and GELU, or RMSNorm, SwiGLU and norms of queries and keys; PyTorch's own attention, fused
AdamW or its Muon, gradient clipping: nothing around it, no ranks, no engine. From the same weights
its losses are ours (tests/distributed/test_speed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_patches.engine.freeze import parameter_groups
from megatron_patches.recipe.optimizers import Muon
from pretrain.config.tree import Config

NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


class Matrices(nn.Module):
    """Linear maps of one input: one fused weight, or a weight each, as Muon needs them.

    Args:
        width: Width of the input.
        sizes: Sizes of the outputs.
        apart: Whether each matrix is a weight of its own.
    """

    def __init__(self, width: int, sizes: Sequence[int], apart: bool) -> None:
        super().__init__()
        self.sizes = list(sizes)
        rows = self.sizes if apart else [sum(sizes)]
        self.weights = nn.ParameterList(torch.empty(row_count, width) for row_count in rows)

    def forward(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the outputs `[…, size]`, one of each matrix, of an input `[…, width]`."""
        if len(self.weights) == len(self.sizes):
            return [F.linear(x, weight) for weight in self.weights]
        return F.linear(x, self.weights[0]).split(self.sizes, -1)


class Block(nn.Module):
    """A pre-norm layer; activations `[batch, seq, hidden]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model, inner = config.model, config.ffn_hidden_size
        hidden, epsilon = model.hidden_size, model.layernorm_epsilon
        norm = NORMS[model.norm]
        apart = config.optimizer.kind == "muon"
        self.heads = model.num_attention_heads
        self.norm_attention = norm(hidden, epsilon)
        self.query_key_value = Matrices(hidden, [hidden] * 3, apart)
        self.norm_query: nn.Module = nn.Identity()
        self.norm_key: nn.Module = nn.Identity()
        if model.qk_norm:
            self.norm_query = nn.RMSNorm(config.head_dim, epsilon)
            self.norm_key = nn.RMSNorm(config.head_dim, epsilon)
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.norm_mlp = norm(hidden, epsilon)
        self.gated = model.mlp == "swiglu"
        self.up = Matrices(hidden, [inner] * (1 + self.gated), apart)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Return the layer's output.

        Args:
            x: `[batch, seq, hidden]`.
            cosine: Cosine of the rotary angles, `[seq, head_dim / 2]`.
            sine: Sine of the same angles.

        Returns:
            `[batch, seq, hidden]`.
        """
        mixed = self.query_key_value(self.norm_attention(x))
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in mixed)
        query = rotated(self.norm_query(query), cosine, sine)
        key = rotated(self.norm_key(key), cosine, sine)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(context.transpose(1, 2).flatten(2))
        inner = self.up(self.norm_mlp(x))
        return x + self.down(F.silu(inner[0]) * inner[1] if self.gated else F.gelu(inner[0]))


def rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to heads.

    Args:
        heads: `[…, seq, head_dim]`.
        cosine: Cosine of the angles, `[seq, head_dim / 2]`.
        sine: Sine of the same angles.

    Returns:
        Of the shape of `heads`.
    """
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)


class PlainGPT(nn.Module):
    """Vanilla model of a config: rotary positions, no dropout, no query groups."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        model, length = config.model, config.data.sequence_length
        assert model.position_embedding == "rope" and not model.dropout
        assert model.mlp in ("gelu", "swiglu")
        assert config.num_query_groups == model.num_attention_heads
        hidden = model.hidden_size
        self.embedding = nn.Embedding(model.vocab_size, hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(model.num_layers))
        self.norm = NORMS[model.norm](hidden, model.layernorm_epsilon)
        self.output = nn.Linear(hidden, model.vocab_size, bias=False)
        if model.tied_embeddings:
            self.output.weight = self.embedding.weight
        # Angles of Su et al. (2021): position / base^(2 i / head_dim).
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(length).float(), 1 / model.rotary_base**exponents)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats of the predictions in ids `[batch, seq + 1]`."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def plain_optimizers(model: nn.Module, config: Config) -> list[torch.optim.Optimizer]:
    """Return PyTorch's own optimizers for a config, at its constant learning rate.

    Returns:
        Fused AdamW for every weight; or Muon for the matrices of the layers, whole ones also of
        queries and keys, and fused AdamW for the rest.
    """
    settings = config.optimizer
    rate, decay = settings.learning_rate, settings.weight_decay
    groups = parameter_groups(model, decay)
    matrices: list[torch.Tensor] = []
    of_kind = settings.of_kind
    if isinstance(of_kind, Muon):
        layer_weights = {
            name: weight for name, weight in model.named_parameters() if "blocks." in name
        }
        matrices = [weight for weight in layer_weights.values() if weight.ndim == 2]
        muon_ids = {id(weight) for weight in matrices}
        for group in groups:
            group["params"] = [weight for weight in group["params"] if id(weight) not in muon_ids]
    adamw: dict[str, Any] = {"lr": rate, "betas": settings.betas, "eps": settings.eps}
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, **adamw, fused=True)]
    if isinstance(of_kind, Muon):
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=rate,
                weight_decay=decay,
                momentum=of_kind.momentum,
                nesterov=of_kind.nesterov,
                ns_steps=of_kind.newton_schulz_steps,
                adjust_lr_fn=SCALES[of_kind.update_scale],
            )
        )
    return optimizers


SCALES = {"match_adamw": "match_rms_adamw", "spectral": "original"}
"""PyTorch's names of Muon's factors."""
