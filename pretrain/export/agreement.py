"""The exported model's logits beside our own, in float32 on the same held-out tokens.

Both models compute with the stored weights cast to float32: what is left is the order of additions, and what
folding or a narrower --dtype has rounded. Neither is in memory while the other is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from pretrain.errors import UserError
from pretrain.export.trained_run import TrainedRun

_SEQUENCES = 2
_LONGEST = 2048
_POSITIONS = 128
"""Of a sequence, evenly spread, whose logits are kept: each has as many as the vocabulary has tokens."""


@dataclass(frozen=True)
class LogitAgreement:
    """The largest |difference| of a logit, the largest |logit|, and how many were compared.

    same_token: the part of positions at which both models hold the same token for the likeliest.
    """

    difference: float
    largest: float
    compared: int
    same_token: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def held_out_tokens(run: TrainedRun) -> torch.Tensor:
    """`[sequences, length]` int64, of the run's sequence length as far as that is affordable."""
    length = run.config.data.sequence_length
    samples = run.blend.validation_samples(length, _SEQUENCES)
    blocks = np.concatenate([source.blocks(np.arange(len(source))) for source in samples.values()])
    return torch.from_numpy(blocks[:_SEQUENCES, : min(length, _LONGEST)])


def own_logits(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """Of the run's model: `[sequences, positions, vocabulary]` float32. The model is left in float32."""
    model.float()
    positions = torch.arange(tokens.size(1)).expand_as(tokens[:1])
    device = next(model.parameters()).device
    kept = []
    with torch.no_grad():
        for sequence in tokens:
            logits = model(sequence[None].to(device), positions.to(device), None)
            kept.append(logits[0, _kept_positions(tokens)].float().cpu())
    return torch.stack(kept)


def compare_logits(directory: Path, tokens: torch.Tensor, own: torch.Tensor, custom: bool) -> LogitAgreement:
    """Load the export as a user would and compare it with `own_logits` of the same tokens.

    Args:
        custom: the export has code of its own.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(directory), dtype=torch.float32, trust_remote_code=custom
    ).eval()
    difference, same = 0.0, 0
    with torch.no_grad():
        for sequence, ours in zip(tokens, own, strict=True):
            theirs = model(sequence[None]).logits[0, _kept_positions(tokens)]
            difference = max(difference, float((theirs - ours).abs().max()))
            same += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
    return LogitAgreement(
        difference, float(own.abs().max()), own.numel(), same / (own.numel() // own.size(-1))
    )


def require_agreement(found: LogitAgreement, allowed: float) -> None:
    """Refuse an export that computes something else.

    Raises:
        UserError: the logits differ by more than `allowed`, or are not numbers.
    """
    if not found.difference <= allowed:
        raise UserError(
            f"the exported model's logits differ from the run's by up to {found.difference:.3g} (of "
            f"{found.largest:.3g}; {allowed:.3g} is allowed), so nothing was exported; please report it with "
            "the run's config.yaml and environment.json"
        )


def _kept_positions(tokens: torch.Tensor) -> torch.Tensor:
    length = tokens.size(1)
    return torch.linspace(0, length - 1, min(length, _POSITIONS)).round().long()
