"""What a chain of jobs would do, in words, for `submit.py --dry-run`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence

from chain import Job

WHAT = {
    "download": "fetches {ORA_SOURCE} into {ORA_CORPUS}",
    "tokenizer": "trains the tokenizer {ORA_TOKENIZER} on {ORA_CORPUS}",
    "tokenize": "turns {ORA_CORPUS} into the tokens of {ORA_SHARDS} with {ORA_TOKENIZER}",
    "merge": "joins what the tasks wrote in {ORA_SHARDS} and verifies it",
    "pretrain": "trains {ORA_CONFIG} in {ORA_RUN_DIRECTORY}",
    "compare": "compares {ORA_RUNS} with {ORA_BASELINE}; its report is {ORA_OUT}/report.md",
}
"""What each step does, with its settings."""
FROM_ENVIRONMENT = {
    "SBATCH_PARTITION": "--partition",
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_QOS": "--qos",
    "SBATCH_TIMELIMIT": "--time",
}
"""Variables that win over a script's header, and lose to options."""


def in_words(jobs: Sequence[Job], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield lines that say what would be submitted.

    Args:
        jobs: the chain.
        environment: variables that sbatch would have.
    """
    yield f"{len(jobs)} jobs would be submitted; nothing is submitted now."
    if code := environment.get("ORA_CODE"):
        yield f"Their code is that of {code}, as ORA_CODE says."
    else:
        yield "Their code is a copy of this checkout as it is when they are submitted; what you"
        yield "edit or pull afterwards reaches none of them, nor their restarts."
    for number, job in enumerate(jobs, start=1):
        asked, others = _options(job, environment)
        what = WHAT[job.step].format_map(job.settings)
        given = f", with {shlex.join(job.arguments)}" if job.arguments else ""
        log = asked.output.replace("%x", f"ora-{job.name}")
        when = f"after {' and '.join(job.after)}" if job.after else "as soon as there is room"
        yield f"{number}. {job.name}: {what}{given}"
        yield f"   {when}; {_resources(asked)}; log {log}"
        if others:
            yield f"   and for sbatch {shlex.join(others)}"


def _options(job: Job, environment: Mapping[str, str]) -> tuple[argparse.Namespace, list[str]]:
    """Return what a job asks of sbatch, and the options of the user that are not among it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (
        ("-N", "--nodes"),
        ("-c", "--cpus-per-task"),
        ("-t", "--time"),
        ("-p", "--partition"),
        ("-A", "--account"),
        ("-q", "--qos"),
        ("-a", "--array"),
        ("-o", "--output"),
        ("-G", "--gpus"),
        ("--gres",),
        ("--gpus-per-node",),
    ):
        parser.add_argument(*names)
    header = [
        word
        for line in job.script.read_text().splitlines()
        if line.startswith("#SBATCH ")
        for word in shlex.split(line.removeprefix("#SBATCH "), comments=True)
    ]
    asked, _ = parser.parse_known_args(header)
    site = [
        f"{option}={environment[name]}"
        for name, option in FROM_ENVIRONMENT.items()
        if name in environment
    ]
    parser.parse_args(site, asked)
    return parser.parse_known_args(list(job.options), asked)


def _resources(asked: argparse.Namespace) -> str:
    """Return how many nodes of what kind, for how long, on whose account."""
    nodes = f"{asked.nodes} node" + ("" if asked.nodes == "1" else "s")
    parts = [f"array {asked.array}, each task on {nodes}" if asked.array else nodes]
    gpus = asked.gres or asked.gpus_per_node
    parts += [f"{gpus} on each"] if gpus else []
    parts += [f"{asked.gpus} GPUs in all"] if asked.gpus else []
    parts += [f"{asked.cpus_per_task} CPUs a task", f"at most {asked.time} at a time"]
    for name in ("partition", "account", "qos"):
        if value := getattr(asked, name):
            parts.append(f"{name} {value}")
    return ", ".join(parts)
