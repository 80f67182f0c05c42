"""The report of benchmarks.gpu.check as a page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.reporting.tables import Table, markdown

STEPS = ("large_2048", "large_512", "large_1024", "base_512")
PASSES = ("forward", "backward")
GOALS = (("A100", 0.50), ("H100", 0.45), ("H200", 0.45))


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the page at `path`; a stage that failed has its sentence in it."""
    stages = report["stages"]
    lines = [
        f"# {report['gpu']}: what was checked and measured",
        "",
        "Written by `make gpu-check`; every number is in [gpu-check.json](gpu-check.json), and",
        "`python -m pretrain plan large --gpu docs/results/gpu/card.json` plans with this card's rates.",
        "",
        f"{report['date']}, commit `{report['commit'][:12]}`, Python {report['python']}, "
        f"{report['seconds']:.0f} of {report['seconds_allowed']:.0f} seconds.",
        "",
        *_stages(stages),
        *_card(stages.get("card", {})),
        *_structured(stages.get("structured", {})),
        *(
            line
            for name in STEPS
            if name in stages
            for line in _steps(name, stages[name], report["gpu"])
        ),
        *_failures(stages),
    ]
    path.write_text("\n".join(lines).rstrip() + "\n")


def _stages(stages: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, stage in stages.items():
        checks = stage.get("checks", {})
        failed = [check for check, holds in checks.items() if not holds]
        rows.append(
            (
                name,
                stage["state"],
                f"{len(checks) - len(failed)} of {len(checks)}",
                f"{stage['seconds']:.0f}",
            )
        )
    return ["## Stages", "", *markdown(Table(("stage", "state", "checks", "seconds"), rows)), ""]


def _card(stage: Mapping[str, Any]) -> list[str]:
    found = stage.get("found")
    if not found:
        return []
    rates = dict(found["rates"])
    by_length = rates.pop("attention_tflops_by_length", {})
    rates |= {f"attention_tflops at {length}": rate for length, rate in by_length.items()}
    facts = ", ".join(f"{name} {value}" for name, value in found["facts"].items())
    rows = [(name, f"{rate:.4g}") for name, rate in rates.items()]
    notes = [f"* {note}" for note in found.get("notes", ())]
    return [
        "## The card",
        "",
        facts,
        "",
        *markdown(Table(("rate", "reached"), rows)),
        "",
        *notes,
        "",
    ]


def _structured(stage: Mapping[str, Any]) -> list[str]:
    found = stage.get("found")
    if not found:
        return []
    lines = ["## Structured queries and keys", ""]
    lines += [f"Milliseconds of one layer, {found['tokens']} tokens.", ""]
    for size, passes in found["sizes"].items():
        taken = [passes[name]["milliseconds"] for name in PASSES]
        rows = [
            (way, *(f"{each[way]:.4f}" if way in each else "" for each in taken))
            for way in dict.fromkeys(way for each in taken for way in each)
        ]
        lines += [*markdown(Table((size, *PASSES), rows)), ""]
        lines += [f"The fastest kernel's x, q and k: {passes['best_kernel_tb_s']:.2f} TB/s.", ""]
    return lines


def _steps(name: str, stage: Mapping[str, Any], gpu: str) -> list[str]:
    found = stage.get("found")
    if not found:
        return []
    lines = [f"## {name}: {found['shape']}, {found['dtype']}", ""]
    rows = [
        _step_row(kind, entry)
        for kind, entry in found["contenders"].items()
        if "step_seconds" in entry
    ]
    rates = (
        "ms a step",
        "tokens/s",
        "MFU",
        "MFU, full attention",
        "HFU",
        "peak GB",
        "time / compiled peer",
    )
    lines += [*markdown(Table(("", *rates), rows)), ""]
    goal = next((share for card, share in GOALS if card in gpu), None)
    reached = found["contenders"].get("orthogonal", {}).get("mfu")
    if name == "large_2048" and goal is not None and reached is not None:
        lines += [f"Goal: {goal:.0%} MFU; reached: {reached:.1%}.", ""]
    if found["switches"]:
        rows = [_switch_row(words, entry) for words, entry in found["switches"].items()]
        head = ("alone, vanilla", "time / default", "quartiles", "ms a step", "MFU", "peak GB")
        lines += [*markdown(Table(head, rows)), ""]
    for kind, entry in found["contenders"].items():
        for part in ("parts", "kernels"):
            if part in entry:
                spent = ", ".join(
                    f"{key} {1e3 * seconds:.1f}" for key, seconds in entry[part].items()
                )
                lines += [f"* {kind}, ms by {part[:-1]}: {spent}"]
    if found["left_out"]:
        lines += ["", f"No time was left for: {', '.join(found['left_out'])}."]
    return [*lines, ""]


def _step_row(kind: str, entry: Mapping[str, Any]) -> Sequence[str]:
    over = entry["step_time_over"].get("plain compiled")
    return (
        kind,
        f"{1e3 * entry['step_seconds']:.1f}",
        f"{entry['tokens_per_second']:,.0f}",
        *(_share(entry[key]) for key in ("mfu", "mfu_full_attention", "hfu")),
        _gigabytes(entry["peak_bytes"]),
        "" if over is None else f"{over['median']:.3f} ({over['low']:.3f} – {over['high']:.3f})",
    )


def _switch_row(words: str, entry: Mapping[str, Any]) -> Sequence[str]:
    over = entry["step_time_over_default"]
    return (
        f"`{words}`",
        f"{over['median']:.3f}",
        f"{over['low']:.3f} – {over['high']:.3f}",
        f"{1e3 * entry['step_seconds']:.1f}",
        _share(entry["mfu"]),
        _gigabytes(entry["peak_bytes"]),
    )


def _failures(stages: Mapping[str, Any]) -> list[str]:
    """Return the checks that failed, and the end of each traceback."""
    lines: list[str] = []
    for name, stage in stages.items():
        not_so = [check for check, holds in stage.get("checks", {}).items() if not holds]
        errors = {"": stage["error"]} if "error" in stage else {}
        errors |= (stage.get("found") or {}).get("failed") or {}
        if not_so or errors:
            lines += [f"### {name}", "", *(f"* not so: {check}" for check in not_so), ""]
        for what, text in errors.items():
            lines += [what, "", "```", *str(text).strip().splitlines()[-12:], "```", ""]
    return ["## What failed", "", *lines] if lines else []


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _gigabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e9:.2f}"
