"""One name for each thing: the words of CONTRIBUTING's table, in all that a user reads.

Read are the pages (which hold the meanings of keys and metrics), the news of the next version, the
help of every command, and the texts of the program: messages, reports and tables.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.parsed_files import python_files, texts
from tests.ranks import ROOT
from tests.test_docs import command_lines, prose

WORDS = {
    "adapter": r"helpers?|corrections? of (queries|keys)|corrected (queries|keys|heads)",
    "variant": r"designs?|rivals?|contenders?",
    "arm, of a trial only; else variant": r"arms?",
    "short convolution": r"look(s|ed|ing)? back|look-backs?",
    "token, byte range, chunk": r"pieces?",
    "work item": r"units? of work|work units?",
    "activation checkpointing, recompute": r"recomputation of activations|made again in backward",
    "recompute, regenerate, repeat": r"ma[dk]es? again",
    "in the background": r"behind (the )?training",
    "fix": r"mend(s|ed|ing)?",
    "is not a": r"(?<!there )(is|are|was|were) no(?! (longer|more|\w+er)\b)",
    "needs": r"wants",
    "continues, resumes": r"(go(es)?|going|went|gone) on",
    "fails": r"(go(es)?|going|went|gone) wrong",
    "the same for": r"alike",
    "as many, that many": r"so many",
}
"""{what to say: what not to say}"""

ARMS = (
    "docs/referee.md",
    "docs/glossary.md",
    "pretrain trial",
    "laboratory/sweep",
    "laboratory/study",
)
"""Pages and modules about trials, whose two variants are called arms."""


def found(text: str, where: str = "") -> list[str]:
    """What a text says that has another name, each with that name."""
    plain = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*results/[^)]*\)|\]\([^)]*\)", " ", text)
    return [
        f"{where}: '{match.group()}': say {say}"
        for say, words in WORDS.items()
        if not (say.startswith("arm") and where.startswith(ARMS))
        for match in re.finditer(rf"(?<![\w./-])(?:{words})(?![\w./-]*[\w/])", plain, re.IGNORECASE)
    ]


def pages() -> Iterator[tuple[str, str]]:
    """(name, prose) of every page that is written by hand, results excepted."""
    for path in sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "AGENTS.md"]):
        yield str(path.relative_to(ROOT)), prose(path.read_text())
    guide = prose((ROOT / "CONTRIBUTING.md").read_text())
    yield "CONTRIBUTING.md", re.sub(r"## Words\n.*?\n## ", "", guide, flags=re.DOTALL)
    news = (ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]")[2]
    yield "CHANGELOG.md", prose(news.partition("\n## [")[0])


def helps(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """(command, help) of a command line, its verbs and their options."""
    yield path, command.help or ""
    for param in command.params:
        yield f"{path} {param.name}", getattr(param, "help", None) or ""
    for name, verb in getattr(command, "commands", {}).items():
        yield from helps(verb, f"{path} {name}")


@pytest.mark.parametrize("name, text", [pytest.param(*page, id=page[0]) for page in pages()])
def test_pages_use_one_name_for_each_thing(name: str, text: str) -> None:
    assert found(" ".join(text.split()), name) == []


def test_help_uses_one_name_for_each_thing() -> None:
    tops = command_lines().items()
    shown = [page for package, top in tops for page in helps(top, package)]
    assert [wrong for path, text in shown for wrong in found(text, path)] == []


def test_scripts_use_one_name_for_each_thing() -> None:
    said: list[str] = []
    for path in [*sorted((ROOT / "slurm").glob("*.sh")), ROOT / "Makefile"]:
        shown = re.findall(
            r"^.*(?:\becho |\bora_say |: \$\(VENV\).* ## ).*$", path.read_text(), re.MULTILINE
        )
        said += [wrong for line in shown for wrong in found(line, path.name)]
    assert said == []


@pytest.mark.parametrize(
    "package", ["pretrain", "laboratory", "megatron_patches", "data_pipeline", "slurm"]
)
def test_messages_use_one_name_for_each_thing(package: str) -> None:
    said: list[str] = []
    for path in python_files(ROOT / package):
        shown = [text for text in texts(path) if " " in text.strip()]
        where = str(path.relative_to(ROOT))
        said += [wrong for text in shown for wrong in found(text, where)]
    assert said == []


def test_the_table_of_the_guide_is_that_of_the_test() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    table = guide.partition("\n## Words\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| ([^|]*?) \|", table, flags=re.MULTILINE)[2:]) == set(WORDS)


@pytest.mark.parametrize(
    "wrong",
    [
        "the design",
        "two arms",
        "no look back",
        "what was mended",
        "a.json is no directory",
        "it goes on",
    ],
)
def test_a_word_with_another_name_is_found(wrong: str) -> None:
    assert len(found(wrong)) == 1


@pytest.mark.parametrize(
    "right", ["there is no file", "`--design NAME`", "is no longer", "designs.yaml", "by --arms"]
)
def test_what_is_a_name_or_plain_english_is_not_found(right: str) -> None:
    assert found(right) == []
