"""Our rotation against megatron-core's, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig

from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.attention.scores import CausalDotProductAttention
from tests.megatron_patches.models import HEAD_DIM, build

LENGTH, BATCH, HEADS, BASE = 300, 2, 3, 500.0


def theirs(heads: torch.Tensor) -> torch.Tensor:
    head_dim = heads.size(-1)
    config = TransformerConfig(num_layers=1, hidden_size=head_dim, num_attention_heads=1)
    angles = RotaryEmbedding(
        head_dim, rotary_percent=1.0, rotary_base=int(BASE), cp_group=dist.group.WORLD
    )
    return apply_rotary_pos_emb(
        heads, angles.get_emb(heads.size(0)), config, cp_group=dist.group.WORLD
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.float64, 1e-12), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("head_dim", [6, 64])
def test_heads_turn_as_megatron_cores(
    one_rank: dist.ProcessGroup, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    # A slice of a fused projection, as the core attention gets it.
    fused = torch.randn(LENGTH, BATCH, HEADS, 3 * head_dim, generator=generator).to(dtype)
    ours = fused[..., :head_dim].detach().requires_grad_()
    reference = ours.detach().clone().requires_grad_()
    rotated = RotaryAngles(head_dim, BASE).rotate(ours)
    expected = theirs(reference)
    torch.testing.assert_close(rotated, expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn(expected.shape, generator=generator).to(dtype)
    rotated.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=tolerance, atol=tolerance)


def test_angles_follow_length_and_type() -> None:
    angles = RotaryAngles(8, BASE)
    long = torch.randn(9, 1, 2, 8, dtype=torch.float64)
    short = angles.rotate(long[:4])
    assert torch.equal(angles.rotate(long)[:4], short)  # longer than what was kept
    assert torch.equal(angles.rotate(long[:4]), short)  # shorter
    assert angles.rotate(long.float()).dtype == torch.float32
    with torch.inference_mode():  # what is made there must serve training later
        other = RotaryAngles(8, BASE)
        other.rotate(long)
    other.rotate(long.clone().requires_grad_()).sum().backward()


def test_the_layers_of_a_model_share_one(one_rank: dist.ProcessGroup) -> None:
    angles = RotaryAngles(HEAD_DIM, BASE)
    cores = [
        layer.self_attention.core_attention
        for layer in build("vanilla", rotary=angles).decoder.layers
    ]
    assert len(cores) > 1
    assert all(
        isinstance(core, CausalDotProductAttention) and core.rotary is angles for core in cores
    )
