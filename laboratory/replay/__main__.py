"""Rank of a replay: `python -m laboratory.replay CONFIG ANSWER STEP [KEEP...]`.

`prepare.replayed` starts it. The steps are the training loop's own `train_step`. Hooks on the last
one keep the losses of its tokens and the gradients that the optimizer gets; neither changes a bit
of the step. Rank 0 writes the answer.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pretrain.runs.position import Position
    from pretrain.training.open_run import Run


def main(config_file: str, answer: Path, step: int, *keep: int) -> None:
    """Replay a step.

    Args:
        config_file: Resolved configuration of the step.
        keep: Steps to save a checkpoint after.
        answer: JSON file to write, {begins_after: step, trace: [[step, loss, gradient norm]], …}
            with `Probe.answer` of the step.
    """
    from data_pipeline.io.files import write_json
    from megatron_patches.engine.compat import prepare_imports
    from pretrain.config.load import load_config
    from pretrain.ranks.devices import ask_for
    from pretrain.ranks.signals import StopSignals

    config = load_config(config_file)
    ask_for(config.run.device)  # before anything looks for GPUs
    prepare_imports()
    from pretrain.training.loop import train_step
    from pretrain.training.open_run import open_run

    with open_run(config) as run:
        position = run.position
        trace = []
        step_answer: dict[str, Any] = {}
        samples = config.data.global_batch_size
        while position.step < step:
            run.enter_phase_of(position.step + 1)
            probe = Probe(run, position) if position.step + 1 == step else None
            result, _ = train_step(run, position, StopSignals())  # of which none was installed
            loss = result.loss
            norm = result.gradient_norm
            step_answer = probe.answer(norm) if probe is not None else {}
            position = position.after_step(
                samples, config.tokens_per_step, loss, norm, updated=result.updated
            )
            trace.append([position.step, loss, norm])
            if position.step in keep:
                run.save(position, in_background=False)
                run.commit(good=True)
        if run.context.is_first:
            write_json(answer, {"begins_after": run.position.step, "trace": trace, **step_answer})


class Probe:
    """Hooks on one step: losses of its tokens, squares of its gradients.

    Args:
        run: The open run.
        position: Position before the step.
    """

    def __init__(self, run: Run, position: Position) -> None:
        from pretrain.checkpoint.slices import slices_of_rank

        self._run, self._position = run, position
        self._losses: list[torch.Tensor] = []
        self._squares: dict[str, float] = {}
        # Before the step: while DeepSpeed steps AdamW, some of its groups are out of sight.
        self._slices = slices_of_rank(run.engine)
        self._hooks = [
            run.engine.module.register_forward_hook(self._take_losses),
            run.engine.basic_optimizer.register_step_pre_hook(self._take_gradients),
        ]

    def _take_losses(self, module: Any, inputs: Any, losses: torch.Tensor) -> None:
        self._losses.append(losses.detach().float().cpu())

    def _take_gradients(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Keep the squares of the slices whose gradient is there now: ZeRO steps group by group."""
        for weight_slice in self._slices:
            if weight_slice.flat.grad is not None:
                part = (
                    weight_slice.flat.grad.detach()
                    .view(-1)
                    .narrow(0, weight_slice.offset, weight_slice.length)
                )
                self._squares[weight_slice.name] = float(part.double().square().sum())

    def answer(self, gradient_norm: float) -> dict[str, Any]:
        """Return {documents, gradient_norms} of the step (collective; the same on every rank)."""
        import torch.distributed as dist

        for hook in self._hooks:
            hook.remove()
        engine = self._run.engine
        context = self._run.context
        weights = dict(engine.module.named_parameters())
        first = context.tensor_parallel_rank == 0
        # Each square once: replicas have the same gradients, but under ZeRO each its own slices.
        counted = engine.zero_optimization_stage() > 0 or context.data_parallel_rank == 0
        rank_squares = {
            name: square
            for name, square in self._squares.items()
            if counted and (first or getattr(weights[name], "tensor_model_parallel", False))
        }
        gathered: list[Any] = [None] * context.world_size
        dist.all_gather_object(gathered, (rank_squares, self._sample_losses() if first else []))
        squares: dict[str, float] = {}
        for part, _ in gathered:
            squares |= {name: squares.get(name, 0.0) + square for name, square in part.items()}
        # After clipping, where DeepSpeed has clipped: hence scaled by the norm before it.
        total = sum(squares.values())
        norms = {
            name: gradient_norm * (square / total) ** 0.5
            for name, square in squares.items()
            if total
        }
        losses = dict(sorted(pair for _, part in gathered for pair in part))
        return {"gradient_norms": norms, "documents": self._documents(losses)}

    def _sample_losses(self) -> list[tuple[int, list[float]]]:
        """Return (sample number, losses [sequence_length]) of this rank's samples."""
        from pretrain.data.batches import rank_samples

        data = self._run.config.data
        context = self._run.context
        numbers = rank_samples(
            self._position.consumed_samples,
            global_batch_size=data.global_batch_size,
            micro_batch_size=data.micro_batch_size,
            data_parallel_rank=context.data_parallel_rank,
            data_parallel_size=context.data_parallel_size,
        )
        rows = [row for losses in self._losses for row in losses.tolist()]
        return list(zip(numbers.ravel().tolist(), rows, strict=True))

    def _documents(self, losses: dict[int, list[float]]) -> list[dict[str, Any]]:
        """Return the documents of the batch, see `ranked_by_share`.

        One may come in several samples.
        """
        import numpy as np

        from data_pipeline.tokenizer.tokenizer import open_tokenizer

        data = self._run.data
        documents: dict[str, dict[str, Any]] = {}
        for number, values in losses.items():
            (ids,) = data.samples.blocks(np.array([number]))
            names = data.samples.origins(number)[1:]
            for name, token, previous, loss in zip(names, ids[1:], ids[:-1], values, strict=True):
                new = {"document": name, "samples": [], "loss": 0.0, "tokens": 0, "ids": []}
                entry = documents.setdefault(name, new)
                entry["samples"] = sorted({*entry["samples"], number})
                entry["ids"].append(int(token))
                if previous != data.boundary:  # else the prediction does not count
                    entry["loss"] += loss
                    entry["tokens"] += 1
        tokenizer = open_tokenizer(data.blend.manifests[0].tokenizer_path)
        for entry in documents.values():
            entry["text"] = tokenizer.decode(entry.pop("ids"))
        return ranked_by_share(documents.values())


def ranked_by_share(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return documents by their `share` of the finite `loss`, the largest first.

    Before them come those whose loss is not finite.
    """

    def finite_or_first(entry: Mapping[str, Any]) -> float:
        return float(entry["loss"]) if math.isfinite(entry["loss"]) else math.inf

    ranked = sorted(documents, key=finite_or_first, reverse=True)
    total = sum(entry["loss"] for entry in ranked if math.isfinite(entry["loss"])) or 1.0
    return [entry | {"share": entry["loss"] / total} for entry in ranked]


if __name__ == "__main__":
    from data_pipeline.errors import DataError
    from data_pipeline.io.words import guard_output, shown_in_line
    from megatron_patches.errors import MethodError
    from pretrain.errors import UserError
    from pretrain.ranks.environment import speaks_for_all

    guard_output()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be saved, nor a traceback shown
    try:
        main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
    except (UserError, DataError, MethodError) as error:
        if speaks_for_all() or getattr(error, "rank_specific", False):
            print(f"error: {shown_in_line(str(error))}", file=sys.stderr, flush=True)
        sys.exit(2)
