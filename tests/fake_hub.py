"""A Hugging Face of our own on loopback: the few answers that `snapshot_download` asks for."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


@dataclass
class FakeHub:
    """Models by name and commit, each a folder; `asked`: files that were sent."""

    commits: dict[str, dict[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def put(self, name: str, folder: Path, commit: str = "a" * 40) -> None:
        """Have a model, whose newest commit this is."""
        self.commits.setdefault(name, {})[commit] = folder

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of a page."""
        words = path.partition("?")[0].strip("/").split("/")
        api = words[:2] == ["api", "models"]
        name = "/".join(words[2:4] if api else words[:2])
        rest = words[4:] if api else words[2:]
        if name not in self.commits:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if name in self.gated and not api:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        known = self.commits[name]
        asked = rest[1] if len(rest) > 1 else "main"
        commit = list(known)[-1] if asked == "main" else asked
        if commit not in known:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if not api:
            return self._file(known[commit] / "/".join(rest[2:]), commit)
        if rest[:1] == ["tree"]:
            return 200, {"Content-Type": "application/json"}, self._tree(known[commit])
        said = {"id": name, "sha": commit, "siblings": [], "private": False, "tags": []}
        return 200, {"Content-Type": "application/json"}, json.dumps(said).encode()

    def _tree(self, folder: Path) -> bytes:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return json.dumps(
            [
                {
                    "type": "file",
                    "path": str(path.relative_to(folder)),
                    "size": path.stat().st_size,
                    "oid": _digest(path),
                }
                for path in files
            ]
        ).encode()

    def _file(self, path: Path, commit: str) -> tuple[int, dict[str, str], bytes]:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(path)}"'}
        return 200, headers, path.read_bytes()


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[FakeHub]:
    """Have huggingface_hub of this process ask a hub of ours, with an empty cache."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(True)

        def do_HEAD(self) -> None:
            self._send(False)

        def _send(self, content: bool) -> None:
            status, headers, body = hub.answer(self.path)
            if content and "/resolve/" in self.path:
                hub.asked.append(self.path.rpartition("/")[2])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if content:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    from huggingface_hub import constants

    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
