"""`python -m tools.mutants`: see the package."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ranks import ROOT, rank_environment
from tools.mutants.changes import Change
from tools.mutants.places import TESTS, faults, modules
from tools.mutants.score import UNTOUCHED, Outcome, summary, survivors
from tools.mutants.touched import merge
from tools.mutants.trials import SURVIVED, attempt, import_others

SHARING = "tests/data_pipeline/shards/test_samples.py::test_real_text_comes_through"
"""Makes corpus, tokenizer and shards, which are so made without a fault."""
LONG = 300.0


def main() -> None:
    """Plant a sample of faults, one by one; print what survives, and the score at the end."""
    arguments = _arguments()
    every = list(faults())
    drawn = random.Random(arguments.seed).sample(
        range(len(every)), min(arguments.mutants, len(every))
    )
    drawn = arguments.case if arguments.case is not None else drawn
    touched = _touched(arguments.record.with_suffix(".touched.json"))
    known, outcomes, sound = _recorded(arguments.record), [], set()
    import_others()
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary) / "log"
        if attempt(Path(), 0, [SHARING], LONG, log) != SURVIVED:
            sys.exit(f"error: {SHARING} fails without a fault:\n{log.read_text()[-2000:]}")
        for number, place in enumerate(drawn, start=1):
            module, change = every[place]
            key = _key(module, change)
            if key in known and arguments.case is None:
                outcome = Outcome(module, change, *known[key])
            else:
                outcome = _tried(module, change, touched, log, sound)
                with arguments.record.open("a") as file:
                    file.write(json.dumps([key, outcome.verdict, outcome.tests]) + "\n")
            if arguments.case is not None and log.exists():
                print(log.read_text())
            outcomes.append(outcome)
            if outcome.survived or arguments.case is not None:
                print(
                    f"{number}/{len(drawn)} case {place} {outcome.verdict}: {outcome}", flush=True
                )
    command = f"python -m tools.mutants --seed {arguments.seed} --mutants {arguments.mutants}"
    print(
        f"\n{summary(outcomes, len(every), command, _commit())}\nNot found:\n\n{survivors(outcomes)}"
    )


def _tried(
    module: Path, change: Change, touched: dict[str, Any], log: Path, sound: set[str]
) -> Outcome:
    """Try a mutant; of each file in turn, one test must pass without a fault (`sound`: those that did)."""
    by_line = touched["tests"].get(str(module), {})
    found = {test for test in by_line.get(str(change.line), []) if test}
    if (
        not found and str(change.line) in by_line
    ):  # run at the import: what uses the module sees the fault
        found = {test for tests in by_line.values() for test in tests if test}
    seconds = touched["seconds"]
    tests = sorted(found, key=lambda test: seconds[test])
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    tests.sort(
        key=lambda test: files.index(test.partition("::")[0])
    )  # fixtures of a file are made once
    if not tests:
        return Outcome(module, change, UNTOUCHED, 0)
    needed = sum(seconds[test] for test in tests)
    for file in files:
        if file not in sound:
            sound.add(file)
            alone = [test for test in tests if test.startswith(file)][:1]
            if attempt(module, 0, alone, needed, log) != SURVIVED:
                raise RuntimeError(f"{alone[0]} fails without a fault:\n{log.read_text()[-2000:]}")
    return Outcome(module, change, attempt(module, change.number, tests, needed, log), len(tests))


def _touched(path: Path) -> dict[str, Any]:
    """Return which tests touch which lines, traced anew in changed files of tests, else in all."""
    files = [
        file for place in TESTS for file in ([*(ROOT / place).rglob("*.py")] or [ROOT / place])
    ]
    others = sorted(path for path in files if not path.name.startswith("test_"))
    common = _digest([*(ROOT / module for module in modules()), *others])
    now = {
        str(path.relative_to(ROOT)): _digest([path]) for path in sorted(files) if path not in others
    }
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if known.get("common") != common:
        known = {"common": common, "files": {}, "tests": {}, "seconds": {}}
    if stale := sorted(
        name for name in now | known["files"] if now.get(name) != known["files"].get(name)
    ):
        print(f"tracing the fast tests of {len(stale)} files", flush=True)
        made, said = path.with_suffix(".new"), path.with_suffix(".log")
        command = [
            sys.executable,
            "-m",
            "tools.mutants.touched",
            str(made),
            *sorted(now.keys() & {*stale}),
        ]
        with said.open("w") as log:
            subprocess.run(command, cwd=ROOT, env=rank_environment(), stdout=log, stderr=log)
        if not made.exists():
            sys.exit(f"error: tracing failed, see {said}")
        merge(known, json.loads(made.read_text()), {*stale})
        path.write_text(json.dumps(known | {"files": now}))
        made.unlink()
    return known


def _key(module: Path, change: Change) -> str:
    return f"{module}#{change.number}#{_digest([ROOT / module])}"


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _recorded(path: Path) -> dict[str, tuple[str, int]]:
    """{fault: (verdict, tests)}; a torn last line, of a killed run, is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: Iterator[str] = iter(path.read_text().split("\n")[:-1] if path.exists() else [])
    return {key: (verdict, tests) for key, verdict, tests in map(json.loads, lines)}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        or "unknown"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description="Do fast tests find faults?"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--mutants", type=int, default=200, help="how many (200)")
    parser.add_argument(
        "--case", type=int, nargs="+", help="these alone, with the output of their tests"
    )
    record = ROOT / "build/mutants.jsonl"
    parser.add_argument(
        "--record", type=Path, default=record, help="keep each outcome, and go on from it"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
