"""The tables of benchmarks.data.tokenizing, and the same as a JSON value."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

_TOKENS = 100e9
_PACKAGES = ("gigatoken", "sentencepiece", "datasets", "numpy", "zstandard", "orjson")


@dataclass(frozen=True)
class Run:
    """A measurement: seconds, MB.

    rss_mb: the largest sum over the processes at one time; largest_mb: the largest of one process.
    """

    wall: float
    cpu: float
    tokens: int
    rss_mb: float
    largest_mb: float


@dataclass(frozen=True)
class Measured:
    """All runs.

    rows: by model type, contestant and number of workers, one run a repetition.
    megabytes: of text, by model type. memory: a run of the pipeline by MB of text.
    equal_ids: whether another tool's ids are ours, byte for byte, by its name.
    """

    rows: dict[tuple[str, str, int], list[Run]]
    megabytes: dict[str, int]
    memory: dict[int, Run]
    equal_ids: dict[str, bool | None]


def ratio(over: list[Run], under: list[Run], clock: Literal["cpu", "wall"]) -> float:
    """The median of over / under, repetition by repetition."""
    pairs = zip(over, under, strict=True)
    return statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs)


def report(measured: Measured) -> dict[str, Any]:
    """Print the tables; the same as a JSON value."""
    print(f"{'':40}{'MB/CPU s':>10}{'MB/s':>8}{'of bare':>10}{'(wall)':>8}{'ours / it':>11}{'(wall)':>8}")
    print("(ratios are of rates, by CPU seconds and, where it says so, by the clock)")
    table = []
    for (name, contestant, workers), runs in measured.rows.items():
        bare, ours = measured.rows[name, "bare", workers], measured.rows[name, "pipeline", workers]
        values = {
            "mb_per_cpu_second": measured.megabytes[name] / statistics.median(run.cpu for run in runs),
            "mb_per_second": measured.megabytes[name] / statistics.median(run.wall for run in runs),
            "of_bare": ratio(bare, runs, "cpu"),
            "of_bare_wall": ratio(bare, runs, "wall"),
            "ours_over_it": ratio(runs, ours, "cpu"),
            "ours_over_it_wall": ratio(runs, ours, "wall"),
        }
        widths = (10, 8, 10, 8, 11, 8)
        row = f"{name}, {contestant}, {workers}"
        print(f"{row:40}" + "".join(f"{v:{w}.2f}" for v, w in zip(values.values(), widths, strict=True)))
        table.append({"row": row} | values | {"runs": [asdict(run) for run in runs]})
    for name, equal in measured.equal_ids.items():
        print(f"ids equal to those of {name}: {equal}")
    return {
        "megabytes": measured.megabytes,
        "equal_ids": measured.equal_ids,
        "table": table,
        "costs": {name: _cost(measured, name) for name in measured.megabytes},
        "memory": {str(size): _memory(size, run) for size, run in measured.memory.items()},
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg(), "versions": _versions()},
    }


def _cost(measured: Measured, name: str) -> dict[str, float]:
    """Tokens a second of one core, and core-hours for 100 B tokens, of the pipeline with one worker."""
    runs = measured.rows[name, "pipeline", 1]
    rate = statistics.median(run.tokens / run.cpu for run in runs)
    size = measured.megabytes[name] * 1e6 / runs[0].tokens
    hours = _TOKENS / rate / 3600
    print(
        f"{name}: {rate / 1e6:.2f} M tokens a second and core, {size:.2f} bytes a token; "
        f"100 B tokens cost {hours:.1f} hours on 1 core, {hours / 64:.2f} on 64"
    )
    return {"tokens_per_second_and_core": rate, "bytes_per_token": size, "core_hours_per_100b": hours}


def _memory(megabytes: int, run: Run) -> dict[str, float]:
    print(
        f"{megabytes} MB of text, 2 workers: at most {run.largest_mb:.0f} MB of memory in a process, "
        f"{run.rss_mb:.0f} MB in all"
    )
    return asdict(run)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
