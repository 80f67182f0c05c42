"""The peer of a training step: the vanilla GPT in plain PyTorch, as nanoGPT is written.

Fused query-key-value projection, PyTorch's own attention, fused AdamW, gradient clipping: nothing
around it, no ranks, no engine. From the same weights its losses are ours
(tests/distributed/test_speed.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_patches.engine.freeze import parameter_groups
from pretrain.config.tree import Config


class Block(nn.Module):
    """A pre-LN layer; activations `[batch, seq, hidden]`."""

    def __init__(self, hidden: int, heads: int, ffn: int, epsilon: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(hidden, epsilon)
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.norm_mlp = nn.LayerNorm(hidden, epsilon)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Return the layer's output.

        Args:
            x: `[batch, seq, hidden]`.
            cosine: of the rotary angles, `[seq, head_dim / 2]`.
            sine: of the same angles.

        Returns:
            `[batch, seq, hidden]`.
        """
        batch, length, hidden = x.shape
        mixed = self.query_key_value(self.norm_attention(x)).view(
            (batch, length, 3, self.heads, -1)
        )
        query, key, value = mixed.permute((2, 0, 3, 1, 4))
        query = rotated(query, cosine, sine)
        key = rotated(key, cosine, sine)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(context.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


def rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn heads by their rotary positions.

    Args:
        heads: `[…, seq, head_dim]`.
        cosine: of the angles, `[seq, head_dim / 2]`.
        sine: of the same angles.

    Returns:
        Of the shape of `heads`.
    """
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)


class PlainGPT(nn.Module):
    """The vanilla model of a config: rotary positions, tied embeddings, no dropout, no groups."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        model, length = config.model, config.data.sequence_length
        assert model.position_embedding == "rope" and model.tied_embeddings and not model.dropout
        assert config.num_query_groups == model.num_attention_heads
        hidden, heads, epsilon = (
            model.hidden_size,
            model.num_attention_heads,
            model.layernorm_epsilon,
        )
        self.embedding = nn.Embedding(model.vocab_size, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, heads, config.ffn_hidden_size, epsilon) for _ in range(model.num_layers)
        )
        self.norm = nn.LayerNorm(hidden, epsilon)
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(length).float(), 1 / model.rotary_base**exponents)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of every next-token prediction in `[batch, seq + 1]`, nats."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def plain_adamw(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """Return the config's AdamW, fused, at its constant learning rate.

    Args:
        model: whose parameters it updates.
        config: of the optimizer.
    """
    return torch.optim.AdamW(
        parameter_groups(model, config.optimizer.weight_decay),
        lr=config.optimizer.learning_rate,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        fused=True,
    )
