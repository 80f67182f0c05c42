"""The objects below URLs: what is read, and of everything else the name and why it is not."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from data_pipeline.errors import DataError
from data_pipeline.sources.remote import RemoteObject
from data_pipeline.sources.stores import has_pattern, information, listing, pinned, scheme_of, stated
from data_pipeline.sources.survey import COMPANION, KNOWN_ENDINGS, SUFFIXES, PassedOver, is_companion


@dataclass(frozen=True)
class RemoteSurvey:
    """Objects to read, and those that are not read, both sorted; `root` is the prefix that all have."""

    root: str
    files: tuple[RemoteObject, ...]
    passed_over: tuple[PassedOver, ...]


def survey_remote(urls: list[str]) -> RemoteSurvey:
    """The objects that `urls` name: an object, all below a prefix, or all that a pattern fits.

    A web server has no listing: of https:// every file is named.

    Raises:
        DataError: there is no such object, it has an unknown ending, the place is in several stores or
            buckets, or the store does not answer.
    """
    urls = [pinned(_without_credentials(url)) for url in urls]
    roots = [_root_of(url) for url in urls]
    places = {"/".join(root.split("/")[: 5 if root.startswith("hf://") else 3]) for root in roots}
    if len(places) > 1:
        raise DataError(
            f"inputs lie in several places ({' and '.join(sorted(places))}); tokenise each into a directory "
            f"of its own and train on a blend of them"
        )
    root = os.path.commonpath([root.partition("://")[2] for root in roots])
    root = f"{scheme_of(urls[0])}://{root}/"
    files: list[RemoteObject] = []
    passed_over: list[PassedOver] = []
    for url in urls:
        for found in _objects(url):
            name = found.url.removeprefix(root)
            if (reason := _why_not(name, found.size)) is None:
                files.append(found)
            elif found.url == url and reason == "unknown ending":
                raise DataError(f"input {url} has an unknown ending; known are {KNOWN_ENDINGS}")
            else:
                passed_over.append(PassedOver(name, reason))
    return RemoteSurvey(
        root,
        tuple(sorted(files, key=lambda one: one.url)),
        tuple(sorted(passed_over, key=lambda one: one.name)),
    )


def _without_credentials(url: str) -> str:
    if "@" in url.split("/")[2]:
        raise DataError(
            f"an input's URL holds credentials, which would be written down; leave them out: "
            f"{scheme_of(url)}://…"
        )
    return url


def _root_of(url: str) -> str:
    """What a URL's objects all begin with: a prefix itself, else the directory of the object or pattern."""
    if has_pattern(url):
        url = url[: re.search(r"[*?\[]", url).start()]  # type: ignore[union-attr]
        return url.rpartition("/")[0]
    if url.lower().endswith(SUFFIXES):
        return url.rpartition("/")[0]
    return url.rstrip("/")


def _objects(url: str) -> list[RemoteObject]:
    scheme = scheme_of(url)
    if scheme in ("http", "https"):
        return [_object(url, information(url))]
    if not has_pattern(url) and url.lower().endswith(SUFFIXES):
        entry = information(url)
        if entry["type"] == "file":
            return [_object(url, entry)]
    found = listing(url)
    if not found:
        raise DataError(f"input {url} does not exist; give an object, a prefix or a pattern")
    return [_object(f"{scheme}://{path}", entry) for path, entry in found.items()]


def _object(url: str, entry: dict[str, object]) -> RemoteObject:
    size, version = stated(entry)
    if size is None:
        raise DataError(f"cannot read {url}: its server does not say how long it is; download it first")
    return RemoteObject(url, size, version)


def _why_not(name: str, size: int) -> str | None:
    """Why an object is not read; None if it is."""
    if any(is_companion(part) for part in name.split("/")):
        return COMPANION
    if not name.lower().endswith(SUFFIXES):
        return "unknown ending"
    return "empty" if size == 0 else None
