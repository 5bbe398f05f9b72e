"""A stand-in for the Hugging Face hub: the part of its HTTP interface that the official client pushes and pulls with.

Repositories live in memory. Small files come inside of a commit, others by LFS, as the client's own upload without xet
does it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "local" * 6


@dataclass
class Hub:
    """What has been pushed."""

    url: str = ""
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Files by repository and branch."""
    objects: dict[str, bytes] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)

    def sha(self, repo: str, branch: str) -> str:
        listed = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in self.repos[repo][branch].items())
        return hashlib.sha1(json.dumps([repo, branch, listed]).encode()).hexdigest()

    def branch(self, repo: str, revision: str) -> str | None:
        """Return the branch of this name, or the one whose commit this is."""
        found = [name for name in self.repos.get(repo, {}) if revision in (name, self.sha(repo, name))]
        return found[0] if found else None


class Handler(BaseHTTPRequestHandler):
    """Answer one request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, content: Any = b"", headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def do_POST(self) -> None:
        path, content = unquote(urlsplit(self.path).path), self._body()
        if path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif not self._is_known():
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(content))
        elif found := re.fullmatch(r"/api/models/(.+?/.+?)/branch/(.+)", path):
            self.hub.repos[found[1]].setdefault(found[2], dict(self.hub.repos[found[1]]["main"]))
            self._answer(201, {})
        elif found := re.fullmatch(r"/api/models/(.+?/.+?)/preupload/(.+)", path):
            files = json.loads(content)["files"]
            modes = [{"path": one["path"], "uploadMode": "lfs" if one["size"] > 2000 else "regular"} for one in files]
            self._answer(200, {"files": [{**one, "shouldIgnore": False, "oid": None} for one in modes]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(content))
        elif found := re.fullmatch(r"/api/models/(.+?/.+?)/commit/(.+)", path):
            self._commit(found[1], found[2], content)
        else:
            self._answer(404, {"error": f"no such page: {path}"})

    def do_PUT(self) -> None:
        digest, content = self.path.rsplit("/", 1)[1], self._body()
        if hashlib.sha256(content).hexdigest() != digest:
            return self._answer(400, {"error": "the hash differs"})
        self.hub.objects[digest] = content
        return self._answer(200)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/(.+?/.+?)/(revision|tree)/(.+)", path):
            repo, what, revision = found.groups()
        elif found := re.fullmatch(r"/(.+?/.+?)/resolve/(.+?)/(.+)", path):
            repo, revision, what = found[1], found[2], "file"
        else:
            return self._answer(404, {"error": f"no such page: {path}"})
        missing = {"X-Error-Code": "RepoNotFound"}
        if repo not in self.hub.repos or (repo in self.hub.private and not self._is_known()):
            return self._answer(401 if not self._is_known() else 404, {"error": "Repository not found"}, missing)
        branch = self.hub.branch(repo, revision)
        if branch is None:
            return self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        files, sha = self.hub.repos[repo][branch], self.hub.sha(repo, branch)
        if what == "revision":
            return self._answer(200, {"id": repo, "sha": sha, "siblings": [{"rfilename": name} for name in files]})
        if what == "tree":
            return self._answer(
                200, [{"type": "file", "path": n, "size": len(d), "oid": "0"} for n, d in files.items()]
            )
        if found[3] not in files:
            return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        data = files[found[3]]
        return self._answer(200, data, {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'})

    def _create(self, wanted: dict[str, Any]) -> None:
        repo = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
        status = 409 if repo in self.hub.repos else 200
        self.hub.repos.setdefault(repo, {"main": {}})
        if (wanted.get("private") or wanted.get("visibility") == "private") and status == 200:
            self.hub.private.add(repo)
        self._answer(status, {"url": f"{self.hub.url}/{repo}", "name": repo, "error": "exists"})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}", "header": {}}}}
            for one in wanted["objects"]
        ]
        content = {"transfer": "basic", "objects": objects}
        self._answer(200, content, {"Content-Type": "application/vnd.git-lfs+json"})

    def _commit(self, repo: str, branch: str, content: bytes) -> None:
        files = self.hub.repos[repo][branch]
        for line in map(json.loads, content.decode().splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.hub.objects[line["value"]["oid"]]
        sha = self.hub.sha(repo, branch)
        self._answer(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty hub on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
