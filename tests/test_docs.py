"""The documentation names only what is there: links, files, commands, options, configuration keys, floors."""

import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import data_pipeline.__main__
import megatron_patches.__main__
import pretrain.__main__
from pretrain.config.tree import Config
from tests.ranks import ROOT
from tests.test_architecture import FLOORS

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "ds_configs/*.md", "tests/*.md")
    for path in ROOT.glob(pattern)
    if not path.is_relative_to(ROOT / "docs/results") or path.name == "README.md"  # else by a command
)
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
METHOD = ("docs/method.md", "docs/method-exactly.md", "docs/method-why.md")
FOLDERS = "pretrain|megatron_patches|data_pipeline|ds_configs|slurm|tests|benchmarks|docs"
NOT_IN_THE_CHECKOUT = ("slurm/site.sh", "slurm/logs", "slurm/ora.sif", "tests/distributed/workers/mine.py")
"""What a page tells the reader to make."""

SECTIONS = {name: {*field.annotation.model_fields} for name, field in Config.model_fields.items()}
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
        known = path.startswith(NOT_IN_THE_CHECKOUT) or re.search(r"[A-Z]{4}|\.\.\.", path)
        assert known or (ROOT / path).exists(), f"{name} names {path}"


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/extending.md", "docs/glossary.md", *METHOD])
def test_names_of_the_code_that_a_guide_gives_are_in_the_code(name: str) -> None:
    sources = [path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.py")]
    files = {path.name for path in sources}
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    spans = re.findall(r"`([^`\n]+)`", prose((ROOT / name).read_text()))
    assert [span for span in spans if re.fullmatch(r"\w+\.py", span) and span not in files] == []
    identifiers = {span for span in spans if re.fullmatch(r"_?[A-Za-z]+(_[a-z]+)*", span)}
    identifiers = {span for span in identifiers if re.search(r"_|[a-z][A-Z]", span)}
    assert identifiers - words == set()


@pytest.mark.parametrize("name", NAMES)
def test_commands_that_are_named_exist_with_their_options(name: str) -> None:
    for command in commands((ROOT / name).read_text()):
        words = command.split()
        if words[0] == "make":
            assert len(words) < 2 or words[1] in make_targets(), f"{name}: {command}"
            continue
        if not words[2].startswith(("pretrain", "data_pipeline", "megatron_patches")):
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
        named = set(re.findall(rf"(?<![\w./]){section}\.([a-z_]+)(?![\w(])", text))
        assert named - FILE_ENDINGS <= keys, f"{name} names {section}.{named - FILE_ENDINGS - keys}"


def test_the_drawing_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/figures/draw.py"))["block"]()
    assert (ROOT / "docs/figures/block.svg").read_text() == drawn
    assert "prefers-color-scheme: dark" in drawn and "<title>" in drawn


def test_readme_fits_on_two_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 115
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tests/README.md"])
def test_prose_is_wrapped(name: str) -> None:
    lines = prose((ROOT / name).read_text()).splitlines()
    assert [line for line in lines if len(line) > 100 and not line.lstrip().startswith("|")] == []


def test_the_floors_are_those_of_the_test() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition("## The floors of `pretrain`")[2].partition("\n## ")[0]
    rows = [
        re.findall(r"`(\w+)`", row.split("|")[1]) for row in section.splitlines() if row.startswith("| `")
    ]
    assert [set(row) for row in rows] == [set(floor) for floor in reversed(FLOORS["pretrain"])]


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
    """`python -m …` and `make …`, in fenced blocks and in code spans, without comments."""
    text = re.sub(r"\\\n", " ", text)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]
    for line in [*_lines(text, fenced=True).splitlines(), *spans]:
        line = line.partition("  #")[0].strip().removeprefix("$ ")
        found = re.search(r"python -m [a-z_.]+.*|^make(?: [a-z-]+)*", line)
        if found:
            yield re.split(r"[;'|)]", found.group())[0].strip()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def known_options(package: str, words: list[str]) -> tuple[str, set[str] | None]:
    """(the verb, its options) that `words` of a command line begin with; None if there is no such verb."""
    programs = command_lines()
    if package not in programs:
        return package, set() if package in ("pretrain.job", "pretrain.config.reference") else None
    command, path = programs[package], package
    while hasattr(command, "commands") and words and re.fullmatch(r"[a-z-]+", words[0]):
        if words[0] not in command.commands:
            return path, None
        command, path, words = command.commands[words[0]], f"{path} {words[0]}", words[1:]
    return path, {option for param in command.params for option in param.opts} | {"--help"}


@cache
def command_lines() -> dict[str, Any]:
    """{package: its command line}"""
    programs = (pretrain.__main__, data_pipeline.__main__, megatron_patches.__main__)
    return {module.__name__.split(".")[0]: typer.main.get_command(module.app) for module in programs}
