"""Comparison of the exported model's logits with the run's own, on the same held-out tokens.

Both models compute with the stored weights cast to float32, so the remaining differences come from
the order of additions and from rounding by folded adapters or a narrower --dtype. The two models
are never in memory at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from pretrain.errors import UserError
from pretrain.export.trained_run import TrainedRun

_SEQUENCES = 2
_LONGEST = 2048
_POSITIONS = 128
"""Positions of a sequence, evenly spread, whose logits are compared; others would take much
memory."""


@dataclass(frozen=True)
class LogitAgreement:
    """The differences between two models' logits.

    Attributes:
        difference: Largest |difference| of a logit.
        largest: Largest |logit|.
        compared: Number of logits.
        same_token: Fraction of positions at which both have the same most likely token.
    """

    difference: float
    largest: float
    compared: int
    same_token: float


def held_out_tokens(run: TrainedRun) -> torch.Tensor:
    """Return held-out tokens `[sequences, length]` int64; length is the run's, at most 2048."""
    length = run.config.data.sequence_length
    samples = run.blend.validation_samples(length, _SEQUENCES)
    blocks = np.concatenate([source.blocks(np.arange(len(source))) for source in samples.values()])
    return torch.from_numpy(blocks[:_SEQUENCES, : min(length, _LONGEST)])


def own_logits(model: GPTModel, tokens: torch.Tensor, pieces: int) -> torch.Tensor:
    """Return the run's logits; the model is cast to float32.

    Args:
        tokens: Ids `[sequences, length]`.
        pieces: Vocabulary size of the tokenizer, without the embedding's padding rows.

    Returns:
        `[sequences, positions, pieces]` float32.
    """
    model.float()
    positions = torch.arange(tokens.size(1)).expand_as(tokens[:1])
    device = next(model.parameters()).device

    def logits(sequence: torch.Tensor) -> torch.Tensor:
        return model(sequence.to(device), positions.to(device), None)[..., :pieces].float().cpu()

    return _logits(logits, tokens)


def compare_logits(
    directory: Path, tokens: torch.Tensor, run_logits: torch.Tensor, custom: bool
) -> LogitAgreement:
    """Load the export as a user would and compare its logits with the run's.

    Args:
        tokens: Ids `[sequences, length]`.
        run_logits: The run's logits for the same tokens, from `own_logits`.
        custom: Whether the export has code of its own, which is then trusted.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(directory), dtype=torch.float32, trust_remote_code=custom, local_files_only=True
    ).eval()
    theirs = _logits(lambda sequence: model(sequence).logits, tokens)
    return LogitAgreement(
        difference=float((theirs - run_logits).abs().max()),
        largest=float(run_logits.abs().max()),
        compared=run_logits.numel(),
        same_token=float((theirs.argmax(-1) == run_logits.argmax(-1)).double().mean()),
    )


def require_agreement(agreement: LogitAgreement, allowed: float) -> None:
    """Refuse an export whose logits differ from the run's.

    Args:
        allowed: Largest allowed difference of a logit.

    Raises:
        UserError: the logits differ by more than `allowed`, or are not numbers.
    """
    if not agreement.difference <= allowed:
        raise UserError(
            "the exported model's logits differ from the run's by up to "
            f"{agreement.difference:.3g} (of {agreement.largest:.3g}; {allowed:.3g} is allowed), "
            "so nothing was exported; please report it with the run's config.yaml and "
            "environment.json"
        )


def _logits(compute: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Return `[sequences, positions, vocabulary]` at the compared positions."""
    length = tokens.size(1)
    kept = torch.linspace(0, length - 1, min(length, _POSITIONS)).round().long()
    with torch.no_grad():
        return torch.stack([compute(sequence[None])[0, kept] for sequence in tokens])
