"""A hub on loopback: answers over HTTP what huggingface_hub asks of the real one, for one data set.

Tests set HF_ENDPOINT to it; the client is the real library in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPOSITORY = "acme/slim"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
_SMALL = 100  # a file below this is in git itself and has no SHA-256 in the listing


@dataclass
class Hub:
    """The data set's files, its name, and how the server misbehaves.

    broken: these files are served with other bytes than listed; cut: served to half, then the
    connection breaks, so many times; busy: answered with 503 so many times ("" is the data set
    itself); hold_after: after so many files nothing is served until `released`; gated: files are
    for those who accepted the terms; commits: all commits, `commit` is that of main; requests: the
    files that were asked for, each as NAME@FIRST_BYTE; page: entries of a page of the listing;
    listings: how often its first page was asked for.
    """

    files: dict[str, bytes]
    repository: str = REPOSITORY
    address: str = ""
    commit: str = COMMIT
    broken: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    hold_after: int | None = None
    gated: bool = False
    commits: set[str] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    page: int = 3
    listings: int = 0

    def entry(self, name: str) -> dict[str, object]:
        """A file as the tree listing gives it."""
        content = self.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": blob}
        if len(content) >= _SMALL:
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_POST(self) -> None:
        """What is known of some paths: of a directory that it is one, of other names nothing."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
        entries = [self.hub.entry(name) for name in asked if name in self.hub.files]
        directories = [
            name for name in asked if any(file.startswith(f"{name}/") for file in self.hub.files)
        ]
        entries += [
            {"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in directories
        ]
        self._json(entries)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api = f"/api/datasets/{self.hub.repository}"
        if path == api or path.startswith(f"{api}/revision/"):
            revision = path.removeprefix(api).removeprefix("/revision/") or "main"
            if self.hub.busy.get("", 0) > 0:
                self.hub.busy[""] -= 1
                self._json({"error": "Service Unavailable"}, 503)
            elif revision not in ("main", self.hub.commit, *self.hub.commits):
                self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            else:
                commit = self.hub.commit if revision == "main" else revision
                siblings = [{"rfilename": name} for name in sorted(self.hub.files)]
                self._json(
                    {"id": self.hub.repository, "sha": commit, "siblings": siblings, "tags": []}
                )
        elif path.startswith(
            tuple(f"{api}/tree/{name}" for name in ("main", self.hub.commit, *self.hub.commits))
        ):
            self._tree(path.removeprefix(f"{api}/tree/").partition("/")[2])
        elif path.startswith("/api/"):
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        else:
            self._file(body=True)

    def _tree(self, below: str) -> None:
        """A page of the listing, recursive or not, with a link to the next, as the hub has it."""
        query = dict(part.split("=", 1) for part in urlsplit(self.path).query.split("&") if part)
        start = int(query.get("cursor", 0))
        self.hub.listings += start == 0
        prefix = f"{below}/" if below else ""
        names = sorted(name for name in self.hub.files if name.startswith(prefix))
        recursive = query.get("recursive", "false").lower() == "true"
        if not recursive:
            names = sorted({prefix + name.removeprefix(prefix).split("/")[0] for name in names})
        entries = [
            self.hub.entry(name)
            if name in self.hub.files
            else {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            for name in names[start : start + self.hub.page]
        ]
        headers = {}
        if start + self.hub.page < len(names):
            page = f"?recursive={recursive}&cursor={start + self.hub.page}"
            headers["Link"] = f'<{self.hub.address}{urlsplit(self.path).path}{page}>; rel="next"'
        if recursive:
            entries.insert(0, {"type": "directory", "path": "train", "oid": "0" * 40, "size": 0})
        self._json(entries, 200, headers)

    def _file(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).replace(
            "/resolve/main/", f"/resolve/{self.hub.commit}/"
        )
        for commit in self.hub.commits:
            path = path.replace(f"/resolve/{commit}/", f"/resolve/{self.hub.commit}/")
        prefix = f"/datasets/{self.hub.repository}/resolve/{self.hub.commit}/"
        name = path.removeprefix(prefix)
        if not path.startswith(prefix) or name not in self.hub.files:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"}, body)
            return
        if self.hub.gated:
            self._json({"error": "Access is restricted"}, 403, {"X-Error-Code": "GatedRepo"}, body)
            return
        if body and self.hub.busy.get(name, 0) > 0:
            self.hub.busy[name] -= 1
            self._json({"error": "Service Unavailable"}, 503)
            return
        content = self.hub.files[name]
        entry = self.hub.entry(name)
        lfs = entry.get("lfs")
        etag = lfs["oid"] if isinstance(lfs, dict) else entry["oid"]
        if name in self.hub.broken:
            content = bytes([content[0] ^ 1]) + content[1:]
        start = 0
        ranges = self.headers.get("Range", "")
        whole = len(content)
        if ranges.startswith("bytes="):
            first, _, last = ranges.removeprefix("bytes=").partition("-")
            start = int(first)
            content = content[: int(last or whole) + 1]
        self.send_response(206 if ranges else 200)
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(content) - start))
        if ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{whole}")
        self.end_headers()
        if not body:
            return
        self.hub.requests.append(f"{name}@{start}")
        if self.hub.hold_after is not None and len(self.hub.requests) > self.hub.hold_after:
            self.hub.released.wait(60)
        if self.hub.cut.get(name, 0) > 0:
            self.hub.cut[name] -= 1
            self.wfile.write(content[start : start + (len(content) - start) // 2])
            self.close_connection = True
        else:
            self.wfile.write(content[start:])

    def _json(
        self,
        value: object,
        status: int = 200,
        headers: dict[str, str] | None = None,
        body: bool = True,
    ) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def serve(files: dict[str, bytes], repository: str = REPOSITORY) -> Iterator[Hub]:
    """A hub on a free port of 127.0.0.1."""
    hub = Hub(files, repository)
    with listening(type("Handler", (_Handler,), {"hub": hub})) as hub.address:
        yield hub


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on a free port of 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
