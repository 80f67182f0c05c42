"""All checks that a GPU must pass before its numbers count: half an hour on one GPU, offline.

    make gpu-wheels           # where there is a network: other packages
    make gpu-check            # on the GPU machine
    python -m benchmarks.gpu  # the same, in an environment that is there

First what must be right: CPU and GPU agree, bf16 trains, the audit, kill and resume, compiled
layers, documents, the profile. Then what it costs: the card's own rates, steps of `large` and
`base` beside plain PyTorch, the designs of the modern recipe, each switch alone. Every stage has
processes and a time of its own; what fails or finds no time is in the report, with its traceback,
and the others go on. Without a GPU the same stages run in small sizes.

    OUT/gpu-check.json  everything measured
    OUT/card.json       for `pretrain plan --gpu OUT/card.json`
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import trainings
from benchmarks.gpu.context import ROOT, StageContext, StageError, StageReport, StageResult
from pretrain.ranks.environment import without_launcher
from pretrain.runs.environment import describe_environment

LAYERS = "benchmarks.gpu.layers"
COMPILE_PARTS = 3
SECONDS = 1800.0
PATIENCE_ON_CPU = 6
"""Factor on the time of all stages and of each: nothing is measured there, cores may be busy."""
LEAST = 20.0
"""Seconds without which a stage is not begun."""
SWITCHES = {
    "switches_1": (
        "performance.compile=none",
        "performance.recompute=full",
        "performance.cross_entropy=chunked",
        "performance.cross_entropy=megatron",
    ),
    "switches_2": (
        "deepspeed.config=zero2",
        "performance.recompute=attention",
        "performance.reduced_precision_reduction=true",
    ),
    "switches_3": (
        "model.position_embedding=learned model.dropout=0.1",
        "deepspeed.config=zero3",
        "precision.grad_accum_dtype=bf16",
    ),
}
"""By stage, each against its default on one GPU, the most telling first; engines of a stage are in
memory together. On one GPU nothing is reduced over ranks (performance.overlap_reduction), and
document_attention is a stage of its own. Learned positions with dropout are how `large` is
configured; the plain peer has neither.
"""
ADAPTERS = "attention.adapters=[short_convolution,query_key_bias,channel_scale]"
MONARCH = f"attention.shared=true {ADAPTERS}"
DESIGNS = {
    "modern_designs_1": (
        "run.seed=2",  # the control
        "attention.variant=orthogonal",
        f"attention.variant=orthogonal {ADAPTERS}",
        f"attention.variant=monarch {MONARCH}",
        f"attention.variant=monarch_trainable {MONARCH}",
    ),
    "modern_designs_2": (
        ADAPTERS,
        "model.num_query_groups=1",
        f"model.num_query_groups=1 {ADAPTERS}",
        "optimizer.kind=adamw",
        "optimizer.kind=adamw attention.variant=orthogonal",
    ),
    "modern_scores": (
        "model.qk_norm=false",
        "model.qk_norm=false optimizer.qk_clip=100",
        "attention.variant=orthogonal",
    ),
}
"""By stage, each beside vanilla in the modern recipe under Muon, at the shape of `large_modern`:
the designs of the study `documentation_modern` (a step of `orthogonal` with adapters is one of
vanilla with adapters that was frozen early), and what holds the scores of attention.
"""
CONTENDERS = ("orthogonal", "plain compiled", "vanilla", "orthogonal again", "plain")
SMALL_CONTENDERS = ("orthogonal", "vanilla", "orthogonal again", "plain")
LARGE_512 = "24x1024x25x512x32000"
LARGE_MODERN = "24x1024x8x2048x32000"
SMALL_SHAPE = "1x64x1x16x256"


@dataclass(frozen=True)
class Stage:
    """A name, what it does, and the seconds after which it must be over."""

    name: str
    work: Callable[[StageContext], StageResult]
    seconds: float


def card(context: StageContext) -> StageResult:
    """Measure the rates of this card."""
    found = context.measure(
        "rates", "benchmarks.gpu.card", "--card", str(context.work / "card.json")
    )
    return StageResult(
        found, {"every rate was measured": not found["failed"] and not found["left_out"]}
    )


def compile_layers(part: int, context: StageContext) -> StageResult:
    """Compile every kind of attention: no graph break, and the numbers of eager layers.

    Args:
        part: which of COMPILE_PARTS, a process each: the time goes into compiling on the CPU.
        context: of the stage.
    """
    words = ["--part", str(part), "--parts", str(COMPILE_PARTS)]
    if context.small:
        words = ["--variants", "orthogonal"]
    found = context.measure(f"compile_{part}", LAYERS, "compile", *words)
    # bf16 has eight bits, and the kernels round at other places.
    near = 0.02 if context.on_gpu else 1e-5
    checks = {
        name: entry["breaks"] == 0
        and entry["graphs"] > 0
        and bool(entry["finite"])
        and entry.get("loss", 0.0) <= near
        and entry.get("gradients", 0.0) <= 10 * near
        for name, entry in found["variants"].items()
    }
    missing = [*found["failed"], *found["left_out"]]
    return StageResult(found, checks | dict.fromkeys(missing, False))


def structured(context: StageContext) -> StageResult:
    """Time the kernel of structured banks beside two products and the dense one, both ways."""
    found = context.measure("structured", LAYERS, "structured")
    checks = {
        f"{size}, {name}, {way}": apart <= (2.0**-8 if "bf" in size else 1e-6)  # by norm
        for size, passes in found["sizes"].items()
        for name in ("forward", "backward")
        for way, apart in passes[name]["apart"].items()
    }
    return StageResult(found, checks | dict.fromkeys(found["failed"], False))


def steps(
    name: str, shape: str, switches: Sequence[str] = (), recipe: str = "gpt2"
) -> Callable[[StageContext], StageResult]:
    """Return the stage that times steps of one shape by `benchmarks.step.measure`.

    Args:
        name: of the stage.
        shape: as `benchmarks.step.measure --shape` reads it.
        switches: overrides; with any, vanilla alone is timed, with each beside its default.
        recipe: as `benchmarks.step.measure --recipe` reads it.
    """

    def work(context: StageContext) -> StageResult:
        contenders = SMALL_CONTENDERS if context.small else CONTENDERS
        words = ["--shape", SMALL_SHAPE if context.small else shape, "--recipe", recipe]
        words += ["--steps", "5" if context.small else "10" if switches else "20"]
        words += ["--contenders", *(("vanilla",) if switches else contenders)]
        words += ["--settings", "", *switches]
        found = context.measure(name, "benchmarks.step.measure", *words)
        return StageResult(
            found, {"every contender was measured": not found["failed"] and not found["left_out"]}
        )

    return work


WAVES: tuple[tuple[Stage, ...], ...] = (
    (Stage("shards", trainings.shards, 60), Stage("card", card, 60)),
    (
        Stage("parity", trainings.parity, 110),
        Stage("demo", trainings.demo, 110),
        Stage("resume_compiled", trainings.resume_compiled, 110),
        *(
            Stage(f"compile_{part}", partial(compile_layers, part), 200)
            for part in range(COMPILE_PARTS)
        ),
        Stage("resume_eager", trainings.resume_eager, 110),
        Stage("early_freeze", trainings.early_freeze, 200),
        Stage("documents", trainings.documents, 110),
        Stage("profile", trainings.profile, 110),
    ),
    (Stage("structured", structured, 60),),
    *(
        (Stage(name, steps(name, LARGE_MODERN, designs, "modern_muon"), 240),)
        for name, designs in DESIGNS.items()
    ),
    (Stage("large_2048", steps("large_2048", "24x1024x6x2048x32000"), 200),),
    (Stage("large_512", steps("large_512", LARGE_512), 200),),
    *((Stage(name, steps(name, LARGE_512, switches), 150),) for name, switches in SWITCHES.items()),
    (Stage("base_512", steps("base_512", "12x768x20x512x32000"), 150),),
    (Stage("large_1024", steps("large_1024", "24x1024x12x1024x32000"), 200),),
)
"""Stages of a wave run at the same time: those that measure time are alone in theirs, but for the
shards, which only the CPU makes.
"""


def main() -> None:
    """Run the stages, report them, and exit with 1 if one is not ok."""
    arguments = parse_arguments()
    on_gpu, gpu = gpu_of_torch()
    out: Path = arguments.out or ROOT / ("docs/results/gpu" if on_gpu else "build/gpu-check")
    out.mkdir(parents=True, exist_ok=True)
    patience = 1 if on_gpu else PATIENCE_ON_CPU
    seconds = patience * SECONDS if arguments.seconds is None else arguments.seconds
    report = StageReport(out / "gpu-check.json")
    program = describe_environment()
    report.values |= {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpu,
        "small": not on_gpu,
        "commit": program["git_commit"] or "unknown",
        "python": program["python"],
        "seconds_allowed": seconds,
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        context = StageContext(
            work=Path(work),
            shards=Path(work) / "shards"
            if arguments.shards is None
            else arguments.shards.absolute(),
            until=started + seconds,
            on_gpu=on_gpu,
            at_once=max(1, min(8, (os.cpu_count() or 1) // 2)),
            environment=environment(),
        )
        run_waves(
            context, report, set(arguments.stages) - ({"shards"} if arguments.shards else set())
        )
        if (context.work / "card.json").exists():
            shutil.copy(context.work / "card.json", out / "card.json")
    report.values["seconds"] = time.monotonic() - started
    report.write()
    bad = [name for name, stage in report.values["stages"].items() if stage["state"] != "ok"]
    print(
        f"{report.values['seconds']:.0f} s; {', '.join(bad) or 'no stage'} not ok; see {out}",
        flush=True,
    )
    sys.exit(1 if bad else 0)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [stage.name for wave in WAVES for stage in wave]
    parser.add_argument(
        "--out", type=Path, help="default: docs/results/gpu, without a GPU build/gpu-check"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"for all stages; default: {SECONDS:.0f} on a GPU"
    )
    parser.add_argument("--stages", nargs="+", choices=names, default=names)
    parser.add_argument("--shards", type=Path, help="tokenized already; else they are made")
    return parser.parse_args()


def run_waves(context: StageContext, report: StageReport, wanted: Collection[str]) -> None:
    """Run the wanted stages, the waves one after another.

    Args:
        context: of all stages.
        report: is given what each found.
        wanted: names of stages.
    """
    for wave in WAVES:
        chosen = [stage for stage in wave if stage.name in wanted]
        shared = context
        at_a_time = max(1, len(chosen))
        if context.small:  # a CPU has not the cores of a GPU machine
            at_a_time = 1
        elif len(chosen) > 1:  # else every process of theirs would take all cores
            few = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
            shared = replace(context, environment={**few, **context.environment})
        with ThreadPoolExecutor(at_a_time) as pool:
            list(pool.map(lambda stage, shared=shared: run_stage(stage, shared, report), chosen))


def run_stage(stage: Stage, context: StageContext, report: StageReport) -> None:
    """Run a stage and report it; raise nothing.

    Args:
        stage: which one.
        context: of all stages; this one's deadline is its own.
        report: is given its state, its checks and its values, or its error.
    """
    if context.seconds_left < LEAST:
        report.put(stage.name, {"state": "no time was left for it", "seconds": 0.0})
        return
    started = time.monotonic()
    patience = PATIENCE_ON_CPU if context.small else 1
    entry: dict[str, Any]
    try:
        found = stage.work(
            replace(context, until=min(context.until, started + patience * stage.seconds))
        )
        state = "ok" if all(found.checks.values()) else "failed"
        entry = {"state": state, "checks": found.checks, "found": found.values}
    except StageError as error:
        entry = {"state": "failed", "error": str(error)}
    except Exception:
        entry = {"state": "failed", "error": traceback.format_exc()}
    report.put(stage.name, entry | {"seconds": time.monotonic() - started})
    print(f"{stage.name}: {entry['state']} ({time.monotonic() - started:.0f} s)", flush=True)
    for name, holds in entry.get("checks", {}).items():
        if not holds:
            print(f"  not so: {name}", flush=True)
    if "error" in entry:
        print("  " + entry["error"].replace("\n", "\n  "), flush=True)


def environment() -> dict[str, str]:
    """Return the stages' environment: this process's, without a launcher's variables."""
    inherited = without_launcher(os.environ)
    paths = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    return inherited | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def gpu_of_torch() -> tuple[bool, str]:
    """Return whether torch has a GPU, and its name; another process asks: this one holds none."""
    question = (
        "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    )
    done = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        sys.exit(f"error: torch cannot be imported by {sys.executable}:\n{done.stderr}")
    name = done.stdout.strip()
    return bool(name), name or "none"


if __name__ == "__main__":
    main()
