"""Auxiliary losses: terms that modules add to the training loss, apart from the language-model loss.

A module with such a term sets its attribute `auxiliary_loss` to (name, term) in every forward that has
gradients. The term is this tensor-parallel rank's own part. The training loop adds the term to the loss of
every micro batch, and the mean over micro batches and data-parallel ranks then counts the term once an
optimizer step.
"""

from __future__ import annotations

import torch


def take_auxiliary_losses(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Collect the terms of the last forward as {name: sum over the modules}, and clear them in their modules.

    The sums are scalars with gradients, with the same names on every rank.
    """
    losses: dict[str, torch.Tensor] = {}
    for module in model.modules():
        auxiliary = getattr(module, "auxiliary_loss", None)
        if auxiliary is not None:
            name, term = auxiliary
            losses[name] = losses[name] + term if name in losses else term
            module.auxiliary_loss = None  # type: ignore[assignment]
    return losses
