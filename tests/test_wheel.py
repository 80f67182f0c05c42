"""What `pip install .` gives, away from the checkout: a wheel is built, installed and used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import pretrain
from tests.environments import Environment
from tests.ranks import ROOT, rank_environment
from tools.release import WITHOUT_TORCH, build

pytestmark = pytest.mark.distributed  # builds, installs and starts programs
PRODUCT = ("pretrain", "laboratory", "megatron_patches", "data_pipeline", "ds_configs")
DATA = (".yaml", ".json", ".md", ".css", ".js", ".typed")


@dataclass(frozen=True)
class Installed:
    """The wheel in its own environment, with what its extra `compare` needs."""

    sdist: Path
    wheel: Path
    programs: Path
    outside: Path
    """An empty directory far from the checkout: where the commands are called."""

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            key: value for key, value in rank_environment().items() if key != "PYTHONPATH"
        }
        command = [str(self.programs / program), *arguments]
        return subprocess.run(
            command, cwd=self.outside, env=environment, capture_output=True, text=True, timeout=200
        )

    def output(self, program: str, *arguments: str) -> str:
        done = self.run(program, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    directory = tmp_path_factory.mktemp("wheel")
    sdist, wheel = build(directory)
    environment = Environment(directory / "environment")
    environment.install("compare")
    options = "install --no-deps --no-index --no-warn-script-location"
    pip("--python", directory / "environment", *options.split(), wheel)
    (outside := directory / "outside").mkdir()
    yield Installed(sdist, wheel, environment.programs, outside)
    shutil.rmtree(directory, ignore_errors=True)


def pip(*arguments: str | os.PathLike[str]) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_program_and_nothing_else(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    expected = {
        str(path.relative_to(ROOT))
        for package in PRODUCT
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", *DATA) and "__pycache__" not in path.parts
    }
    assert len(expected) > 100 and "laboratory/grids/studies/demo_variants.yaml" in expected
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert installed.wheel.name == f"ora_pretrain-{pretrain.__version__}-py3-none-any.whl"


def test_the_sdist_builds_the_wheel_and_has_no_tests(installed: Installed) -> None:
    """The wheel here is built from it."""
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"constraints.txt", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]


def test_the_page_names_what_compare_losses_needs_without_torch() -> None:
    page = " ".join((ROOT / "docs/compare-losses.md").read_text().split())
    listed = page.partition("`pip install --no-deps` the wheel, and install ")[2].partition(".")[0]
    assert sorted(re.split(", | and ", listed)) == sorted(WITHOUT_TORCH)


def test_nobody_is_sent_to_an_index_for_this_program() -> None:
    """It is on none: whoever registered its name there would own whoever followed."""
    sources = [path for package in PRODUCT for path in (ROOT / package).rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.ipynb")]
    asked = re.compile(r"ora-pretrain\[|install ['\"]?ora-pretrain\b")
    assert asked.search("pip install 'ora-pretrain[export]'")
    paths = [str(path) for path in (*sources, *pages) if asked.search(path.read_text())]
    assert paths == [], f"{paths}: data_pipeline.errors.how_to_install has the command that works"


def test_the_metadata_says_what_it_is(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        lines = wheel.read(name).decode().split("\n\n")[0].splitlines()
    fields = {"Name: ora-pretrain", f"Version: {pretrain.__version__}"}
    assert fields | {"License-Expression: Apache-2.0"} <= set(lines)
    assert "Requires-Python: >=3.10" in lines and "Requires-Dist: torch>=2.9" in lines


def test_python_finds_the_installed_program_and_not_the_checkout(installed: Installed) -> None:
    program = (
        "import data_pipeline, ds_configs, importlib.metadata, megatron_patches, pretrain\n"
        "assert importlib.metadata.version('ora-pretrain') == pretrain.__version__\n"
        "print(pretrain.__version__)\n"
        "print(pretrain.__file__, data_pipeline.__file__, ds_configs.__file__, "
        "megatron_patches.__file__, sep='\\n')\n"
    )
    version, *files = installed.output("python", "-c", program).splitlines()
    assert version == pretrain.__version__
    home = installed.programs.parent
    assert all(Path(file).is_relative_to(home) for file in files), files


def test_a_missing_extra_is_named_by_its_packages(installed: Installed) -> None:
    """Not by the program's own name, which whoever registers it on an index would own."""
    program = "from data_pipeline.errors import how_to_install as how\nprint(how('eval'))\n"
    said = installed.output("python", "-c", program)
    assert " install " in said and "ora-pretrain" not in said and "extra" not in said
    for package in ("matplotlib>=", "accelerate>=", "transformers>=5", "'lm-eval<0.5,>=0.4.13'"):
        assert package in said


def test_ora_pretrain_shows_a_packaged_config(installed: Installed) -> None:
    shown = installed.output("ora-pretrain", "show", "large")
    assert "hidden_size" in shown and "large.yaml:" in shown
    said = installed.output("ora-pretrain", "--version")
    assert said.startswith(f"ora-pretrain {pretrain.__version__} ")


def test_the_deepspeed_settings_are_found(installed: Installed) -> None:
    program = (
        "from pretrain.config.load import load_config\n"
        "from pretrain.config.resolved import resolve\n"
        "only = 'parallel.tensor_model_parallel_size=1'\n"
        "for stage in (1, 2, 3):\n"
        "    config = load_config('demo', [f'deepspeed.config=zero{stage}', only])\n"
        "    print(resolve(config, 1).layout.zero_stage)\n"
    )
    assert installed.output("python", "-c", program).split() == ["1", "2", "3"]


def test_a_packaged_grid_is_found(installed: Installed) -> None:
    listed = installed.output("ora-pretrain", "sweep", "demo_rates", "--dry-run")
    assert "learning_rate" in listed


def test_training_without_data_ends_in_one_sentence(installed: Installed) -> None:
    done = installed.run("ora-pretrain", "train", "demo", "--local-ranks=2")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ") and "demo/shards" in done.stderr
    assert list(installed.outside.iterdir()) == []


def test_ora_data_has_its_verbs(installed: Installed) -> None:
    usage = installed.output("ora-data", "--help")
    verbs = ["demo-corpus", "train-tokenizer", "tokenize", "verify", "stats"]
    assert all(verb in usage for verb in verbs)


def test_ora_data_works_where_the_user_is(installed: Installed) -> None:
    text = installed.outside / "text.txt"
    text.write_text("".join(f"a word {number**2}, and another one\n" for number in range(999)))
    options = ("--out", "small", "--vocab-size=280")
    installed.output("ora-data", "train-tokenizer", "text.txt", *options)
    written = {path.name for path in installed.outside.iterdir()}
    assert written == {"text.txt", "small.model", "small.json"}
    for name in written:
        (installed.outside / name).unlink()
