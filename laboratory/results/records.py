"""A small record of every run that a page counts: what it ended with, and of which settings.

    python -m laboratory.results.records RUN... --out docs/results/PAGE/records.json

Writes steps, tokens, seed, final training and validation loss, start, data, settings and
environment of finished runs into one file. Settings and environments stand there once, under their
SHA-256. A seal beside a file of records is held against it by `make results-figures`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from data_pipeline.io.files import to_json, write_atomically
from laboratory.results.tables import table
from laboratory.runs.finished import FinishedRun, read_finished_run
from laboratory.study.sealed import Sealed, design_of, design_settings
from pretrain.errors import UserError
from pretrain.runs.environment import STARTED
from pretrain.runs.tags import LOSS

FILE = "records.json"
ENVIRONMENT = (
    "python",
    "packages",
    "git_commit",
    "device",
    "cpu_kernels",
    "cpu_threads",
    "world_size",
    "tensor_model_parallel_size",
    "zero_stage",
    "dtype",
)
"""Keys of environment.json that can change a digit of a loss, and the program's commit."""


def changed_settings(run: FinishedRun) -> dict[str, Any]:
    """Return {section.key: value} of what decides training, as seals have it, without defaults."""
    defaults = design_settings({})
    settings = design_settings(run.config)
    return {key: value for key, value in settings.items() if value != defaults.get(key)}


def records_of(runs: Iterable[FinishedRun]) -> dict[str, Any]:
    """Return the content of a file of records.

    Raises:
        UserError: Two runs have one name.
    """
    records: dict[str, Any] = {"settings": {}, "environments": {}, "runs": {}}

    def digest(kind: str, content: Mapping[str, Any]) -> str:
        sha256 = hashlib.sha256(to_json(content)).hexdigest()[:12]
        records[kind][sha256] = content
        return sha256

    for run in sorted(runs, key=lambda run: run.name):
        if run.name in records["runs"]:
            raise UserError(f"{run.path}: another run is called {run.name} too; give each once")
        environment = {key: run.environment.get(key) for key in ENVIRONMENT}
        first = (run.environment.get("segments") or [run.environment])[0]
        records["runs"][run.name] = {
            "seed": run.seed,
            "steps": run.result.steps,
            "tokens": run.result.tokens,
            "training_loss": run.curves.last[LOSS.tag],
            "validation_loss": run.result.validation_loss,
            "started": first.get("branched_from", first).get("started"),
            "data": run.data_fingerprint,
            "settings": digest("settings", changed_settings(run)),
            "environment": digest("environments", environment),
        }
    return records


def deviations(folder: Path) -> list[str]:
    """Return a sentence for each run that is not what its page or a seal beside it says.

    Args:
        folder: Folder with records.json; runs.csv of its reports and seals lie in and below it.
    """
    path = folder / FILE
    records = json.loads(path.read_text())
    runs = records["runs"]
    sentences = [
        f"{report}: validation_loss of {row['name']} is not that of {path}"
        for report in sorted(folder.rglob("runs.csv"))
        for row in table(report)
        if row["name"] in runs
        and float(row["validation_loss"]) != runs[row["name"]]["validation_loss"]
    ]
    for seal in sorted(folder.glob("seals/*.json")):
        sealed = Sealed.model_validate(json.loads(seal.read_text())["sealed"])
        recorded = {(design_of(name, run["seed"]), run["seed"]): run for name, run in runs.items()}
        of_seal = {key: run for key, run in recorded.items() if key in sealed.runs}
        if of_seal and len(of_seal) < len(sealed.runs):
            count = f"{len(of_seal)} of {len(sealed.runs)} runs"
            sentences.append(f"{path}: only {count} of {seal.name} are recorded")
        for (design, seed), run in of_seal.items():
            settings = design_settings(nested(records["settings"][run["settings"]]))
            if settings != sealed.settings[design]:
                sentences.append(
                    f"{path}: {design}-seed_{seed} has other settings than {seal.name}"
                )
            if run["data"] not in sealed.data or not _after(sealed.sealed, run["started"]):
                sentences.append(
                    f"{path}: {design}-seed_{seed} has other data, or ran before {seal.name}"
                )
    return sentences


def _after(sealed: str, started: str | None) -> bool:
    """Return whether a run says that it began after the time of a seal."""
    return started is not None and datetime.strptime(started, STARTED) >= datetime.strptime(
        sealed, STARTED
    )


def nested(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings as a configuration has them, {section: {key: value}}."""
    content: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        content.setdefault(section, {})[key] = value
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the records of the runs that the arguments name; 2 where one cannot be read."""
    parser = argparse.ArgumentParser(prog="laboratory.results.records", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a finished run")
    parser.add_argument("--out", type=Path, default=Path(FILE), help=f"default: {FILE}")
    options = parser.parse_args(arguments)
    try:
        records = records_of(read_finished_run(path) for path in options.runs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_atomically(options.out, to_json(records))
    print(f"{len(records['runs'])} runs: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
