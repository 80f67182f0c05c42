"""The comparison of an export's logits with the run's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is of the extra export")

from pretrain.errors import UserError
from pretrain.export.agreement import compare_logits, require_agreement
from tests.tiny_exports import tiny_language_model

TOKENS = torch.arange(12).view(2, 6)


def test_equal_logits_agree(tmp_path: Path) -> None:
    model = tiny_language_model(rotary=True).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = torch.cat([model(sequence[None]).logits for sequence in TOKENS])
    agreement = compare_logits(tmp_path, TOKENS, logits, custom=False)
    assert (agreement.difference, agreement.same_token) == (0.0, 1.0)
    assert (agreement.largest, agreement.compared) == (float(logits.abs().max()), logits.numel())
    require_agreement(agreement, 0.0)
    logits[1, 5, 3] += 0.5
    assert compare_logits(tmp_path, TOKENS, logits, custom=False).difference == pytest.approx(0.5)


def test_logits_that_are_not_numbers_never_agree(tmp_path: Path) -> None:
    model = tiny_language_model(rotary=True)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    agreement = compare_logits(
        tmp_path, TOKENS, torch.zeros(2, 6, model.config.vocab_size), custom=False
    )
    with pytest.raises(UserError, match="differ from the run's by up to nan"):
        require_agreement(agreement, 1.0)
