"""A small local server that answers like the Hugging Face Hub: repositories at one commit, public,
gated, private or broken.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ALLOWED = "hf_whoever_accepted_the_licence"


@dataclass
class Repo:
    """files: content by name. gated: only ALLOWED may read files; private: without it nothing is
    seen. cut: bytes after which the connection breaks, by file."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", "v1", "refs/pr/4", COMMIT)


class FakeHub:
    """broken: a status that every request is answered with instead. served: (method, path) of the
    requests so far.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.broken: int | None = None
        self.served: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.served.append((self.command, self.path))
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, name: str, folder: Path, **traits: Any) -> Repo:
        self.repos[name] = Repo(
            {path.name: path.read_bytes() for path in folder.iterdir()}, **traits
        )
        return self.repos[name]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        if self.broken is not None:
            return _send(request, self.broken)
        asks = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if asks else parts[:2])
        repo, token = (
            self.repos.get(name),
            request.headers.get("Authorization", "").removeprefix("Bearer "),
        )
        if repo is None or (repo.private and token != ALLOWED):
            return _send(request, 404 if token else 401, "RepoNotFound")
        action, revision, *_ = [*(parts[4:] if asks else parts[2:]), "main", "main"]
        if action in {"revision", "tree", "resolve"} and revision not in repo.revisions:
            return _send(request, 404, "RevisionNotFound")
        if asks:
            tree = [
                {
                    "type": "file",
                    "path": file,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                    **(
                        {
                            "lfs": {
                                "oid": hashlib.sha256(data).hexdigest(),
                                "size": len(data),
                                "pointerSize": 9,
                            }
                        }
                        if _large(file)
                        else {}
                    ),
                }
                for file, data in repo.files.items()
            ]
            info = {
                "id": name,
                "modelId": name,
                "sha": COMMIT,
                "private": repo.private,
                "gated": "manual" if repo.gated else False,
                "siblings": [{"rfilename": file} for file in repo.files],
            }
            return _send(request, 200, body=json.dumps(tree if action == "tree" else info).encode())
        if repo.gated and token != ALLOWED:
            return _send(request, 403 if token else 401, "GatedRepo")
        file = "/".join(parts[4:])
        if file not in repo.files:
            return _send(request, 404, "EntryNotFound")
        data = repo.files[file]
        tag = hashlib.sha256(data).hexdigest() if _large(file) else hashlib.sha1(data).hexdigest()
        return _send(request, 200, body=data, cut=repo.cut.get(file), etag=tag)


def _large(file: str) -> bool:
    return file.endswith(".safetensors")


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    code: str = "",
    body: bytes = b"",
    cut: int | None = None,
    etag: str = "",
) -> None:
    request.send_response(status)
    for header, value in (
        ("X-Error-Code", code),
        ("ETag", f'"{etag}"' if etag else ""),
        ("X-Repo-Commit", COMMIT),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
    ):
        if value:
            request.send_header(header, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body[:cut])
