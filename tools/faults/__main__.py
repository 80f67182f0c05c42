"""`python -m tools.faults`: see the package."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path

from tests.conftest import data_pipeline, make_shards
from tools.faults.cases import Cases, Outcome
from tools.faults.inflict import build_shim
from tools.faults.plan import Case, Fault, Layout, draw
from tools.faults.references import Reference, References
from tools.faults.table import as_record, commit, markdown, put_into, recorded


def main() -> None:
    """Run the campaign; exit with 0 if every case passed, else with 1."""
    arguments = _arguments()
    # It tells of every restart, and there are many here.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        directory = Path(arguments.keep or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if arguments.keep and any(directory.iterdir()):
            sys.exit(f"error: --keep {directory} is not empty; name another directory")
        data_pipeline("demo-corpus", directory / "corpus")
        shards = make_shards(directory)
        cases = _chosen(arguments)
        keep = arguments.keep is not None
        if arguments.record:
            arguments.record.parent.mkdir(parents=True, exist_ok=True)
        earlier = recorded(arguments.record) if arguments.record else []
        earlier = [outcome for outcome in earlier if outcome.case in cases]
        done = {outcome.case for outcome in earlier}
        left = [case for case in cases if case not in done]

        def note(outcome: Outcome) -> None:
            if arguments.record:
                with arguments.record.open("a") as file:
                    file.write(json.dumps(as_record(outcome)) + "\n")

        fresh = campaign(left, directory, shards, jobs=arguments.jobs, keep=keep, note=note)
    outcomes = sorted([*earlier, *fresh], key=lambda outcome: outcome.case.name)
    seconds = (
        time.monotonic() - began + sum(outcome.seconds for outcome in earlier) / arguments.jobs
    )
    text = markdown(outcomes, _command(arguments), seconds)
    print(f"\n{text}")
    if arguments.into:
        put_into(arguments.into, text)
    sys.exit(any(outcome.problems for outcome in outcomes))


def campaign(
    cases: Sequence[Case],
    directory: Path,
    shards: Path,
    *,
    jobs: int,
    keep: bool,
    made: Mapping[Layout, Reference] | None = None,
    note: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run cases in parallel, and print each outcome.

    Args:
        directory: Directory of all files.
        shards: Text to train on.
        jobs: Cases side by side.
        keep: Whether to leave the files of the cases in `directory`.
        made: Undisturbed runs that exist already.
        note: Function that is called with each outcome at once.

    Returns:
        The outcomes, in the order of their numbers.
    """
    shim = build_shim(directory)
    tried = commit()
    references = References(directory / "references", shards, shim, made)
    runner = Cases(directory, shards, shim, references)
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(references.of, dict.fromkeys(case.layout for case in cases)))
            running = {pool.submit(runner.run, case): case for case in cases}
            for number, future in enumerate(as_completed(running), start=1):
                outcome = future.result()
                outcome.commit = tried
                outcomes.append(outcome)
                note(outcome)
                print(f"{number}/{len(cases)} {_line(outcome)}", flush=True)
                if not keep:
                    shutil.rmtree(directory / outcome.case.name, ignore_errors=True)
        except BaseException:  # Ctrl-C too: end after the cases that run
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            pool.shutdown()
    return sorted(outcomes, key=lambda outcome: outcome.case.name)


def _line(outcome: Outcome) -> str:
    case = outcome.case
    verdict = "; ".join(outcome.problems) if outcome.problems else "good"
    late = "" if outcome.happened else " (came too late)"
    return (
        f"{case.name}: {case.fault.value}{late}, {case.layout}, {outcome.seconds:.0f} s: {verdict}"
    )


def _chosen(arguments: argparse.Namespace) -> list[Case]:
    if arguments.case is not None:
        return [draw(seed, number) for seed in arguments.seed for number in arguments.case]
    faults = {
        fault for fault in Fault if arguments.only is None or fault.name.lower() in arguments.only
    }
    chosen = []
    for seed in arguments.seed:
        drawn = (draw(seed, number) for number in range(arguments.faults * len(Fault)))
        chosen += islice((case for case in drawn if case.fault in faults), arguments.faults)
    return chosen


def _command(arguments: argparse.Namespace) -> str:
    chosen = f" --only {' '.join(arguments.only)}" if arguments.only else ""
    begin = f"python -m tools.faults --seed {' '.join(map(str, arguments.seed))}"
    if arguments.case is not None:
        return f"{begin} --case {' '.join(map(str, arguments.case))}"
    return f"{begin} --faults {arguments.faults}{chosen}"


def _arguments() -> argparse.Namespace:
    kinds = [fault.name.lower() for fault in Fault]
    parser = argparse.ArgumentParser(
        prog="python -m tools.faults", description="Random faults on real runs."
    )
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[1], help="of everything that is random (1)"
    )
    parser.add_argument("--faults", type=int, default=60, help="how many of each seed (60)")
    parser.add_argument(
        "--only", nargs="+", choices=kinds, metavar="KIND", help=f"of {', '.join(kinds)}"
    )
    parser.add_argument("--case", type=int, nargs="+", help="these cases only, by their numbers")
    parser.add_argument("--jobs", type=int, default=2, help="cases side by side (2)")
    parser.add_argument(
        "--keep", type=Path, help="keep all files of all cases in this empty directory"
    )
    parser.add_argument(
        "--record", type=Path, help="keep each outcome in this file, and continue from it"
    )
    parser.add_argument(
        "--into", type=Path, help="put the table between the marks of this Markdown page"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
