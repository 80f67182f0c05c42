"""A web server on loopback that answers HEAD and GET with ranges, and misbehaves as it is told."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.data_pipeline.sources.hub_server import listening


@dataclass
class Web:
    """The files, and how the server misbehaves.

    cut: so many bodies break off in the middle; fail: so many GETs are answered with `status`;
    down: so many requests of any kind are; packs: bodies are compressed for clients that accept it;
    deaf: ranges are ignored; nameless: no version is stated; silent: GETs wait for `released`;
    replace_after: after so many GETs the file there is another one.
    served: bytes of bodies that were sent, by path.
    """

    files: dict[str, bytes]
    address: str = ""
    cut: int = 0
    fail: int = 0
    down: int = 0
    packs: bool = False
    status: int = 503
    deaf: bool = False
    nameless: bool = False
    silent: bool = False
    replace_after: tuple[int, str, bytes] | None = None
    released: threading.Event = field(default_factory=threading.Event)
    served: dict[str, int] = field(default_factory=dict)
    gets: int = 0

    def url(self, path: str) -> str:
        """Where a file is."""
        return f"{self.address}/{path}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self.web.gets += 1
        if (change := self.web.replace_after) is not None and self.web.gets > change[0]:
            self.web.files[change[1]] = change[2]
        if self.web.silent:
            self.web.released.wait(60)
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        web = self.web
        path = unquote(urlsplit(self.path).path).lstrip("/")
        status = 404 if path not in web.files else 200
        if body and web.fail:
            web.fail -= 1
            status = web.status
        if web.down:
            web.down -= 1
            status = web.status
        content = web.files[path] if status == 200 else b"no"
        start = 0
        end = len(content)
        if status == 200 and not web.deaf and (wanted := self.headers.get("Range", "")):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first)
            end = min(int(last) + 1, end)
            status = 206
        if web.packs and "gzip" in self.headers.get("Accept-Encoding", ""):
            content = gzip.compress(content)
            start = 0
            end = len(content)
            status = 200
        self.send_response(status)
        if content[:2] == b"\x1f\x8b":
            self.send_header("Content-Encoding", "gzip")
        if not web.nameless:
            self.send_header("ETag", f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"')
        self.send_header("Content-Length", str(end - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if not body:
            return
        if web.cut and status in (200, 206):
            web.cut -= 1
            self.wfile.write(content[start : (start + end) // 2])
            self.close_connection = True
            return
        if status in (200, 206):
            web.served[path] = web.served.get(path, 0) + end - start
        self.wfile.write(content[start:end])


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Web]:
    """A server on a port of its own."""
    web = Web(files)
    with listening(type("Handler", (_Handler,), {"web": web})) as web.address:
        try:
            yield web
        finally:
            web.released.set()
