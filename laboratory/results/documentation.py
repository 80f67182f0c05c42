"""Texts of the studies: 24 M tokens of documentation, or of Python code, from Debian packages.

    python -m laboratory.results.documentation documentation/corpus
    python -m laboratory.results.documentation code/corpus code

Downloads the packages with apt-get (Debian 12, no root needed), unpacks them with dpkg-deb, and
writes the text files of each as PACKAGE.jsonl.zst, one document a file, every text once.
corpus.json has the packages' versions and the digests. The licences are the packages' own: the text
is made where it is used.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import zstandard

from data_pipeline.io.files import sha256_file, to_json, write_atomically

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


def make(directory: Path, kind: str = "documentation") -> None:
    """Write the corpus into a new directory; exit with a message if a package is not available.

    Args:
        directory: Directory of the corpus.
        kind: Key of TEXTS.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            sys.exit(f"error: {program} is not here: the recipe takes packages of Debian 12")
    directory.mkdir(parents=True)
    record = {}
    with tempfile.TemporaryDirectory() as temporary:
        for package, patterns in TEXTS[kind].items():
            folder = Path(temporary, package)
            folder.mkdir()
            if subprocess.run(
                ["apt-get", "download", "-q", package], cwd=folder, capture_output=True
            ).returncode:
                why = "run 'apt-get update' first, on Debian 12"
                sys.exit(f"error: apt-get download {package} failed: {why}")
            (archive,) = folder.glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", archive, folder / "unpacked"], check=True)
            texts = documents(folder / "unpacked", patterns)
            lines = [
                json.dumps({"text": text, "meta": {"redpajama_set_name": package}})
                for text in texts
            ]
            out = directory / f"{package}.jsonl.zst"
            out.write_bytes(zstandard.compress("".join(line + "\n" for line in lines).encode()))
            megabytes = sum(len(text.encode()) for text in texts) / 1e6
            record[archive.stem] = {
                "documents": len(texts),
                "text": hashlib.sha256("".join(texts).encode()).hexdigest(),
            }
            print(
                f"{package}: {len(texts)} documents, {megabytes:.1f} MB, {sha256_file(out)[:12]}",
                flush=True,
            )
    write_atomically(directory / "corpus.json", to_json(record))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not {*sys.argv[2:]} <= TEXTS.keys():
        sys.exit(__doc__)
    make(Path(sys.argv[1]), *sys.argv[2:])
