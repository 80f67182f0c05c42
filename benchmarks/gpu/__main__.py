"""Acceptance of a GPU before its numbers count: a quarter of an hour on one GPU, offline.

    make gpu-check            # on the GPU machine
    python -m benchmarks.gpu  # the same

First what a step costs: `large` and the modern recipe, beside plain PyTorch. Then what must be
right: CPU and GPU agree, and a run that is killed and resumed has the same bits. Every stage has
processes and a time of its own; what fails or finds no time is in the report, with its traceback,
and the others go on. Without a GPU the same stages run in small sizes.

    OUT/gpu-check.json  everything measured
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu import trainings
from benchmarks.gpu.context import ROOT, StageContext, StageError, StageReport, StageResult
from pretrain.ranks.environment import without_launcher
from pretrain.runs.environment import describe_environment

SECONDS = 900.0
PATIENCE_ON_CPU = 6
"""Factor on the time of all stages and of each: nothing is measured there, cores may be busy."""
LEAST = 20.0
"""Seconds without which a stage is not begun."""
CONTENDERS = ("orthogonal", "plain compiled", "vanilla", "orthogonal again", "plain")
SMALL_CONTENDERS = ("orthogonal", "vanilla", "orthogonal again", "plain")
SMALL_SHAPE = "1x64x1x16x256"


@dataclass(frozen=True)
class Stage:
    """A name, what it does, and the seconds after which it must be over."""

    name: str
    work: Callable[[StageContext], StageResult]
    seconds: float


def steps(
    name: str, shape: str, contenders: Sequence[str], recipe: str
) -> Callable[[StageContext], StageResult]:
    """Return the stage that times steps of one shape by `benchmarks.step.measure`.

    Args:
        shape: Shape as `benchmarks.step.measure --shape` reads it.
        contenders: Names as `benchmarks.step.measure --contenders` reads them.
        recipe: Name as `benchmarks.step.measure --recipe` reads it.
    """

    def work(context: StageContext) -> StageResult:
        words = ["--shape", SMALL_SHAPE if context.small else shape, "--recipe", recipe]
        words += ["--steps", "5" if context.small else "20"]
        words += ["--contenders", *(SMALL_CONTENDERS if context.small else contenders)]
        report = context.measure(name, "benchmarks.step.measure", *words)
        complete = not report["failed"] and not report["left_out"]
        return StageResult(report, {"every contender was measured": complete})

    return work


STAGES = (
    Stage("large", steps("large", "24x1024x25x512x32000", CONTENDERS, "gpt2"), 240),
    Stage(
        "large_modern",
        steps("large_modern", "24x1024x8x2048x32000", SMALL_CONTENDERS, "modern_muon"),
        240,
    ),
    Stage("shards", trainings.shards, 60),
    Stage("parity", trainings.parity, 150),
    Stage("resume", trainings.resume, 150),
)


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
        shards = arguments.shards.absolute() if arguments.shards else Path(work) / "shards"
        context = StageContext(
            work=Path(work),
            shards=shards,
            until=started + seconds,
            small=not on_gpu,
            at_once=max(1, min(8, (os.cpu_count() or 1) // 2)),
            environment=environment(),
        )
        run_stages(
            context, report, set(arguments.stages) - ({"shards"} if arguments.shards else set())
        )
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
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--out", type=Path, help="default: docs/results/gpu, without a GPU build/gpu-check"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"for all stages; default: {SECONDS:.0f} on a GPU"
    )
    parser.add_argument("--stages", nargs="+", choices=names, default=names)
    parser.add_argument("--shards", type=Path, help="tokenized already; else they are made")
    return parser.parse_args()


def run_stages(context: StageContext, report: StageReport, wanted: Collection[str]) -> None:
    """Run the wanted stages, one after another.

    Args:
        report: Report that gets the findings of each.
        wanted: Names of the stages to run.
    """
    for stage in STAGES:
        if stage.name in wanted:
            run_stage(stage, context, report)


def run_stage(stage: Stage, context: StageContext, report: StageReport) -> None:
    """Run one stage and report it, whatever it raises.

    Args:
        context: Context of all stages; the deadline of this one is its own.
        report: Report that gets the stage's state, checks and values, or its error.
    """
    if context.seconds_left < LEAST:
        report.put(stage.name, {"state": "no time was left for it", "seconds": 0.0})
        return
    started = time.monotonic()
    patience = PATIENCE_ON_CPU if context.small else 1
    entry: dict[str, Any]
    try:
        result = stage.work(
            replace(context, until=min(context.until, started + patience * stage.seconds))
        )
        state = "ok" if all(result.checks.values()) else "failed"
        entry = {"state": state, "checks": result.checks, "found": result.values}
    except StageError as error:
        entry = {"state": "failed", "error": str(error)}
    # A stage that fails must not take the others' results with it.
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
    """Return the environment of the stages: that of this process, without launcher variables."""
    inherited = without_launcher(os.environ)
    paths = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    return inherited | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def gpu_of_torch() -> tuple[bool, str]:
    """Ask in another process whether torch has a GPU, and for its name."""
    # A CUDA context in this process would take memory that the stages measure.
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
