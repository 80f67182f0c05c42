"""Terms that modules add to the training loss, apart from the language-model loss.

A module with such a term sets its attribute `auxiliary_loss` to (name, term) in every forward that has
gradients. The term is this tensor-parallel rank's own part, once per optimizer step however many micro
batches there are: the training loop adds it to the loss of every micro batch, and the mean over micro batches
and data-parallel ranks leaves it once.
"""

from __future__ import annotations

import torch


def take_auxiliary_losses(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """{name: sum over the modules of the last forward's terms}, scalars with gradients, and forget them.

    The same names on every rank. Empty for a model without such terms.
    """
    found: dict[str, torch.Tensor] = {}
    for module in model.modules():
        left = getattr(module, "auxiliary_loss", None)
        if left is not None:
            name, term = left
            found[name] = found[name] + term if name in found else term
            module.auxiliary_loss = None  # type: ignore[assignment]
    return found
