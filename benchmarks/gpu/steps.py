"""Training steps of one shape beside plain PyTorch, and each switch alone; a stage of `make gpu-check`.

    python -m benchmarks.gpu.steps --shape 24x1024x25x512x32000 --seconds 100 --json steps.json

First our engines and the plain peers are built, and the peak memory of each is taken while it warms up. They
take turns. Then one switch at a time: an engine with it is built beside the ordinary one, the two take turns,
and it is let go. What cannot be built is recorded with its traceback, and the rest goes on; the file is
written after everything, so that it holds what there is when time is up.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.measurements import Measurements, measuring_parser
from benchmarks.step.contenders import (
    AGAIN,
    COMPILED,
    WARM_UP_ROUNDS,
    Contender,
    Layout,
    Shape,
    batches,
    benchmark_config,
    build_contender,
    contender_name,
    ratio,
    take_turns,
    waiting,
)
from benchmarks.step.parts import seconds_by_kernel, seconds_by_part
from megatron_patches.recipe.counting import executed_flops_per_token, model_flops_per_token
from pretrain.ranks.devices import peak_flops
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.single_process import one_process

OURS = "orthogonal"
SWITCHED = "vanilla"
"""What the switches are tried on: it is built in half of the time."""
CONTENDERS = (OURS, COMPILED, "vanilla", f"{OURS}{AGAIN}", "plain")
"""The most telling first."""
ROUNDS = 20
ROUNDS_OF_A_SWITCH = 10
BUILDING = 0.6
"""Share of the time in which contenders are built: those that are there by then must still take turns."""
PART_ROUNDS = 5
PROFILED_STEPS = 2


def main() -> None:
    parser = measuring_parser(__doc__)
    parser.add_argument("--shape", type=Shape.parse, required=True)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--settings", nargs="*", default=[], help="each switch, as overrides")
    parser.add_argument(
        "--look-inside", action="store_true", help="time by part and by kernel class too"
    )
    arguments = parser.parse_args()
    with one_process() as context:
        dtype = "bf16" if context.device.type == "cuda" else "fp32"
        device = device_name(context)
        values = {"shape": str(arguments.shape), "device": device, "dtype": dtype}
        measured = Measurements(
            arguments.json, arguments.seconds, **values, contenders={}, switches={}
        )
        session = Session(arguments.shape, context, measured)
        session.run(arguments.contenders, arguments.settings, arguments.look_inside)


def device_name(context: ParallelContext) -> str:
    return torch.cuda.get_device_name() if context.device.type == "cuda" else "CPU"


class Session:
    """Everything that is measured of one shape, in one process."""

    def __init__(self, shape: Shape, context: ParallelContext, measured: Measurements) -> None:
        self.shape, self._measured, self._context = shape, measured, context
        self._contenders: dict[str, Any] = measured.values["contenders"]
        self._on_gpu = context.device.type == "cuda"
        self._layout = Layout(tensor_parallel=1, data_parallel=1)
        self._batch = batches(shape, self._context)
        self._wait = waiting(self._context)
        self._alive: dict[str, Contender] = {}
        self._step_seconds: dict[str, float] = {}

    def run(self, contenders: list[str], settings: list[str], look_inside: bool) -> None:
        whole = self._measured.until
        self._measured.until -= (1 - BUILDING) * (whole - time.monotonic())
        for kind in contenders:
            self._measured.attempt(kind, partial(self._build, kind, ""))
            self._clean()
        self._measured.until = whole
        if self._alive:
            self._measured.attempt("turns", self._compare)
        for words in settings:
            self._measured.attempt(words, partial(self._switch, words))
            self._clean()
        if look_inside:
            for kind in (OURS, COMPILED):
                if kind in self._alive:
                    self._measured.attempt(f"inside {kind}", partial(self._look_inside, kind))
        for contender in self._alive.values():
            contender.close()

    def _build(self, kind: str, settings: str) -> None:
        """Build a contender, and take its memory and its first steps."""
        before = torch.cuda.memory_allocated() if self._on_gpu else 0
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        contender = build_contender(kind, settings, self.shape, self._layout, self._context)
        built = time.perf_counter()
        loss = torch.zeros(())
        one_step = 0.0
        for _ in range(WARM_UP_ROUNDS):
            begun = time.perf_counter()
            loss = contender.forward(self._batch())
            contender.backward(loss)
            contender.update()
            self._wait()
            one_step = time.perf_counter() - begun
        peak = torch.cuda.max_memory_allocated() - before if self._on_gpu else None
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss of {kind} {settings} is {loss.item()}")
        name = contender_name(kind, settings)
        self._alive[name] = contender
        self._step_seconds[name] = one_step
        self._contenders[name] = {
            "settings": settings,
            "peak_bytes": peak,
            "zero_stage": contender.zero_stage,
            "seconds_to_build": built - started,
            "seconds_to_warm_up": time.perf_counter() - built,
            "loss_after_warm_up": loss.item(),
        }
        print(name, self._contenders[name], flush=True)

    def _compare(self) -> None:
        rounds = self._rounds(self._alive, ROUNDS)
        times = take_turns(self._alive, self._batch, rounds, time.perf_counter, self._wait)
        for name, seconds in times.items():
            self._contenders[name] |= self._rates(name, "", statistics.median(seconds)) | {
                "step_seconds": statistics.median(seconds),
                "step_time_over": {
                    base: ratio(seconds, times[base])
                    for base in (OURS, COMPILED, "plain")
                    if base in times and base != name
                },
            }

    def _switch(self, settings: str) -> None:
        """Time one setting against its default, both engines of the same variant."""
        name = contender_name(SWITCHED, settings)
        try:
            self._build(SWITCHED, settings)
            pair = {one: self._alive[one] for one in (SWITCHED, name)}
            rounds = self._rounds(pair, ROUNDS_OF_A_SWITCH)
            times = take_turns(pair, self._batch, rounds, time.perf_counter, self._wait)
            seconds = statistics.median(times[name])
            self._measured.values["switches"][settings] = self._contenders.pop(name) | {
                "step_seconds": seconds,
                "step_time_over_default": ratio(times[name], times[SWITCHED]),
                **self._rates(SWITCHED, settings, seconds),
            }
        finally:
            self._contenders.pop(name, None)
            if name in self._alive:
                self._alive.pop(name).close()

    def _look_inside(self, kind: str) -> None:
        contender = self._alive[kind]
        self._contenders[kind]["parts"] = seconds_by_part(
            contender, self._batch, PART_ROUNDS, time.perf_counter, self._wait
        )
        self._contenders[kind]["kernels"] = seconds_by_kernel(
            contender, self._batch, PROFILED_STEPS
        )

    def _rates(self, kind: str, settings: str, seconds: float) -> dict[str, float | None]:
        """tokens/s; MFU with causal attention counted by half and in full; HFU."""
        variant = "vanilla" if kind.startswith("plain") else kind.removesuffix(AGAIN)
        config = benchmark_config(self.shape, variant, self._layout, settings)
        theory = config.shape
        tokens = self.shape.batch * self.shape.length / seconds
        peak = peak_flops(device_name(self._context)) if self._on_gpu else None
        flops = {
            "mfu": model_flops_per_token(theory),
            "mfu_full_attention": model_flops_per_token(theory, causal_share=1.0),
            "hfu": executed_flops_per_token(theory, config.policy),
        }
        shares = {
            name: tokens * per_token / peak if peak else None for name, per_token in flops.items()
        }
        return {"tokens_per_second": tokens, **shares}

    def _rounds(self, names: Iterable[str], most: int) -> int:
        """As many rounds as half of the time that is left allows, five at least."""
        one = sum(self._step_seconds[name] for name in names)
        return max(
            5, min(most, int((self._measured.until - time.monotonic()) / 2 / max(one, 1e-3)))
        )

    def _clean(self) -> None:
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
