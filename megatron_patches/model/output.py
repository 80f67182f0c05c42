"""Output layer with the cross-entropy of its logits, without a copy of all logits in fp32.

    loss = log Σ_v exp(x·w_v) − x·w_y,      ∂loss/∂(x·w_v) = p_v − 1[v = y]

megatron-core converts all logits to fp32, and keeps the softmax in that type for backward. Two
forms avoid both:

    in_place   the logits stay in the compute dtype and become their own gradient, some tokens at a
               time
    chunked    logits exist for some tokens at a time only, and are recomputed in backward (a fourth
               product where there are three)

In both, the exponentials and their sum over the vocabulary are taken in fp32, and the gradient of
each token's logits is scaled by the gradient of its loss, so that sums, means and masked losses are
all exact. Compiled (`OutputLayer.compile_passes`), `in_place` is two kernels over all logits, which
read them twice and write them once: what is in fp32 stays on the chip. Tensor-parallel ranks, each
with a part of the vocabulary, exchange two numbers a token, in one collective where megatron-core
has three. The collectives of the product itself are megatron-core's.

Two things change the gradient, and are computed with it:

    soft cap   logits are c tanh(l / c), whose derivative is 1 − (logit / c)²
    z-loss     z (log Σ_v exp logit_v)² a token, which adds 2 z (log Σ exp) p_v to the gradient; the
               losses that are returned are without it

Version-sensitive: takes the place of megatron-core's ColumnParallelLinear at the end of a GPTModel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron_patches.engine.collectives import (
    finish,
    finish_input_grad,
    start_all_gather,
    start_input_grad,
)
from megatron_patches.recipe.tensors import LOGITS_AT_A_TIME

CrossEntropy = Literal["megatron", "in_place", "chunked"]


@dataclass(frozen=True)
class LogitTerms:
    """Soft cap and z-loss of the logits.

    Attributes:
        softcap: c of c tanh(l / c); None: logits are as they are.
        z_loss: factor of the square of log Σ exp; 0: none.
    """

    softcap: float | None = None
    z_loss: float = 0.0

    @property
    def plain(self) -> bool:
        """Return whether logits are neither capped nor penalised."""
        return self.softcap is None and self.z_loss == 0.0

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits between −c and c, in fp32 or wider."""
        if self.softcap is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.tanh(wide / self.softcap) * self.softcap

    def slope(self, capped: torch.Tensor) -> torch.Tensor:
        """Return the derivative of the soft cap, from the capped logits."""
        assert self.softcap is not None
        return 1 - (capped / self.softcap).square()


class OutputLayer(ColumnParallelLinear):
    """Output layer: logits of this rank's part of the vocabulary, or the cross-entropy of labels.

    Args:
        pieces: number of rows that stand for pieces. Further rows have the logit −∞, are never
            predicted and get no gradient. Every rank has some pieces.
        tied: the layer takes the embedding's weight with every call, and has none.
        in_place: use the form `in_place` of this file's docstring; False: `chunked`.

    Attributes:
        log_normalisers: log Σ exp `[batch, seq]` of the last losses with gradients, where there is
            a z-loss, until `take_log_normalisers`; else None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        pieces: int,
        tied: bool,
        tp_group: dist.ProcessGroup,
        in_place: bool,
        terms: LogitTerms,
    ) -> None:
        super().__init__(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=tied,
            tp_group=tp_group,
        )
        self.in_place = in_place
        self.terms = terms
        self.log_normalisers: torch.Tensor | None = None
        self.passes: tuple[Callable[..., torch.Tensor], Callable[..., None]] | None = None
        part = vocab_size // tp_group.size()
        # Padding rows are the last of the vocabulary, so only the last rank has any.
        self.pieces = min(part, pieces - tp_group.rank() * part)

    def compile_passes(self, backend: str) -> None:
        """Compute losses that need gradients by compiled passes from now on, if `in_place`."""
        if self.in_place:
            settings: Any = {"fullgraph": True, "backend": backend, "dynamic": False}
            self.passes = (
                torch.compile(_log_sum, **settings),
                torch.compile(_to_gradient, **settings),
            )

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map `[seq(/tp), batch, hidden]` to logits `[seq, batch, vocabulary/tp]`, and no bias.

        With labels, `[batch, seq]` ids, the result is the losses, `[batch, seq]` nats in fp32.

        Args:
            input_: `[seq(/tp), batch, hidden]`.
            weight: `[rows of this rank, hidden]`; None: the layer's own.
            runtime_gather_output: argument of megatron-core; must not be set.
            labels: `[batch, seq]` ids; None: return logits.
        """
        if labels is None:
            logits, bias = super().forward(input_, weight, runtime_gather_output)
            return _without_padding(self.terms.capped(logits).to(logits.dtype), self.pieces), bias
        weight = self.weight if weight is None else weight
        losses, normalisers = _TokenLosses.apply(
            input_,
            weight,
            labels.t().flatten(),
            self.tp_group,
            self.sequence_parallel,
            self.in_place,
            self.pieces,
            self.passes,
            self.terms,
            torch.is_grad_enabled(),
        )
        if self.terms.z_loss and losses.requires_grad:
            self.log_normalisers = normalisers.view(labels.size(1), labels.size(0)).t()
        return losses.view(labels.size(1), labels.size(0)).t().contiguous(), None

    def take_log_normalisers(self) -> torch.Tensor | None:
        """Return log Σ exp `[batch, seq]` of the last losses in fp64, and forget it."""
        taken, self.log_normalisers = self.log_normalisers, None
        return taken


class _TokenLosses(torch.autograd.Function):
    """Losses and log Σ exp `[tokens]` of x, W and labels.

    x is `[seq(/tp), batch, hidden]`, W `[vocabulary/tp, hidden]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        tp_group: dist.ProcessGroup,
        sequence_parallel: bool,
        in_place: bool,
        pieces: int,
        passes: tuple[Callable[..., torch.Tensor], Callable[..., None]] | None,
        terms: LogitTerms,
        with_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local = hidden_states
        if sequence_parallel:
            hidden_states = finish(*start_all_gather(local, tp_group))
        inputs = hidden_states.flatten(0, 1)
        owned, columns = _own_labels(labels, weight.size(0), tp_group.rank())
        logits = inputs @ weight.t() if in_place else None
        if passes is None and not terms.plain:
            passes = _log_sum_in_slices, _to_gradient_in_slices
        if logits is not None and passes is not None and with_gradients:
            # Before the passes, which overwrite the logits by their gradient.
            at_label = terms.capped(logits.gather(1, columns[:, None])[:, 0].double())
            normaliser = own_part = passes[0](logits, pieces, terms).double()
        else:
            at_label, log_share = _in_slices(
                inputs,
                weight,
                logits=logits,
                columns=columns,
                pieces=pieces,
                with_gradients=with_gradients,
                terms=terms,
            )
            normaliser = own_part = at_label - log_share
        if tp_group.size() > 1:
            normaliser, at_label = _over_ranks(normaliser, at_label * owned, tp_group)
        if logits is not None and with_gradients:
            if passes is None:
                _finish_gradient(
                    logits, own_part - normaliser, owned=owned, columns=columns, tp_group=tp_group
                )
            else:
                passes[1](
                    logits, normaliser, owned=owned, columns=columns, pieces=pieces, terms=terms
                )
        ctx.save_for_backward(
            local, weight, normaliser if logits is None else logits, owned, columns
        )
        ctx.tp_group, ctx.sequence_parallel = tp_group, sequence_parallel
        ctx.in_place, ctx.pieces, ctx.terms = in_place, pieces, terms
        ctx.mark_non_differentiable(normaliser)
        ctx.set_materialize_grads(False)  # else backward would fill zeros for it
        losses = (normaliser - at_label).to(torch.promote_types(inputs.dtype, torch.float32))
        return losses, normaliser

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, loss_grad: torch.Tensor, unused: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_states, weight, saved, owned, columns = ctx.saved_tensors
        gather = None
        if ctx.sequence_parallel:
            hidden_states, gather = start_all_gather(hidden_states, ctx.tp_group)
        # `in_place` has saved the gradient for losses of gradient 1; `scale` is their true one.
        scale, weight_grad = loss_grad[:, None], None
        if ctx.in_place:
            input_grad = _scaled(saved @ weight, scale)
        else:
            hidden_states = finish(hidden_states, gather)
            input_grad, weight_grad = _recomputed_gradients(
                hidden_states.flatten(0, 1),
                weight,
                normaliser=saved,
                owned=owned,
                columns=columns,
                scale=scale,
                pieces=ctx.pieces,
                terms=ctx.terms,
            )
        input_grad, reduction = start_input_grad(
            input_grad.view_as(hidden_states), ctx.tp_group, ctx.sequence_parallel
        )
        if weight_grad is None:
            hidden_states = finish(hidden_states, gather)
            weight_grad = saved.t() @ _scaled(hidden_states.flatten(0, 1), scale)
        input_grad = finish_input_grad(input_grad, reduction, ctx.tp_group)
        return input_grad, weight_grad, *(None,) * 8


def _in_slices(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor | None,
    columns: torch.Tensor,
    pieces: int,
    with_gradients: bool,
    terms: LogitTerms,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels' logits (fp64) and log-probabilities in this rank's part, `[tokens]`.

    Logits that are given become these probabilities, if `with_gradients`.
    """
    wide = torch.promote_types(inputs.dtype, torch.float32)
    label_dtype = inputs.dtype if terms.softcap is None else wide
    at_label = inputs.new_empty(len(inputs), 1, dtype=label_dtype)
    log_share = torch.empty_like(at_label, dtype=wide)
    for rows in _slices(len(inputs), weight.size(0)):
        slice_logits = inputs[rows] @ weight.t() if logits is None else logits[rows]
        slice_logits = _without_padding(terms.capped(slice_logits), pieces)
        log_softmax = slice_logits.log_softmax(-1, dtype=wide)
        torch.gather(slice_logits, 1, columns[rows, None], out=at_label[rows])
        torch.gather(log_softmax, 1, columns[rows, None], out=log_share[rows])
        if logits is not None and with_gradients:
            torch.exp(log_softmax, out=slice_logits)
    return at_label[:, 0].double(), log_share[:, 0]


def _log_sum(logits: torch.Tensor, pieces: int, terms: LogitTerms) -> torch.Tensor:
    """Return log Σ exp over the columns of pieces, `[tokens]`; may be compiled."""
    wide = logits[:, :pieces].to(torch.promote_types(logits.dtype, torch.float32))
    wide = terms.capped(wide)
    # Shifted by the largest logit, so that no exponential overflows.
    peak = wide.amax(-1, keepdim=True)
    return (peak + (wide - peak).exp().sum(-1, keepdim=True).log())[:, 0]


def _to_gradient(
    logits: torch.Tensor,
    normaliser: torch.Tensor,
    owned: torch.Tensor,
    columns: torch.Tensor,
    pieces: int,
    terms: LogitTerms,
) -> None:
    """Turn logits into their gradient, p − 1[v = y] without extra terms; may be compiled."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    column_numbers = torch.arange(logits.size(1), device=logits.device)
    capped = terms.capped(logits.to(wide))
    normaliser = normaliser.to(wide)[:, None]
    share = (capped - normaliser).exp()
    if terms.z_loss:
        share = share * (1 + 2 * terms.z_loss * normaliser)
    share = share - ((column_numbers == columns[:, None]) & owned[:, None]).to(wide)
    if terms.softcap is not None:
        share = share * terms.slope(capped)
    logits.copy_(torch.where(column_numbers < pieces, share, 0.0))


def _log_sum_in_slices(logits: torch.Tensor, pieces: int, terms: LogitTerms) -> torch.Tensor:
    """Return log Σ exp as `_log_sum`, with few logits in fp32 at a time."""
    return torch.cat([_log_sum(logits[rows], pieces, terms) for rows in _slices(*logits.shape)])


def _to_gradient_in_slices(
    logits: torch.Tensor,
    normaliser: torch.Tensor,
    owned: torch.Tensor,
    columns: torch.Tensor,
    pieces: int,
    terms: LogitTerms,
) -> None:
    """Turn logits into their gradient as `_to_gradient`, with few in fp32 at a time."""
    for rows in _slices(*logits.shape):
        _to_gradient(
            logits[rows],
            normaliser[rows],
            owned=owned[rows],
            columns=columns[rows],
            pieces=pieces,
            terms=terms,
        )


def _slices(tokens: int, vocabulary: int) -> Iterator[slice]:
    length = max(1, LOGITS_AT_A_TIME // vocabulary)
    for first in range(0, tokens, length):
        yield slice(first, min(tokens, first + length))


def _without_padding(logits: torch.Tensor, pieces: int) -> torch.Tensor:
    """Set the logits of rows that are no pieces to −∞, in place."""
    if pieces < logits.size(-1):
        logits[..., pieces:] = -torch.inf
    return logits


def _own_labels(
    labels: torch.Tensor, vocabulary: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (mask of labels in this rank's part of the vocabulary, their columns there)."""
    columns = labels - rank * vocabulary
    owned = (columns >= 0) & (columns < vocabulary)
    return owned, columns.clamp(0, vocabulary - 1)


def _over_ranks(
    normaliser: torch.Tensor, at_label: torch.Tensor, tp_group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine log Σ exp and the label's logit (0 where another rank has it) of all ranks' parts."""
    rank_terms = torch.stack((normaliser, at_label))
    all_terms = rank_terms.new_empty((tp_group.size(), *rank_terms.shape))
    dist.all_gather_into_tensor(all_terms.view(-1, rank_terms.size(1)), rank_terms, group=tp_group)
    # Summed in the order of the ranks, on every rank: the same bits everywhere.
    return all_terms[:, 0].logsumexp(dim=0), all_terms[:, 1].sum(dim=0)


def _finish_gradient(
    probabilities: torch.Tensor,
    log_share: torch.Tensor,
    owned: torch.Tensor,
    columns: torch.Tensor,
    tp_group: dist.ProcessGroup,
) -> None:
    """Turn probabilities within this rank's part into p − 1[v = y] of all, in place.

    `log_share` is `[tokens]`, the log of the probability of this rank's part.
    """
    if tp_group.size() > 1:
        share = log_share.exp().to(torch.promote_types(probabilities.dtype, torch.float32))
        torch.mul(probabilities, share[:, None], out=probabilities)
    probabilities.scatter_add_(1, columns[:, None], -owned[:, None].to(probabilities.dtype))


def _scaled(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply each row by a number, rounding once to the type of the rows."""
    return torch.mul(rows, scale, out=torch.empty_like(rows))


def _recomputed_gradients(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    normaliser: torch.Tensor,
    owned: torch.Tensor,
    columns: torch.Tensor,
    scale: torch.Tensor,
    pieces: int,
    terms: LogitTerms,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of inputs `[tokens, hidden]` and weight, summed in fp32 over slices."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    input_grad = torch.empty_like(inputs)
    weight_grad = torch.zeros_like(weight, dtype=wide)
    for rows in _slices(len(inputs), weight.size(0)):
        exponents = terms.capped((inputs[rows] @ weight.t()).to(wide))
        # Of the capped logits, which the next lines overwrite.
        slope = None if terms.softcap is None else terms.slope(exponents)
        exponents = _without_padding(exponents, pieces)
        exponents -= normaliser[rows, None]
        logits_grad = exponents.exp_().mul_(scale[rows])
        if terms.z_loss:
            logits_grad *= (1 + 2 * terms.z_loss * normaliser[rows, None]).to(wide)
        logits_grad.scatter_add_(1, columns[rows, None], -(owned[rows, None] * scale[rows]))
        if slope is not None:
            logits_grad *= slope
        logits_grad = logits_grad.to(weight.dtype)
        torch.mm(logits_grad, weight, out=input_grad[rows])
        weight_grad += logits_grad.t() @ inputs[rows]
    return input_grad, weight_grad.to(weight.dtype)
