"""A Google Cloud Storage on loopback: the part of its JSON API that gcsfs reads with, for one bucket.

Tests set STORAGE_EMULATOR_HOST to it; the client is the real gcsfs.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.data_pipeline.sources.hub_server import listening

_PAGE = 3


@dataclass
class Bucket:
    """The objects by their keys, and how the server misbehaves.

    cut: so many bodies break off in the middle; status: what every request is answered with, if not 0.
    served: bytes of bodies that were sent, by key; pages: how many pages of listings were asked for.
    """

    name: str
    objects: dict[str, bytes]
    address: str = ""
    cut: int = 0
    status: int = 0
    served: dict[str, int] = field(default_factory=dict)
    pages: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def resource(self, key: str) -> dict[str, str]:
        """An object as the API states it; numbers are strings there."""
        content = self.objects[key]
        digest = hashlib.sha256(content).hexdigest()
        return {
            "kind": "storage#object",
            "bucket": self.name,
            "name": key,
            "size": str(len(content)),
            "generation": str(int(digest[:12], 16)),
            "metageneration": "1",
            "etag": digest[:16],
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def page(self, query: dict[str, str]) -> dict[str, object]:
        """A page of a listing: below a prefix, and up to a delimiter if there is one."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names = {key for key in self.objects if key.startswith(prefix)}
        if delimiter:
            names = {self._up_to(key, len(prefix), delimiter) for key in names}
        start = int(query.get("pageToken", 0))
        end = start + min(_PAGE, int(query.get("maxResults", _PAGE)))
        chosen = sorted(names)[start:end]
        page: dict[str, object] = {
            "kind": "storage#objects",
            "items": [self.resource(name) for name in chosen if name in self.objects],
            "prefixes": [name for name in chosen if name not in self.objects],
        }
        return page | ({"nextPageToken": str(end)} if end < len(names) else {})

    @staticmethod
    def _up_to(key: str, start: int, delimiter: str) -> str:
        end = key.find(delimiter, start)
        return key if end < 0 else key[: end + len(delimiter)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def handle(self) -> None:
        with suppress(
            ConnectionError
        ):  # gcsfs asks two questions at once and hangs up on the slower one
            super().handle()

    def do_GET(self) -> None:
        bucket, place = self.bucket, urlsplit(self.path)
        query = dict(parse_qsl(place.query))
        # A slash within a key is %2F, so that what is unquoted here is one name.
        steps = [unquote(step) for step in place.path.strip("/").split("/")]
        media = steps[0] == "download"
        below = steps[steps.index("v1") + 1 :]  # b / BUCKET / o / KEY
        if bucket.status:
            self._refuse(bucket.status)
        elif below[:2] != ["b", bucket.name] or below[2:3] not in ([], ["o"]):
            self._refuse(404)
        elif len(below) == 2:
            self._json({"kind": "storage#bucket", "name": bucket.name})
        elif len(below) == 3:
            with bucket.lock:
                bucket.pages += 1
            self._json(bucket.page(query))
        elif below[3] not in bucket.objects:
            self._refuse(404)
        elif media:
            self._media(below[3])
        else:
            self._json(bucket.resource(below[3]))

    def _media(self, key: str) -> None:
        content = self.bucket.objects[key]
        first, last, status = 0, len(content) - 1, 200
        if wanted := self.headers.get("Range", ""):
            begin, _, until = wanted.removeprefix("bytes=").partition("-")
            first, last, status = int(begin), min(int(until or last), last), 206
        body = content[first : last + 1]
        with self.bucket.lock:
            cut = self.bucket.cut > 0
            self.bucket.cut -= cut
            if not cut:
                self.bucket.served[key] = self.bucket.served.get(key, 0) + len(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def _refuse(self, status: int) -> None:
        self._json({"error": {"code": status, "message": f"the server says {status}"}}, status)

    def _json(self, value: dict[str, object] | dict[str, str], status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serve(name: str, objects: dict[str, bytes]) -> Iterator[Bucket]:
    """A bucket on a free port of 127.0.0.1."""
    bucket = Bucket(name, objects)
    with listening(type("Handler", (_Handler,), {"bucket": bucket})) as bucket.address:
        yield bucket
