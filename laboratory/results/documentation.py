"""Texts of the studies: 24 M tokens of documentation, or of Python code, from Debian packages.

    python -m laboratory.results.documentation documentation/corpus
    python -m laboratory.results.documentation code/corpus code

Downloads the packages with apt-get (Debian 12, no root needed) in the versions of
docs/results/texts, unpacks them with dpkg-deb, and writes the text files of each as
PACKAGE.jsonl.zst, one document a file, every text once. A version that cannot be had, or a text
with another digest, is an error and nothing is written. The licences are the packages' own: the
text is made where it is used.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from data_pipeline.io.files import to_json, write_atomically
from laboratory.results.tables import RESULTS
from pretrain.errors import UserError

DOCUMENTATION = {
    "linux-doc-6.1": (
        "Documentation/**/*.rst.gz",
        "Documentation/**/*.yaml.gz",
        "Documentation/**/*.txt.gz",
    ),
    "llvm-14-doc": ("_sources/**/*.rst.txt",),
    "clang-14-doc": ("_sources/**/*.rst.txt",),
    "perl-doc": ("*.pod",),
    "python-sqlalchemy-doc": ("*.rst",),
    "python-pandas-doc": ("_sources/**/*.rst.txt",),
    "git-doc": ("*.txt",),
    "cmake-doc": ("_sources/**/*.rst.txt",),
}
"""Package to the patterns of its text files, without what HTML or a source says again."""
CODE = dict.fromkeys(
    (
        "libpython3.11-stdlib",
        "python3-astropy",
        "python3-django",
        "python3-matplotlib",
        "python3-pandas",
        "python3-scipy",
        "python3-sklearn",
        "python3-twisted",
    ),
    ("**/*.py",),
)
"""The same of another kind of text."""
TEXTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {"documentation": DOCUMENTATION, "code": CODE}
TEXTS_OF_THE_STUDIES = Path(__file__).resolve().parents[2] / RESULTS / "texts"
"""Versions and digests of each text, and the fingerprint of the shards made of it."""
SHORTEST = 200
"""Characters of the shortest document: less is an index or a redirection."""


def documents(unpacked: Path, patterns: tuple[str, ...]) -> list[str]:
    """Return the texts of a package, in the order of their paths, every text once.

    Args:
        unpacked: Folder of the package's files.
        patterns: Patterns of the paths of its text files.
    """
    texts: dict[str, None] = {}
    paths = {path for pattern in patterns for path in unpacked.rglob(pattern) if path.is_file()}
    for path in sorted(paths):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode(errors="replace")
        if len(text) >= SHORTEST:
            texts.setdefault(text)
    return list(texts)


def fetched(package: str, version: str | None, folder: Path) -> tuple[str, Path]:
    """Download and unpack a package; return its version and the folder of its files.

    Args:
        package: Name of the package.
        version: Version, or None for the newest one that apt knows.
        folder: Empty folder.

    Raises:
        UserError: apt-get does not get it.
    """
    wanted = package if version is None else f"{package}={version}"
    folder.mkdir()
    command = ["apt-get", "download", "-q", wanted]
    if subprocess.run(command, cwd=folder, capture_output=True).returncode:
        listed = subprocess.run(["apt-cache", "madison", package], capture_output=True, text=True)
        versions = [line.split("|")[1].strip() for line in listed.stdout.splitlines()]
        raise UserError(
            f"apt-get download {wanted} failed; apt knows {', '.join(versions) or 'no version'}: "
            "run 'apt-get update' on Debian 12, or add its archive of that day from "
            "snapshot.debian.org; --newest takes another version, which is another text"
        )
    (archive,) = folder.glob("*.deb")
    unpacked = folder / "unpacked"
    subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
    return archive.stem.split("_")[1].replace("%3a", ":"), unpacked


def make(directory: Path, kind: str = "documentation", newest: bool = False) -> None:
    """Write the corpus into a new directory.

    Args:
        directory: Directory of the corpus.
        kind: Key of TEXTS.
        newest: Take the newest version of each package and say where its text is another.

    Raises:
        UserError: The directory is there, or a package or its text is not what is recorded.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise UserError(f"{program} is not installed: the recipe takes packages of Debian 12")
    if directory.exists():
        raise UserError(f"{directory} is already there: give a new directory")
    recorded = json.loads((TEXTS_OF_THE_STUDIES / f"{kind}.json").read_text())["packages"]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        corpus = Path(temporary, "corpus")
        corpus.mkdir()
        record = {}
        for package, patterns in TEXTS[kind].items():
            version = None if newest else recorded[package]["version"]
            version, unpacked = fetched(package, version, Path(temporary, package))
            texts = documents(unpacked, patterns)
            digest = hashlib.sha256("".join(texts).encode()).hexdigest()
            record[package] = {"version": version, "documents": len(texts), "text": digest}
            lines = [
                json.dumps({"text": text, "meta": {"redpajama_set_name": package}})
                for text in texts
            ]
            content = "".join(line + "\n" for line in lines).encode()
            (corpus / f"{package}.jsonl.zst").write_bytes(zstandard.compress(content))
            print(f"{package} {version}: {len(texts)} documents, {digest[:12]}", flush=True)
            if record[package] != recorded[package]:
                require_newest(package, record[package], recorded[package], newest)
        write_atomically(corpus / "corpus.json", to_json({"packages": record}))
        corpus.rename(directory)


def require_newest(
    package: str, made: Mapping[str, Any], recorded: Mapping[str, Any], newest: bool
) -> None:
    """Say that a package's text is not the recorded one.

    Args:
        package: Name of the package.
        made: Version, documents and digest of the text that was made.
        recorded: The same of the studies.
        newest: Whether another text was asked for.

    Raises:
        UserError: It was not.
    """
    here, there = (
        f"{text['documents']:,} documents of {text['version']}, SHA-256 {text['text'][:12]}"
        for text in (made, recorded)
    )
    difference = f"the text of {package} is {here}, in the studies {there}"
    if not newest:
        raise UserError(f"{difference}: nothing is written; --newest takes it")
    print(f"note: {difference}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the corpus that the arguments name; 2 where it cannot be had."""
    parser = argparse.ArgumentParser(prog="laboratory.results.documentation", description=__doc__)
    parser.add_argument("directory", type=Path, help="a new directory")
    parser.add_argument("kind", nargs="?", choices=TEXTS, default="documentation")
    parser.add_argument("--newest", action="store_true", help="take the newest packages")
    options = parser.parse_args(arguments)
    try:
        make(options.directory, options.kind, options.newest)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
