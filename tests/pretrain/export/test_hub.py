"""--push-to-hub against a hub on loopback, by huggingface_hub itself."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.data_pipeline.sources.hub_server import listening
from tests.ranks import ROOT, rank_environment

pytestmark = pytest.mark.distributed

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A hub's record: the requested repositories, and the files of each commit.

    It refuses `acme/closed`.
    """

    address: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = self._body()
        if b'"closed"' in body or "/acme/closed" in self.path:
            self._answer({"error": "You have no right to do this"}, 403)
        elif self.path == "/api/repos/create":
            self.hub.created.append(asked := json.loads(body))
            name = f"{asked['organization']}/{asked['name']}"
            self._answer({"url": f"{self.hub.address}/{name}", "id": "1", "name": name})
        elif self.path == "/api/validate-yaml":  # of the model card's front matter
            self._answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            rest = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self._answer({"files": [file | rest for file in json.loads(body)["files"]]})
        else:
            assert self.path.endswith("/commit/main"), self.path
            self._commit([json.loads(line) for line in body.splitlines()])

    def do_GET(self) -> None:
        self._answer({"id": "acme/tiny", "sha": COMMIT, "siblings": [], "tags": []})

    def _commit(self, entries: list[dict[str, Any]]) -> None:
        name = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
        files = self.hub.files.setdefault(name, {})
        for entry in entries[1:]:
            files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        address = f"{self.hub.address}/{name}/commit/{COMMIT}"
        self._answer({"commitUrl": address, "commitOid": COMMIT})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, value: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


FILES = {
    "model.safetensors": bytes(range(256)) * 40,
    "config.json": b"{}\n",
    "README.md": "# ünïcode\n".encode(),
}

PROGRAM = """
import sys
from pathlib import Path
from pretrain.errors import UserError
from pretrain.export.verb import push

for repository, public in (("acme/tiny", False), ("acme/open", True), ("acme/closed", False)):
    try:
        print(push(Path(sys.argv[1]), repository, public))
    except UserError as error:
        print("refused:", error)
"""


@dataclass
class Pushed:
    """Three uploads of one export: to a private, a public and a refused repository."""

    hub: Hub
    directory: Path
    lines: list[str]


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    """Upload in a process of its own: the client reads HF_ENDPOINT when it is imported."""
    directory = tmp_path_factory.mktemp("hub") / "export"
    directory.mkdir()
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    hub = Hub()
    with listening(type("Handler", (_Handler,), {"hub": hub})) as hub.address:
        environment = rank_environment() | {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": "hf_of_this_test",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "HF_HOME": str(directory.parent / "home"),
        }
        command = [sys.executable, "-c", PROGRAM, str(directory)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    return Pushed(hub, directory, done.stdout.splitlines())


def test_every_file_arrives_in_a_private_repository(pushed: Pushed) -> None:
    assert pushed.lines[0] == f"{pushed.hub.address}/acme/tiny/commit/{COMMIT}"
    assert pushed.hub.files["acme/tiny"] == FILES
    asked = pushed.hub.created[0]
    assert (asked["organization"], asked["name"]) == ("acme", "tiny")
    assert asked.get("private") is True or asked.get("visibility") == "private", asked


def test_a_public_repository_is_asked_for(pushed: Pushed) -> None:
    assert pushed.lines[1] == f"{pushed.hub.address}/acme/open/commit/{COMMIT}"
    assert pushed.hub.files["acme/open"] == FILES
    asked = pushed.hub.created[1]
    assert asked["name"] == "open"
    assert asked.get("private") is False or asked.get("visibility") == "public", asked


def test_a_refusal_is_one_sentence_and_the_export_stays(pushed: Pushed) -> None:
    (line,) = pushed.lines[2:]
    assert line.startswith("refused: --push-to-hub acme/closed: ") and "403" in line
    assert f"push it again with `hf upload acme/closed {pushed.directory}`" in line
    assert (
        "acme/closed" not in pushed.hub.files and (pushed.directory / "model.safetensors").is_file()
    )
