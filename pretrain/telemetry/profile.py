"""A profile of a few steps of a run: a trace for Perfetto, and a table of its kernels."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from data_pipeline.io.files import replace_file, to_json
from megatron_patches.recipe.block import MLPS, NORMS
from pretrain.config.sections import ProfileSection

MEMORY_ENTRIES = 200_000
"""Number of allocations that a memory snapshot keeps."""
KERNELS = (
    ("loss", r"log_softmax"),
    ("attention", r"scaled_dot_product|flash|fmha|softmax(?!.*log)|_softmax"),
    ("collective", r"c10d|gloo|nccl|all_?reduce|all_?gather"),
    ("norm", "|".join(part.kernels for part in NORMS.values())),
    ("optimizer", r"adam|foreach|multi_tensor|lerp|addcdiv|sqrt|vector_norm|reciprocal|clamp"),
    ("product", r"::mm$|::bmm$|::addmm$|::baddbmm$|gemm|cutlass|nvjet|cublas|cijk"),
    ("loss", r"nll_loss|cross_entropy|::exp$|::log$|::max$|::sum$|index_put|::index$"),
    ("copy", r"copy|::cat$|cat_|memcpy|memset|::clone|::contiguous|::fill_|::zero"),
    (
        "elementwise",
        r"^aten::(mul|add|sub|div|neg|addcmul|where|masked)|elementwise|"
        + "|".join(part.kernels for part in MLPS.values()),
    ),
)
"""(class, pattern of its kernels' names); the first match counts. Other kernels are `other`."""


class StepProfile:
    """The profile of the steps that `telemetry.profile` names, on this rank, and its files.

        DIRECTORY/trace_rank_0.json      every operation and kernel, in Chrome's format
                  kernels_rank_0.json    seconds of a step in each class of kernel; .txt: as a table
                  memory_rank_0.pickle   on a GPU: every allocation, for https://pytorch.org/memory_viz

    Args:
        section: Steps to profile; None: none.
    """

    def __init__(self, section: ProfileSection | None, directory: Path, rank: int) -> None:
        chosen = section is not None and (rank == 0 or section.ranks == "all")
        self._section = section if chosen else None
        self._directory = directory
        self._rank = rank
        self._on_gpu = torch.cuda.is_available()
        self._profile: Any = None
        self._done = 0

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Profile the training step in the block, if `telemetry.profile` names it."""
        section = self._section
        if section is None:
            yield
            return
        begin = max(1, section.at - 1)  # the step before warms the profiler up
        if self._profile is None and begin <= step <= section.at:
            self._start(warm_up=step < section.at)
        if self._profile is None:
            yield
            return
        with record_function(f"training step {step}"):
            yield
        self._done += step >= section.at
        if self._done < section.steps:
            self._profile.step()
        else:
            self.close()

    def close(self) -> None:
        """Write the profile of the steps so far, once.

        Training continues without a profile if the write fails.
        """
        section, self._section = self._section, None
        if section is None or self._profile is None:
            return
        self._profile.stop()
        try:
            if self._done:
                self._write(section.at)
        except OSError as error:
            print(
                f"warning: {error.filename or self._directory} cannot be written "
                f"({error.strerror}); rank {self._rank} continues without its profile",
                file=sys.stderr,
                flush=True,
            )
        finally:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
            self._profile = None

    def _start(self, warm_up: bool) -> None:
        assert self._section is not None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        plan = schedule(wait=0, warmup=int(warm_up), active=self._section.steps, repeat=1)
        self._profile = profile(activities=activities, schedule=plan, record_shapes=True)
        self._profile.start()
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)

    def _write(self, first_step: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(str(self._file("memory", "pickle")))
        self._profile.export_chrome_trace(str(self._file("trace", "json")))
        total = seconds_by_class(self._profile.key_averages())
        seconds = {group: spent / self._done for group, spent in total.items()}
        content = {"first_step": first_step, "steps": self._done, "seconds_per_step": seconds}
        replace_file(self._file("kernels", "json"), to_json(content), durable=False)
        replace_file(self._file("kernels", "txt"), kernel_table(seconds).encode(), durable=False)

    def _file(self, name: str, ending: str) -> Path:
        return self._directory / f"{name}_rank_{self._rank}.{ending}"


def kernel_table(seconds: dict[str, float]) -> str:
    """Return a table of kernel classes with their milliseconds per step and their share."""
    step_seconds = sum(seconds.values())
    rows = [f"{'class':14}{'ms a step':>12}{'share':>9}"]
    rows += [
        f"{group:14}{1e3 * spent:12.3f}{spent / step_seconds if step_seconds else 0:9.1%}"
        for group, spent in {**seconds, "all": step_seconds}.items()
    ]
    return "\n".join(rows) + "\n"


def seconds_by_class(events: Iterable[Any]) -> dict[str, float]:
    """Return the seconds of each kernel class in a profile's `key_averages()`, largest first.

    On a machine with a GPU only its kernels count. On the CPU the class `host` is the time outside
    kernels: Python, dispatch and autograd's own work. The profiler itself inflates this class.
    """
    cuda = torch.cuda.is_available()
    seconds: dict[str, float] = {}
    for event in events:
        spent = event.self_cpu_time_total
        if cuda:
            spent = event.self_device_time_total if event.device_type.name == "CUDA" else 0.0
        is_kernel = cuda or event.key.startswith(("aten::", "c10d::", "gloo:"))
        classes = (
            group for group, pattern in KERNELS if re.search(pattern, event.key, re.IGNORECASE)
        )
        group = next(classes, "other") if is_kernel else "host"
        seconds[group] = seconds.get(group, 0.0) + spent / 1e6
    return dict(sorted(seconds.items(), key=lambda entry: -entry[1]))
