"""Every command of README, pasted: in the environment that `make demo` makes, on small models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.environments import Environment
from tests.ranks import ROOT

README = (ROOT / "README.md").read_text()
SMALL = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "data.validation_samples": 8,
    "schedule.steps": 6,
    "schedule.warmup_steps": 2,
}
SETTINGS = "".join(f" {key}={value}" for key, value in SMALL.items())
OPTIONS = "".join(f" --set {key}={value}" for key, value in SMALL.items())
SETUP = ("source .venv/bin/activate",)
"""Commands that make the environment; `Environment` does the same without a network."""
TRY = "ora-pretrain try docs/*.md --minutes 4"
EXPORT = "python -m pretrain export demo/runs/orthogonal --out exported"
PASTED = {
    TRY: OPTIONS,
    "tensorboard --logdir demo/runs": " --inspect",
    "python -m pretrain plan large": "",
    "python -m pretrain train demo": SETTINGS,
    "python -m pretrain sweep a1_init": " --dry-run",
    "python -m pretrain compare demo/runs/vanilla demo/runs/": "",
    EXPORT: "",
}
"""{beginning of a command: what is added, so that it takes seconds}"""
INSTALLED = re.compile(r"pip install -e '\.\[(\w+)\]'")
PROGRAMS = ("make", "ora-pretrain", "ora-data", "python", "pip", "uv", "tensorboard", "sbatch")


def commands() -> list[str]:
    """The lines of README's blocks, and what is a command in its text, in their order."""
    listed = []
    for block, span in re.findall(r"^```\n(.*?)^```|`([^`\n]+)`", README, flags=re.M | re.S):
        lines = block.splitlines() if block else [span]
        parts = [part for line in lines for part in line.partition(" # ")[0].strip().split(" && ")]
        runnable = [part for part in parts if block or part.split()[0] in PROGRAMS]
        listed += [part for part in runnable if part and (block or part not in PROGRAMS)]
    return list(dict.fromkeys(listed))


def added_to(command: str) -> str | None:
    """Return the words that PASTED adds to a command; None: it is not there."""
    return next((more for begin, more in PASTED.items() if command.startswith(begin)), None)


class Reader:
    """Someone who pastes the commands one after the other; each is run once, when asked for.

    Args:
        environment: what the quickstart installs, and nothing else.
        directory: where it is done: with the pages of docs.
    """

    def __init__(self, environment: Environment, directory: Path) -> None:
        self.environment = environment
        self.place = directory
        self._waiting = commands()
        self._done: dict[str, subprocess.CompletedProcess[str]] = {}

    def paste(self, command: str) -> subprocess.CompletedProcess[str]:
        """Return the outcome of a command, run after all that stand before it in README."""
        while command not in self._done:
            first = self._waiting.pop(0)
            self._done[first] = self._run(first)
        return self._done[command]

    def _run(self, command: str) -> subprocess.CompletedProcess[str]:
        if command in SETUP:
            return subprocess.CompletedProcess(command, 0, "", "")
        if extra := INSTALLED.fullmatch(command):
            refused = self.environment.run(EXPORT, self.place)
            self.environment.install(extra[1])
            return refused
        if command.startswith("make "):
            shown = self.environment.run(f"{command} --dry-run", ROOT)
            if command != "make demo":
                return shown
            done = self.environment.run(f"ora-pretrain demo{OPTIONS}", self.place)
            return done if done.returncode else shown
        return self.environment.run(command + (added_to(command) or ""), self.place)


@pytest.fixture(scope="module")
def reader(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    directory = tmp_path_factory.mktemp("quickstart")
    shutil.copytree(ROOT / "docs", directory / "docs")  # with the tables of its results
    shutil.copytree(prose, directory / "demo/corpus")  # as `make demo` makes it, in ten seconds
    environment = Environment(directory / "venv")
    environment.install("compare")  # in a checkout
    environment.install_checkout(ROOT)
    return Reader(environment, directory)


def test_every_command_is_one_that_is_pasted_here() -> None:
    prefixes = [*SETUP, *PASTED, "make ", "pip install -e '.["]
    assert [line for line in commands() if not line.startswith(tuple(prefixes))] == []
    assert {"make demo", "make test", TRY, "tensorboard --logdir demo/runs"} <= {*commands()}
    assert len(commands()) > 10


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in commands() if line not in SETUP])
def test_a_command_does_what_it_says(command: str, reader: Reader) -> None:
    done = reader.paste(command)
    if INSTALLED.fullmatch(command):  # before it, the verb that needs it says so
        # setuptools, which the environment of the tests has, may warn before the sentence
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].endswith("--editable '.[export]'")
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_what_the_commands_leave_is_what_readme_names(reader: Reader) -> None:
    reader.paste(commands()[-1])
    for path in ("demo/comparison/report.html", "comparison/report.html", "exported/config.json"):
        assert (reader.place / path).is_file()
    output = reader.paste("make demo").stdout
    assert "OMP_NUM_THREADS=1 .venv/bin/python -m pretrain demo --out demo" in output


@pytest.mark.slow
def test_texts_become_a_page_with_text_of_both_models(reader: Reader) -> None:
    said = reader.paste(TRY).stdout.splitlines()
    assert said[1] == "vanilla beside vanilla_conv4 beside monarch_shared_conv:"
    assert said[4].startswith("2 layers of 32") and "6 steps" in said[4]
    assert said[-1] == "report: trial/comparison/report.html"
    page = reader.place / "trial/comparison"
    content = json.loads((page / "comparison.json").read_text())
    names = [variant["name"] for variant in content["variants"]]
    assert names == ["vanilla_conv4", "vanilla", "monarch_shared_conv"]
    assert [text["variant"] for text in content["texts"]] == [
        name for name in names for _ in range(2)
    ]
    prompts = [text["prompt"] for text in content["texts"]]
    assert prompts == prompts[:2] * 3 and prompts[0] != prompts[1]
    written = (page / "report.html").read_text()
    assert "Text of the models" in written and written.count("<svg") >= 3
    other = reader.environment.run(f"{TRY}{OPTIONS} --design orthogonal", reader.place)
    assert other.returncode == 2 and other.stderr.startswith(
        "error: trial/sweep.yaml is of another"
    )
