"""The documentation names only what is there: links, files, commands, options, keys, floors."""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

import data_pipeline.__main__
import megatron_patches.__main__
import pretrain.__main__
from laboratory.sweep.grid import read_grid
from laboratory.sweep.plan import plan_sweep
from pretrain.config.keys import SECTIONS as CONFIG_SECTIONS
from pretrain.config.load import load_config
from pretrain.config.removed import REMOVED_KEYS
from pretrain.config.sources import parse_overrides
from tests.parsed_files import python_files
from tests.ranks import ROOT
from tests.shipped_grids import shipped_grids
from tests.test_architecture import FLOORS
from tests.test_versions import project

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "ds_configs/*.md", "tests/*.md")
    for path in ROOT.glob(pattern)
    if not path.is_relative_to(ROOT / "docs/results")
    or path.name in ("README.md", "details.md", "protocol.md")  # else by a command
)
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
METHOD = ("docs/method.md", "docs/method-exactly.md")
FOLDERS = (
    "pretrain|laboratory|megatron_patches|data_pipeline|ds_configs|slurm|tests|benchmarks|docs"
)
OWN_MODULES = ("laboratory.results", "laboratory.evaluation.toy_tasks")
"""Modules that a page runs, which are no programs with verbs."""
PROGRAMS = ("pretrain", "laboratory", "data_pipeline", "megatron_patches")
NOT_IN_THE_CHECKOUT = (
    "slurm/site.sh",
    "slurm/logs",
    "slurm/code",
    "slurm/ora",
    "docs/results/modern/records",
    "tests/distributed/workers/mine.py",
)
"""What a page tells the reader to make."""

SHIPPED = {path.stem for path in (ROOT / "pretrain/configs").glob("*.yaml")}
DRAW = runpy.run_path(str(ROOT / "docs/figures/draw.py"))
BUILD = runpy.run_path(str(ROOT / "docs/site/build.py"))

SECTIONS = {name: {*section.model_fields} for name, section in CONFIG_SECTIONS.items()}
SECTIONS["checkpoint"] |= {"load_universal"}  # a key of DeepSpeed's section of the same name
FILE_ENDINGS = {"json", "yaml", "md", "py", "safetensors"}  # data.json is a file


def test_the_pages_are_found() -> None:
    assert {"README.md", "CHANGELOG.md", "docs/method.md", "ds_configs/README.md"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{name} links to {target}, which has no such heading"


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*[\w/]", (ROOT / name).read_text()):
        exempt = path.startswith(NOT_IN_THE_CHECKOUT) or re.search(r"[A-Z]{4}|\.\.\.", path)
        assert exempt or (ROOT / path).exists(), f"{name} names {path}"


@pytest.mark.parametrize(
    "name", ["docs/architecture.md", "docs/extending.md", "docs/glossary.md", *METHOD]
)
def test_names_of_the_code_that_a_guide_gives_are_in_the_code(name: str) -> None:
    sources = [path for folder in FOLDERS.split("|") for path in python_files(ROOT / folder)]
    files = {path.name for path in sources}
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    spans = re.findall(r"`([^`\n]+)`", prose((ROOT / name).read_text()))
    assert [span for span in spans if re.fullmatch(r"\w+\.py", span) and span not in files] == []
    identifiers = {span for span in spans if re.fullmatch(r"_?[A-Za-z]+(_[a-z]+)*", span)}
    identifiers = {span for span in identifiers if re.search(r"_|[a-z][A-Z]", span)}
    assert identifiers - words == set()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_commands_that_are_named_exist_with_their_options(name: str) -> None:
    """The CHANGELOG names what is gone too."""
    for command in commands((ROOT / name).read_text()):
        words = command.split()
        if words[0] == "make":
            assert len(words) < 2 or words[1] in make_targets(), f"{name}: {command}"
            continue
        if words[2].startswith(OWN_MODULES) or not words[2].startswith(PROGRAMS):
            continue
        verb, options = known_options(words[2], words[3:])
        assert options is not None, f"{name}: there is no verb in '{command}'"
        unknown = [word.partition("=")[0] for word in words if word.startswith("--")]
        unknown = [word for word in unknown if word not in options]
        assert unknown == [], f"{name}: '{verb}' has no option {unknown} (in '{command}')"


@pytest.mark.parametrize("name", NAMES)
def test_configuration_keys_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    text = prose(text) + "\n".join(commands(text))
    for section, keys in SECTIONS.items():
        used = set(re.findall(rf"(?<![\w./]){section}\.([a-z_]+)(?![\w(])", text))
        if name == "docs/extending.md":
            used -= {"sgd"}  # the settings of its example
        if name.startswith(("CHANGELOG", "docs/results/")):
            used -= {key.removeprefix(f"{section}.") for key in REMOVED_KEYS}
        assert used - FILE_ENDINGS <= keys, f"{name} names {section}.{used - FILE_ENDINGS - keys}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_on_shipped_files_would_start(name: str) -> None:
    """Their settings go with the config, or with the grid on its base.

    A grid as it is shipped is planned in tests/laboratory/sweep/test_grid.py.
    """
    for command in commands((ROOT / name).read_text()):
        verb, file, *words = [*command.split()[3:], "", ""]
        settings = [word for word in words if re.match(r"[a-z]+\.[a-z_]+=[^$…]+$", word)]
        if verb in ("train", "show", "plan") and file in SHIPPED:
            load_config(file, settings)
        elif verb == "sweep" and file in shipped_grids():
            base = words[words.index("--base") + 1] if "--base" in words else None
            if base or settings:
                overrides = parse_overrides(settings)
                plan_sweep(read_grid(file), base, overrides, lambda _: 1, check_data=False)


@pytest.mark.parametrize("name", sorted(DRAW["DRAWINGS"]))
def test_a_drawing_is_what_its_script_draws(name: str) -> None:
    drawn = DRAW["DRAWINGS"][name]()
    assert (ROOT / "docs/figures" / name).read_text() == drawn
    assert "prefers-color-scheme: dark" in drawn
    assert ElementTree.fromstring(drawn)[0].tag.endswith("title")


def test_the_site_has_every_page(tmp_path: Path) -> None:
    """In its navigation, but for single results, which their overview links to."""
    BUILD["gather"](tmp_path)
    settings = (tmp_path / "zensical.toml").read_text()
    listed = re.findall(r'"([\w/.-]+\.md)"', settings.partition("nav = ")[2].partition("\n]")[0])
    assert len(listed) == len(set(listed))
    gathered = {str(page.relative_to(tmp_path / "pages")) for page in tmp_path.rglob("*.md")}
    assert set(listed) <= gathered
    assert [page for page in gathered - set(listed) if not page.startswith("docs/results/")] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = '<a href="b.html#here">{}</a><a href="b.html#there"></a>'
    page += '<img src="c.png"><a href="https://x.y"></a>'
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text('<p id="here"></p><a href="#here"></a>')
    assert [link for _, link in BUILD["dead_links"](tmp_path)] == ["b.html#there", "c.png"]


def test_formulas_are_set_and_code_is_left_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("W_Q x, k_(t−j), n^1.25; `W_Q`, data.a_b [a](x_1.md)\n\n    W_K\n")
    assert BUILD["page_text"](page) == (
        "W<sub>Q</sub> x, k<sub>t−j</sub>, n<sup>1.25</sup>; `W_Q`, data.a_b [a](x_1.md)"
        "\n\n    W_K\n"
    )


@pytest.mark.full
def test_the_site_is_built_without_a_dead_link(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="`make site` installs it")
    command = [sys.executable, str(ROOT / "docs/site/build.py"), "--out", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [page.read_text() for page in (tmp_path / "site/html").rglob("*.html")]
    asked = {
        address
        for page in pages
        for address in re.findall(r'(?:src|stylesheet" href)="(https?:[^"]+)', page)
    }
    assert asked == set()  # of no other machine


def test_the_log_names_commits_of_this_history() -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a checkout with its whole history is needed")
    commits = set(re.findall(r"`([0-9a-f]{7,12})`", (ROOT / "docs/LOG.md").read_text()))
    assert len(commits) > 10
    assert [
        commit
        for commit in sorted(commits)
        if git("cat-file", "-e", f"{commit}^{{commit}}").returncode
    ] == []


def test_containers_install_what_was_tested() -> None:
    (torch,) = re.findall(
        r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE
    )
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"ARG TORCH_VERSION={torch}\n" in dockerfile
    assert f"torch=={torch} " in (ROOT / "slurm/apptainer-cpu.def").read_text()
    for image in ("apptainer.def", "apptainer-cpu.def"):
        (extras,) = re.findall(r"for extra in \((.*?)\)", (ROOT / "slurm" / image).read_text())
        assert set(re.findall(r'"(\w+)"', extras)) <= project()["optional-dependencies"].keys()
    for source in re.findall(r"^COPY (.*) \S+$", dockerfile, flags=re.MULTILINE):
        assert [file for file in source.split() if not (ROOT / file).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text()
    assert {f"!{name}" for name in re.findall(r"^COPY (\w+) ", dockerfile, flags=re.MULTILINE)} <= {
        *ignored.split()
    }


def test_pages_install_the_torch_of_the_constraints() -> None:
    pin = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    pages = [(ROOT / name).read_text() for name in NAMES if name != "CHANGELOG.md"]
    pins = {text for page in pages for text in re.findall(r"\btorch==[\w.+]+", page)}
    assert pin and pins == {pin[0]}


def test_readme_fits_on_two_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 115
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tests/README.md"])
def test_prose_is_wrapped(name: str) -> None:
    lines = prose((ROOT / name).read_text()).splitlines()
    assert [line for line in lines if len(line) > 100 and not line.lstrip().startswith("|")] == []


@pytest.mark.parametrize("package", ["pretrain", "laboratory"])
def test_the_floors_are_those_of_the_test(package: str) -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition(f"## The floors of `{package}`")[2].partition("\n## ")[0]
    rows = [
        re.findall(r"`(\w+)`", row.split("|")[1])
        for row in section.splitlines()
        if row.startswith("| `")
    ]
    assert [set(row) for row in rows] == [set(floor) for floor in reversed(FLOORS[package])]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return _lines(text, fenced=False)


def _lines(text: str, fenced: bool) -> str:
    """The lines of a page inside, or outside, its fenced blocks."""
    inside, chosen = False, []
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside == fenced:
            chosen.append(line)
    return "\n".join(chosen)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[str]:
    """`python -m …`, `ora-… …` and `make …`, in fenced blocks and code spans, without comments."""
    text = re.sub(r"\\\n", " ", text)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]
    for line in [*_lines(text, fenced=True).splitlines(), *spans]:
        line = line.partition("  #")[0].strip().removeprefix("$ ")
        line = re.sub(
            "^ora-data ",
            "python -m data_pipeline ",
            re.sub("^ora-pretrain ", "python -m pretrain ", line),
        )
        match = re.search(r"python -m [a-z_.]+.*|^make(?: [a-z-]+)*", line)
        if match:
            yield re.split(r"[;'|)]", match.group())[0].strip()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def known_options(package: str, words: list[str]) -> tuple[str, set[str] | None]:
    """(the verb, its options) that `words` of a command line begin with; None for no such verb."""
    programs = command_lines()
    if package not in programs:
        return package, set() if package in ("pretrain.job", "laboratory.slurm") else None
    command, path = programs[package], package
    while hasattr(command, "commands") and words and re.fullmatch(r"[a-z-]+", words[0]):
        if words[0] not in command.commands:
            return path, None
        command = command.commands[words[0]]
        path += f" {words[0]}"
        words = words[1:]
    return path, {option for param in command.params for option in param.opts} | {"--help"}


@cache
def command_lines() -> dict[str, Any]:
    """{package: its command line}"""
    programs = (pretrain.__main__, data_pipeline.__main__, megatron_patches.__main__)
    return {
        module.__name__.split(".")[0]: typer.main.get_command(module.app) for module in programs
    }
