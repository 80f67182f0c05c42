"""Short causal convolution of each channel, within a sample and within its documents.

    y_t = Σ_j c_j ∘ x_(t−j),   j = 0 … taps − 1,   x_(t−j) = 0 before the sample or document begins

Each tap takes one pass forward and two backward; no copy of shifted inputs is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from megatron_patches.engine.documents import Documents, Visible

Reach = tuple[torch.Tensor, ...] | None
"""For j = 1, 2, … a mask `[seq − j, batch, 1, 1]` bool: token t ≥ j may look back at token t − j.

None: always, within the sample.
"""


def reach_of(visible: Visible, taps: int) -> Reach:
    """Return the masks of earlier tokens that take part, from an attention mask.

    Args:
        visible: attention mask in any of its forms.
        taps: tokens that a convolution takes in, the current one included.

    Returns:
        A mask for each of the taps − 1 earlier tokens; None: no token is out of reach.
    """
    if visible is None:
        return None
    masks = []
    for back in range(1, taps):
        if isinstance(visible, Documents):
            length = visible.starts.size(1)
            index = torch.arange(min(back, length), length, device=visible.starts.device)
            in_reach = visible.starts[:, back:] <= index - back
        else:
            # Entry (t, t − back) of the mask, for all t: whether t must not see that token.
            in_reach = ~visible[:, 0].diagonal(-back, dim1=1, dim2=2)
        masks.append(in_reach.t()[:, :, None, None])
    return tuple(masks)


def convolve(inputs: torch.Tensor, taps: torch.Tensor, reach: Reach = None) -> torch.Tensor:
    """Convolve each channel of each head with its own taps.

    Args:
        inputs: `[seq, batch, heads, head_dim]`.
        taps: `[heads * head_dim, taps]`, the tap of the current token first.
        reach: masks of the earlier tokens that take part, from `reach_of`.

    Returns:
        The shape and data type of `inputs`.
    """
    if (
        not reach
        and inputs.numel()
        and inputs.device.type == "cpu"
        and inputs.dtype == torch.float32
    ):
        return _convolve_whole_samples(inputs, taps)
    # Copied, because a tap's values next to each other are read faster.
    by_tap = taps.t().contiguous().view(taps.size(1), *inputs.shape[-2:])
    convolved: torch.Tensor = _Convolve.apply(inputs, by_tap, *(reach or ()))
    return convolved


def _convolve_whole_samples(inputs: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Convolve with oneDNN, as a channels-last image `[1, channels, seq, batch]`.

    The image is padded in front instead of cut behind: its gradient then has no gaps and needs no
    copy. Takes 0.4 of the loop's time.
    """
    # A view in channels-last layout, which oneDNN takes without a copy.
    image = inputs.flatten(2).unsqueeze(0).permute(0, 3, 1, 2)
    padded = functional.pad(image, (0, 0, taps.size(1) - 1, 0))
    convolved = functional.conv2d(padded, taps.flip(1)[:, None, :, None], groups=len(taps))
    return convolved.permute(0, 2, 3, 1).view_as(inputs)


class _Convolve(torch.autograd.Function):
    """Σ_j c_j ∘ x_(t−j) of x `[seq, batch, heads, head_dim]` and c `[taps, heads, head_dim]`."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, taps: torch.Tensor, *reach: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, taps, *reach)
        outputs = inputs * taps[0]
        for back in range(1, min(len(taps), len(inputs))):
            earlier = inputs[:-back]
            if reach:
                earlier = earlier * reach[back - 1]
            outputs[back:].addcmul_(earlier, taps[back])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        inputs, taps, *reach = ctx.saved_tensors
        input_grad = grad * taps[0]
        tap_grads = [_channel_sums(grad, inputs)]
        for back in range(1, len(taps)):
            later = grad[back:]
            if reach and len(later):
                later = later * reach[back - 1]
            input_grad[: len(later)].addcmul_(later, taps[back])
            tap_grads.append(_channel_sums(later, inputs[: len(later)]))
        return input_grad, torch.stack(tap_grads), *[None] * len(reach)


def _channel_sums(grad: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return Σ over tokens of grad ∘ inputs: `[heads, head_dim]`."""
    return (grad * inputs).sum((0, 1))
