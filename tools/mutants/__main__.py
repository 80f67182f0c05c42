"""`python -m tools.mutants`: see the package."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import ROOT, rank_environment
from tools.mutants.changes import Change, changes
from tools.mutants.trials import SURVIVED, attempt, import_others

MODULES = (
    "megatron_patches/bank/*.py",
    "megatron_patches/attention/*.py",
    "pretrain/study/*.py",
    "pretrain/compare/[ct]*.py",
    "pretrain/checkpoint/[bfilsv]*.py",
    "data_pipeline/shards/*.py",
)
"""Code whose mistakes would be silent."""
TESTS = (
    "tests/megatron_patches",
    "tests/pretrain/study",
    "tests/pretrain/compare",
    "tests/pretrain/checkpoint",
    "tests/data_pipeline/shards",
    "tests/data_pipeline/tokenizing",
    "tests/fuzz",
)
"""Whose fast tests have to find the faults: those of the same packages."""
KERNELS = ("megatron_patches/bank/monarch_triton.py", "megatron_patches/bank/monarch_kernel.py")
"""Left out: Triton's kernel and how it is started, tested in a process of its own."""
SHARING = "tests/data_pipeline/shards/test_samples.py::test_real_text_comes_through"
"""Makes corpus, tokenizer and shards, which are so made without a fault."""
UNTOUCHED = "no fast test runs this line"


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant."""

    module: Path
    change: Change
    verdict: str

    @property
    def survived(self) -> bool:
        """Whether no test failed."""
        return self.verdict in (SURVIVED, UNTOUCHED)

    def __str__(self) -> str:
        texts = (self.change.before, self.change.after)
        before, after = (text.partition("\n")[0][:80] for text in texts)
        place = f"{self.module}:{self.change.line} {self.change.function}"
        return f"{place}: `{before}` → `{after}` ({self.verdict})"


def main() -> None:
    """Plant a sample of faults, one by one; print what survives, and the score at the end."""
    arguments = _arguments()
    found = [path for pattern in arguments.modules for path in sorted(ROOT.glob(pattern))]
    modules = [path.relative_to(ROOT) for path in found if path.name != "__init__.py"]
    modules = [path for path in modules if str(path) not in KERNELS]
    every = [
        (module, change) for module in modules for change in changes((ROOT / module).read_text())
    ]
    drawn = arguments.case
    if drawn is None:
        number = min(arguments.mutants, len(every))
        drawn = random.Random(arguments.seed).sample(range(len(every)), number)
    touched = _touched(arguments.record.with_suffix(".touched.json"), modules, arguments.tests)
    known = _recorded(arguments.record)
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary) / "log"
        import_others(arguments.tests, Path(temporary) / "names")
        if attempt(Path(), 0, [SHARING], seconds=300.0, log=log) != SURVIVED:
            sys.exit(f"error: {SHARING} fails without a fault:\n{log.read_text()[-2000:]}")
        for place in drawn:
            module, change = every[place]
            key = f"{module}#{change.number}#{_digest([ROOT / module])}"
            if arguments.case is not None or key not in known:
                known[key] = _verdict(module, change, touched, log)
                with arguments.record.open("a") as file:
                    file.write(json.dumps([key, known[key]]) + "\n")
            outcomes.append(Outcome(module, change, known[key]))
            if arguments.case is not None:
                print(log.read_text())
            if outcomes[-1].survived or arguments.case is not None:
                print(f"{len(outcomes)}/{len(drawn)} case {place} {outcomes[-1]}", flush=True)
    print(f"\n{' '.join(['python -m tools.mutants', *sys.argv[1:]])}: {_score(outcomes)}")


def _verdict(module: Path, change: Change, touched: dict[str, Any], log: Path) -> str:
    """Try a mutant with the tests that run its line, the quickest file first."""
    by_line = touched["tests"].get(str(module), {})
    found = {test for test in by_line.get(str(change.line), []) if test}
    if not found and str(change.line) in by_line:
        # The line runs at the import: whatever uses the module sees the fault.
        found = {test for tests in by_line.values() for test in tests if test}
    if not found:
        return UNTOUCHED
    seconds = touched["seconds"]
    files = Counter[str]()  # a file's tests stay together: its fixtures are made once
    for test in found:
        files[test.partition("::")[0]] += seconds[test]
    tests = sorted(found, key=lambda test: (files[test.partition("::")[0]], test))
    return attempt(module, change.number, tests, seconds=sum(files.values()), log=log)


def _touched(path: Path, modules: Sequence[Path], tests: Sequence[str]) -> dict[str, Any]:
    """Return which tests touch which lines, traced anew where anything has changed."""
    files = [file for place in tests for file in [*(ROOT / place).rglob("*.py")] or [ROOT / place]]
    state = _digest([*(ROOT / module for module in modules), *sorted(files)])
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if known.get("state") != state:
        print("tracing the fast tests, without a fault", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        given = [json.dumps(list(map(str, words))) for words in (modules, tests)]
        command = [sys.executable, "-m", "tools.mutants.tracing", str(path), *given]
        with path.with_suffix(".log").open("w") as log:
            subprocess.run(
                command, cwd=ROOT, env=rank_environment(), stdout=log, stderr=log, check=True
            )
        known = json.loads(path.read_text()) | {"state": state}
        path.write_text(json.dumps(known))
    return known


def _digest(paths: Sequence[Path]) -> str:
    content = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()[:16]


def _recorded(path: Path) -> dict[str, str]:
    """Return {fault: verdict}; a torn last line, of a killed run, is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return dict(map(json.loads, lines))


def _score(outcomes: Sequence[Outcome]) -> str:
    """Return the share of faults that were found, with its interval, and a table by package."""
    low, high = interval(sum(not one.survived for one in outcomes), len(outcomes))
    planted = Counter[str]()
    found = Counter[str]()
    for outcome in outcomes:
        package = "/".join(outcome.module.parts[:2])
        planted[package] += 1
        found[package] += not outcome.survived
    lines = [
        f"**{found.total()} of {len(outcomes)}** faults were found: "
        f"{found.total() / len(outcomes):.1%} (95 % interval {low:.1%} to {high:.1%}).",
        "\n| package | planted | found |\n| --- | ---: | ---: |",
        *(
            f"| `{package}` | {planted[package]} | {found[package]} |"
            for package in sorted(planted)
        ),
        "\nNot found:\n",
        *(f"* {outcome}" for outcome in outcomes if outcome.survived),
    ]
    return "\n".join(lines)


def interval(killed: int, tried: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share.

    Args:
        killed: How often it happened.
        tried: How often it could have.
    """
    z = 1.959964
    share = killed / tried
    middle = share + z * z / (2 * tried)
    half = z * math.sqrt(share * (1 - share) / tried + (z / (2 * tried)) ** 2)
    whole = 1 + z * z / tried
    return (middle - half) / whole, (middle + half) / whole


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description="Do fast tests find faults?"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--mutants", type=int, default=200, help="how many (200)")
    parser.add_argument("--case", type=int, nargs="+", help="these alone, with their tests' output")
    parser.add_argument("--modules", nargs="+", default=MODULES, help="patterns: where")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what has to find the faults")
    record = ROOT / "build/mutants.jsonl"
    parser.add_argument("--record", type=Path, default=record, help="keep and continue outcomes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
