#!/usr/bin/env python3
"""Submit a whole study: download -> tokenizer -> tokenize (array) -> merge and verify -> pretrain -> compare.

    python slurm/submit.py large                       # SlimPajama, vanilla and orthogonal, then their comparison
    python slurm/submit.py large --dry-run             # the same commands, printed
    python slurm/submit.py large --from pretrain --sbatch pretrain="--nodes=2 --time=24:00:00"

Every script is first given to `sbatch --test-only`; nothing is submitted unless all would run here. Each job waits for
the one before (afterok), and is removed if that one fails (--kill-on-invalid-dep=yes). Standard library only: login
nodes have a Python, but often not the environment. See docs/operations.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("download", "tokenizer", "tokenize", "merge", "pretrain", "compare")
CORPORA = {"small": "tinystories", "base": "openwebtext", "large": "slimpajama", "demo": "demo"}
SBATCH_TIMEOUT = 120


class SubmitError(Exception):
    """One sentence: what to mend."""


@dataclass(frozen=True)
class Job:
    """One call of sbatch.

    Attributes:
        name: of the job, unique in the chain.
        after: names of the jobs that must have ended well.
        settings: ORA_* variables, see slurm/lib.sh.
        options, arguments: of sbatch; of the script.
    """

    name: str
    step: str
    script: Path
    settings: dict[str, str]
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass
class Submitted:
    """What has been handed to Slurm: job name -> id."""

    ids: dict[str, str] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for everything that the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        jobs = plan(options)
        if options.dry_run:
            _print_plan(jobs)
            return 0
        if not shutil.which("sbatch"):
            raise SubmitError("there is no sbatch here; run this on a login node, or with --dry-run")
        make_log_directories(jobs)
        for job in _one_of_each_script(jobs):
            _test(job)
        _print_submitted(jobs, submit(jobs), options)
    except SubmitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def plan(options: argparse.Namespace) -> list[Job]:
    """All jobs, in an order in which each comes after those it waits for.

    Raises:
        SubmitError: options that do not go together.
    """
    first, last = STEPS.index(getattr(options, "from")), STEPS.index(options.until)
    if first > last:
        raise SubmitError(f"--from {STEPS[first]} comes after --until {STEPS[last]}; swap them")
    extra_options, extra_arguments = _by_step(options.sbatch, "--sbatch"), _by_step(options.args, "--args")
    jobs = [job for job in _data_jobs(options) + _run_jobs(options) if first <= STEPS.index(job.step) <= last]
    kept = {job.name for job in jobs}
    return [
        Job(
            job.name,
            job.step,
            job.script,
            job.settings,
            (*job.options, *extra_options["all"], *extra_options[job.step]),
            (*job.arguments, *extra_arguments[job.step]),
            tuple(name for name in job.after if name in kept),
        )
        for job in jobs
    ]


def submit(jobs: Sequence[Job]) -> dict[str, str]:
    """Submit in order; job name -> id.

    Raises:
        SubmitError: sbatch refused one; those submitted before it are cancelled.
    """
    ids: dict[str, str] = {}
    for job in jobs:
        done = _call(["sbatch", "--parsable", *_sbatch_words(job, ids)], job)
        if done.returncode:
            if ids:
                subprocess.run(["scancel", *ids.values()], timeout=SBATCH_TIMEOUT, check=False)
            cancelled = f"; the {len(ids)} jobs submitted before it are cancelled" if ids else ""
            raise SubmitError(f"sbatch refused {_name(job)}: {_reason(done)}{cancelled}")
        ids[job.name] = done.stdout.strip().split(";")[0]  # "id;cluster" in a federation
    return ids


def make_log_directories(jobs: Sequence[Job]) -> list[Path]:
    """The directory of every script's `#SBATCH --output`: without it a job fails at once, and says nothing."""
    made = []
    for script in dict.fromkeys(job.script for job in jobs):
        for line in script.read_text().splitlines():
            match = re.match(r"#SBATCH\s+(?:--(?:output|error)[=\s]|-[oe]\s*)(\S+)", line)
            if match and "%" not in str(Path(match[1]).parent):
                made.append(ROOT / Path(match[1]).parent)
                made[-1].mkdir(parents=True, exist_ok=True)
    return made


def _data_jobs(options: argparse.Namespace) -> list[Job]:
    source = options.source or CORPORA.get(options.config)
    name = source or Path(options.shards or "corpus").name
    paths = {
        "ORA_CORPUS": options.corpus or f"data/corpus/{name}",
        "ORA_TOKENIZER": options.tokenizer or f"data/tokenizer/{name}.model",
        "ORA_SHARDS": _shards(options),
    }
    if source is None and getattr(options, "from") == "download":
        raise SubmitError(f"config {options.config} has no corpus of its own: give --source, or --from {STEPS[1]}")
    split = {"ORA_NUM_TASKS": str(options.tasks), "ORA_NAME": name}
    array = f"--array=0-{options.tasks - 1}%{options.throttle or options.tasks}"
    return [
        Job("download", "download", _script("download"), _pick(paths, "ORA_CORPUS") | {"ORA_SOURCE": source or ""}),
        Job(
            "tokenizer",
            "tokenizer",
            _script("tokenizer"),
            _pick(paths, "ORA_CORPUS", "ORA_TOKENIZER"),
            after=("download",),
        ),
        Job("tokenize", "tokenize", _script("tokenize"), paths | split, (array,), after=("tokenizer",)),
        Job("merge", "merge", _script("merge"), _pick(paths, "ORA_SHARDS"), after=("tokenize",)),
    ]


def _run_jobs(options: argparse.Namespace) -> list[Job]:
    """One job a variant, and their comparison."""
    variants = [variant for variant in options.variants.split(",") if variant]
    if not variants or len(set(variants)) < len(variants):
        raise SubmitError(f"--variants {options.variants} must name one or more variants, each once")
    base = Path(options.config).stem
    shipped = ROOT / "slurm" / f"pretrain_{options.config}.sh"
    script = shipped if shipped.is_file() else _script("pretrain_small")
    settings = {"ORA_CONFIG": options.config, "ORA_RUN_DIRECTORY": options.runs}
    jobs = []
    for variant in variants:
        name = f"{base}-{variant}"
        overrides = (f"run.name={name}", f"attention.variant={variant}", f"data.directory={_shards(options)}")
        overrides += tuple(options.overrides)
        jobs.append(Job(name, "pretrain", script, settings, arguments=overrides, after=("merge",)))
    compare = {
        "ORA_RUNS": " ".join(f"{options.runs}/{job.name}" for job in jobs),
        "ORA_BASELINE": "vanilla" if "vanilla" in variants else f"{base}-{variants[0]}",
        "ORA_OUT": f"{options.runs}/comparison-{base}",
    }
    runs = tuple(job.name for job in jobs)
    return [*jobs, Job("compare", "compare", _script("compare"), compare, after=runs)]


def _sbatch_words(job: Job, ids: dict[str, str]) -> list[str]:
    """sbatch's arguments for a job whose predecessors have these ids."""
    words = [f"--job-name=ora-{job.name}"]
    if job.after:
        after = ":".join(ids[name] for name in job.after)
        words += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    return [*words, *job.options, str(job.script.relative_to(ROOT)), *job.arguments]


def _test(job: Job) -> None:
    """Would Slurm take this script here, with these options?"""
    words = _sbatch_words(Job(job.name, job.step, job.script, job.settings, job.options, job.arguments), {})
    done = _call(["sbatch", "--test-only", *words], job)
    if done.returncode:
        raise SubmitError(
            f"sbatch --test-only refuses {_name(job)}: {_reason(done)}; "
            f'change it with --sbatch {job.step}="--nodes=… --gres=…" or in the site file'
        )


def _call(command: list[str], job: Job) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | job.settings,
            capture_output=True,
            text=True,
            timeout=SBATCH_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise SubmitError(f"sbatch did not answer within {SBATCH_TIMEOUT} s; is slurmctld up (sinfo)?") from None


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """sbatch's own words, without its prefixes."""
    lines = [re.sub(r"^(sbatch|allocation failure): (error: )?", "", line) for line in done.stderr.splitlines()]
    lines = [re.sub(r"^allocation failure: ", "", line).rstrip(".") for line in lines if line.strip()]
    return "; ".join(dict.fromkeys(lines)) or f"exit code {done.returncode} without a message"


def _print_plan(jobs: Sequence[Job]) -> None:
    """Commands that could be pasted, with the job ids as shell variables."""
    for job in _one_of_each_script(jobs):
        words = _sbatch_words(Job(job.name, job.step, job.script, job.settings, job.options, job.arguments), {})
        print(_line(job, ["sbatch", "--test-only", *words]))
    print()
    names = {job.name: "$" + re.sub(r"\W", "_", job.name) for job in jobs}
    for job in jobs:
        command = _line(job, ["sbatch", "--parsable", *_sbatch_words(job, names)])
        for name in names.values():
            command = command.replace(shlex.quote(name), name)
        print(f"{names[job.name][1:]}=$({_unquote_ids(command, names)})")


def _unquote_ids(command: str, names: dict[str, str]) -> str:
    """A shell variable inside single quotes would stay as it is."""
    return re.sub(r"'(--dependency=afterok:[$\w:]+)'", r"\1", command)


def _line(job: Job, command: list[str]) -> str:
    settings = [f"{name}={shlex.quote(value)}" for name, value in job.settings.items()]
    return " ".join([*settings, shlex.join(command)])


def _print_submitted(jobs: Sequence[Job], ids: dict[str, str], options: argparse.Namespace) -> None:
    width = max(len(job.name) for job in jobs)
    for job in jobs:
        after = f"after {', '.join(ids[name] for name in job.after)}" if job.after else "as soon as there is room"
        print(f"{ids[job.name]:>10}  {job.name:<{width}}  {after}")
    every = ",".join(ids.values())
    print(f"\nqueue:   squeue --jobs={every} --start")
    print(f"logs:    tail -F {os.path.relpath(make_log_directories(jobs)[0])}/*")
    if any(job.step == "pretrain" for job in jobs):
        print(f"curves:  tensorboard --logdir {options.runs}")
    print(f"history: sacct --jobs={every} --format=JobID,JobName%30,State,ExitCode,Elapsed,NodeList")
    print(f"stop:    scancel {every.replace(',', ' ')}")


def _one_of_each_script(jobs: Sequence[Job]) -> list[Job]:
    return list({job.script: job for job in reversed(jobs)}.values())[::-1]


def _by_step(given: Sequence[str], option: str) -> dict[str, tuple[str, ...]]:
    """`STEP=WORDS`, several times, to step -> words."""
    found: dict[str, tuple[str, ...]] = {step: () for step in ("all", *STEPS)}
    for entry in given:
        step, equals, words = entry.partition("=")
        if not equals or step not in found:
            raise SubmitError(f"{option} {entry} must be STEP=WORDS with STEP one of {', '.join(found)}")
        found[step] += tuple(shlex.split(words))
    return found


def _pick(settings: dict[str, str], *names: str) -> dict[str, str]:
    return {name: settings[name] for name in names}


def _shards(options: argparse.Namespace) -> str:
    if options.shards:
        return str(options.shards)
    if options.config not in CORPORA:
        raise SubmitError(f"config {options.config} is your own: give --shards, where its tokens are or will be")
    return f"data/{CORPORA[options.config]}"


def _script(name: str) -> Path:
    return ROOT / "slurm" / f"{name}.sh"


def _name(job: Job) -> str:
    return f"{job.script.relative_to(ROOT)} ({job.name})"


def _path(text: str) -> str:
    if re.search(r"\s", text):
        raise argparse.ArgumentTypeError(f"{text!r} has a blank: the job scripts part lists of paths by blanks")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog='Example: python slurm/submit.py large --sbatch all="--partition=gpu --account=me" --dry-run',
    )
    parser.add_argument("config", type=_path, help="small, base, large, demo, or a YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value for every run")
    parser.add_argument("--variants", default="vanilla,orthogonal", help="one run each; default: %(default)s")
    parser.add_argument("--from", choices=STEPS, default=STEPS[0], help="first step; what is before it is there")
    parser.add_argument("--until", choices=STEPS, default=STEPS[-1], help="last step")
    parser.add_argument("--source", help="corpus to download; default: the config's")
    parser.add_argument("--corpus", type=_path, help="directory of the text; default: data/corpus/SOURCE")
    parser.add_argument("--tokenizer", type=_path, help="default: data/tokenizer/SOURCE.model")
    parser.add_argument("--shards", type=_path, help="directory of the tokens; default: the config's data.directory")
    parser.add_argument("--runs", type=_path, default="runs", help="directory of the runs; default: %(default)s")
    parser.add_argument("--tasks", type=_positive, default=32, help="array tasks of tokenize; default: %(default)s")
    parser.add_argument("--throttle", type=_positive, help="of them, at most this many at a time")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="STEP=OPTIONS", help="options of sbatch; STEP all: every job"
    )
    parser.add_argument(
        "--args", action="append", default=[], metavar="STEP=WORDS", help="arguments of a step's script"
    )
    parser.add_argument("--dry-run", action="store_true", help="print every command, run none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
