"""The chain of jobs that `submit.py` submits, their settings and their order."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("download", "tokenizer", "tokenize", "merge", "pretrain", "compare")
CORPORA = {"small": "tinystories", "base": "openwebtext", "large": "slimpajama", "demo": "demo"}
CORPORA |= {f"{config}_modern": corpus for config, corpus in CORPORA.items()}
RECIPES = {
    "slimpajama": {
        "download": "--fraction 0.16667",
        "tokenize": "--files-per-shard 16 --validation-fraction 0.001 --test-fraction 0.001",
    }
}
"""{corpus: {step: options}} for what its configs need: 104 of 627 B tokens, for 100 B to train on.

docs/data.md has the same by hand.
"""
# The demo corpus is too small for the others' 32,000 pieces.
DEMO_TOKENIZER = ("--vocab-size", "4096")


OWN_KEYS = {
    "run.name": "the chain names its runs",
    "run.directory": "give --runs",
    "attention.variant": "give --variants",
    "data.directory": "give --shards",
}
"""{key that the chain sets itself: the option to use instead}"""


class SubmitError(Exception):
    """A sentence that says what to fix."""


@dataclass(frozen=True)
class Job:
    """A call of sbatch.

    Attributes:
        name: Name of the job, unique in the chain.
        step: Step of the chain.
        script: Script that the job runs.
        settings: ORA_* variables, see slurm/lib.sh.
        options: Options of sbatch.
        arguments: Arguments of the script.
        after: Names of the jobs that must have ended well.
    """

    name: str
    step: str
    script: Path
    settings: dict[str, str]
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def plan(options: argparse.Namespace) -> list[Job]:
    """Return all jobs, each after the jobs it waits for.

    Raises:
        SubmitError: the options contradict each other, or an override is none for the runs.
    """
    first = STEPS.index(getattr(options, "from"))
    last = STEPS.index(options.until)
    if first > last:
        raise SubmitError(f"--from {STEPS[first]} comes after --until {STEPS[last]}; swap them")
    _check_config(options.config)
    extra_options = _by_step(options.sbatch, "--sbatch")
    extra_arguments = _by_step(options.args, "--args")
    _check_overrides((*options.overrides, *extra_arguments["pretrain"]))
    jobs = [
        job
        for job in _data_jobs(options) + _run_jobs(options)
        if first <= STEPS.index(job.step) <= last
    ]
    kept = {job.name for job in jobs}
    return [
        replace(
            job,
            options=(*job.options, *extra_options["all"], *extra_options[job.step]),
            arguments=(*job.arguments, *extra_arguments["all"], *extra_arguments[job.step]),
            after=tuple(name for name in job.after if name in kept),
        )
        for job in jobs
    ]


def _data_jobs(options: argparse.Namespace) -> list[Job]:
    source = options.source or CORPORA.get(options.config)
    name = source or Path(options.shards or "corpus").name
    corpus = {"ORA_CORPUS": options.corpus or f"data/{name}-text"}
    tokenizer = corpus | {"ORA_TOKENIZER": options.tokenizer or f"data/{name}.model"}
    shards = {"ORA_SHARDS": _shards(options)}
    if source is None and getattr(options, "from") == "download":
        raise SubmitError(
            f"config {options.config} has no corpus of its own: give --source, or --from {STEPS[1]}"
        )
    split = {"ORA_NUM_TASKS": str(options.tasks), "ORA_NAME": name}
    array = f"--array=0-{options.tasks - 1}%{options.throttle or options.tasks}"
    words = DEMO_TOKENIZER if CORPORA.get(options.config) == "demo" else ()
    stated = {} if options.source else RECIPES.get(name, {})
    recipe = {step: tuple(stated.get(step, "").split()) for step in STEPS}
    return [
        _job("download", corpus | {"ORA_SOURCE": source or ""}, arguments=recipe["download"]),
        _job("tokenizer", tokenizer, "download", arguments=words),
        _job(
            "tokenize",
            tokenizer | shards | split,
            "tokenizer",
            options=(array,),
            arguments=recipe["tokenize"],
        ),
        _job("merge", shards, "tokenize"),
    ]


def _job(step: str, settings: dict[str, str], *after: str, **words: tuple[str, ...]) -> Job:
    """Return the only job of a step."""
    return Job(step, step, _script(step), settings, after=after, **words)


def _run_jobs(options: argparse.Namespace) -> list[Job]:
    """Return one job a variant, and their comparison."""
    variants = [variant for variant in options.variants.split(",") if variant]
    if not variants or len(set(variants)) < len(variants):
        raise SubmitError(
            f"--variants {options.variants} must name one or more variants, each once"
        )
    base = Path(options.config).stem
    shipped = ROOT / "slurm" / f"pretrain_{options.config.removesuffix('_modern')}.sh"
    script = shipped if shipped.is_file() else _script("pretrain_small")
    settings = {"ORA_CONFIG": options.config, "ORA_RUN_DIRECTORY": options.runs}
    jobs = []
    for variant in variants:
        name = f"{base}-{variant}"
        overrides = (
            f"run.name={name}",
            f"attention.variant={variant}",
            f"data.directory={_shards(options)}",
        )
        overrides += tuple(options.overrides)
        jobs.append(Job(name, "pretrain", script, settings, arguments=overrides, after=("merge",)))
    compare = {
        "ORA_RUNS": " ".join(f"{options.runs}/{job.name}" for job in jobs),
        "ORA_BASELINE": "vanilla" if "vanilla" in variants else f"{base}-{variants[0]}",
        "ORA_OUT": f"{options.runs}/comparison-{base}",
    }
    return [*jobs, _job("compare", compare, *(job.name for job in jobs))]


def _check_config(config: str) -> None:
    """Refuse a name that is neither a shipped config nor the path of a YAML file."""
    if config in CORPORA or config.endswith((".yaml", ".yml")) or Path(config).is_file():
        return
    near = difflib.get_close_matches(config, CORPORA, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise SubmitError(
        f"config {config} is neither a file nor one of the shipped configs: "
        f"{', '.join(sorted(CORPORA))}{hint}"
    )


def _check_overrides(words: Sequence[str]) -> None:
    """Refuse words that no run takes before the data is made, and keys that the chain sets."""
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or not all(key.partition(".")):
            raise SubmitError(
                f"{word} is not an override of the form section.key=value, such as run.seed=7"
            )
        if remedy := OWN_KEYS.get(key.strip()):
            raise SubmitError(f"{word} is the chain's own key: leave it out; {remedy}")


def _by_step(entries: Sequence[str], option: str) -> dict[str, tuple[str, ...]]:
    """Return {step: words} of several `STEP=WORDS`."""
    words_by_step: dict[str, tuple[str, ...]] = {step: () for step in ("all", *STEPS)}
    for entry in entries:
        step, equals, words = entry.partition("=")
        if not equals or step not in words_by_step:
            raise SubmitError(
                f"{option} {entry} must be STEP=WORDS with STEP one of {', '.join(words_by_step)}"
            )
        try:
            words_by_step[step] += tuple(shlex.split(words))
        except ValueError as error:
            raise SubmitError(
                f"{option} {entry} cannot be read as words of a shell: {error}"
            ) from error
    return words_by_step


def _shards(options: argparse.Namespace) -> str:
    if options.shards:
        return str(options.shards)
    if options.config not in CORPORA:
        remedy = "give --shards, where its tokens are or will be"
        raise SubmitError(f"config {options.config} is your own: {remedy}")
    return f"data/{CORPORA[options.config]}"


def _script(name: str) -> Path:
    return ROOT / "slurm" / f"{name}.sh"


def _path(text: str) -> str:
    if re.search(r"\s", text):
        why = "the job scripts part lists of paths by blanks"
        raise argparse.ArgumentTypeError(f"{text!r} has a blank: {why}")
    return os.path.expanduser(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the command line of submit.py."""
    parser = argparse.ArgumentParser(
        description="Submit download -> tokenizer -> tokenize -> merge -> pretrain -> compare.",
        epilog='Example: python slurm/submit.py large --sbatch all="--partition=gpu" --dry-run',
    )
    parser.add_argument(
        "config", type=_path, help="a shipped config, as small or large_modern, or a YAML file"
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value for every run")
    parser.add_argument(
        "--variants", default="vanilla,orthogonal", help="one run each; default: %(default)s"
    )
    parser.add_argument(
        "--from", choices=STEPS, default=STEPS[0], help="first step; those before are done"
    )
    parser.add_argument("--until", choices=STEPS, default=STEPS[-1], help="last step")
    parser.add_argument(
        "--source", help="corpus to download, all of it; default: what the config needs of its own"
    )
    parser.add_argument(
        "--corpus", type=_path, help="directory of the text; default: data/SOURCE-text"
    )
    parser.add_argument("--tokenizer", type=_path, help="default: data/SOURCE.model")
    parser.add_argument(
        "--shards", type=_path, help="directory of the tokens; default: data.directory"
    )
    parser.add_argument(
        "--runs", type=_path, help="their directory; default: ORA_RUN_DIRECTORY, else runs"
    )
    parser.add_argument(
        "--tasks", type=_positive, default=32, help="of tokenize's array (%(default)s)"
    )
    parser.add_argument("--throttle", type=_positive, help="of them, at most this many at a time")
    several: dict[str, Any] = {"action": "append", "default": [], "metavar": "STEP=WORDS"}
    parser.add_argument("--sbatch", **several, help="options of sbatch; STEP all: every job")
    parser.add_argument("--args", **several, help="arguments of a step's script")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the sbatch commands; submit nothing"
    )
    return parser
