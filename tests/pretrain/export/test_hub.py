"""--push-to-hub, against a hub on loopback: huggingface_hub itself makes the repository and uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.data_pipeline.sources.hub_server import listening
from tests.ranks import ROOT, rank_environment

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What a hub got: repositories as they were asked for, and the files of the one commit."""

    refuses: bool = False
    address: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = self._body()
        if self.hub.refuses:
            self._answer({"error": "You have no right to do this"}, 403)
        elif self.path == "/api/repos/create":
            self.hub.created.append(json.loads(body))
            self._answer({"url": f"{self.hub.address}/acme/tiny", "id": "1", "name": "acme/tiny"})
        elif self.path == "/api/validate-yaml":  # of the model card's front matter
            self._answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            found = [
                {"path": name, "uploadMode": modes[name], "shouldIgnore": False, "oid": None}
                for name in names
            ]
            self._answer({"files": found})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.hub.address}/upload/{one['oid']}"}}
            self._answer({"transfer": "basic", "objects": objects})
        else:
            assert self.path.endswith("/commit/main"), self.path
            self._commit([json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_GET(self) -> None:
        self._answer({"id": "acme/tiny", "sha": COMMIT, "siblings": [], "tags": []})

    def _commit(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries[1:]:
            value = entry["value"]
            if entry["key"] == "lfsFile":
                content = self.hub.objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
            else:
                content = base64.b64decode(value["content"])
            self.hub.files[value["path"]] = content
        self._answer({"commitUrl": f"{self.hub.address}/acme/tiny/commit/{COMMIT}", "commitOid": COMMIT})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(self, value: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """The hub on a free port of 127.0.0.1."""
    with listening(type("Handler", (_Handler,), {"hub": hub})) as hub.address:
        yield hub


def push(hub: Hub, directory: Path, options: str = "") -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads HF_ENDPOINT when it is imported."""
    program = (
        "from pathlib import Path\n"
        "from pretrain.export.verb import push\n"
        f"print(push(Path({str(directory)!r}), 'acme/tiny'{options}))\n"
    )
    environment = rank_environment() | {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": "hf_of_this_test",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "HF_HOME": str(directory.parent / "home"),
    }
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def export(directory: Path) -> dict[str, bytes]:
    """Files as an export has them."""
    directory.mkdir()
    files = {
        "model.safetensors": bytes(range(256)) * 40,
        "config.json": b"{}\n",
        "README.md": "# ünïcode\n".encode(),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return files


def test_every_file_arrives_in_a_private_repository(tmp_path: Path) -> None:
    files = export(tmp_path / "export")
    with serve(Hub()) as hub:
        done = push(hub, tmp_path / "export")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{hub.address}/acme/tiny/commit/{COMMIT}\n"
    assert hub.files == files
    (made,) = hub.created
    assert (made["organization"], made["name"]) == ("acme", "tiny")
    assert made.get("private") is True or made.get("visibility") == "private", made


def test_a_public_repository_is_asked_for(tmp_path: Path) -> None:
    export(tmp_path / "export")
    with serve(Hub()) as hub:
        done = push(hub, tmp_path / "export", ", public=True")
    assert done.returncode == 0, done.stderr
    (made,) = hub.created
    assert made.get("private") is False or made.get("visibility") == "public", made


def test_a_refusal_is_one_sentence_and_the_export_stays(tmp_path: Path) -> None:
    export(tmp_path / "export")
    with serve(Hub(refuses=True)) as hub:
        done = push(hub, tmp_path / "export")
    last = done.stderr.splitlines()[-1]
    assert "UserError: --push-to-hub acme/tiny: " in last and "403" in last
    assert f"push it again with `hf upload acme/tiny {tmp_path / 'export'}`" in last
    assert (tmp_path / "export/model.safetensors").is_file()
