"""A local server that imitates the Hugging Face Hub, as far as a store uses it.

It has the answers of the API as huggingface_hub 2.4 reads them: revisions, trees, paths, pre-uploads, commits with
`parentCommit`, contents with ranges; buckets except uploads. Large files, Xet and permissions are not imitated.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

DATE = "2026-01-01T00:00:00.000Z"


def now() -> str:
    """Return the time, as the Hub writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class Hub(ThreadingHTTPServer):
    """The server, with a dataset `user/repo` and a bucket `user/bucket`.

    `commits` has the paths that each commit changed.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, tuple[bytes, str]] = {}
        self.bucket: dict[str, tuple[bytes, str]] = {}
        self.commits: list[list[str]] = []
        self.refused = 0
        self.lose_answers = 0
        self.between: Any = None
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def change_bucket(self, _: str, add: Any = (), delete: Iterable[str] = ()) -> None:
        """Do what `HfApi.batch_bucket_files` does, whose uploads by Xet are not imitated."""
        with self.lock:
            self.bucket |= {path: (Path(source).read_bytes(), now()) for source, path in add}
            for path in delete:
                self.bucket.pop(path, None)

    @property
    def url(self) -> str:
        """Endpoint of the server."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def head(self) -> str:
        """Name of the last commit."""
        return hashlib.sha1(json.dumps(self.commits).encode()).hexdigest()


class Answer(BaseHTTPRequestHandler):
    """Answers to one request."""

    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def send(self, content: Any, code: int = 200, error: str = "", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), "X-Error-Code": error, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def entry(self, path: str) -> dict[str, Any]:
        data, date = self.server.files[path]
        commit = {"id": self.server.head, "title": "a commit", "date": date}
        return {"type": "file", "path": path, "size": len(data), "oid": "1" * 40, "lastCommit": commit}

    def stored(self, path: str) -> dict[str, Any]:
        data, date = self.server.bucket[path]
        return {"type": "file", "path": path, "size": len(data), "xetHash": "3" * 64, "uploadedAt": date}

    def blob(self, path: str) -> str | None:
        """Return git's name of the contents of a file, by which the client skips unchanged files."""
        data = self.server.files.get(path, (None, ""))[0]
        return None if data is None else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        is_bucket = "buckets/" in path
        place = "buckets/user/bucket" if is_bucket else "datasets/user/repo"
        with self.server.lock:
            files = dict(self.server.bucket if is_bucket else self.server.files)
        contents = f"/{place}/resolve/{'' if is_bucket else 'main/'}"
        if path.startswith(contents):
            self.content(files, path.removeprefix(contents))
        elif not path.startswith(f"/api/{place}"):
            self.send({"error": "Repository not found"}, 404, "RepoNotFound")
        elif "/tree" in path:
            folder = path.partition("/tree" if is_bucket else "/tree/main")[2].strip("/")
            self.listing(files, folder, self.stored if is_bucket else self.entry)
        elif "/revision/" in path and not path.endswith(("/main", self.server.head)):
            self.send({"error": "Invalid rev id"}, 404, "RevisionNotFound")
        elif is_bucket:
            self.send({"id": "user/bucket", "private": False, "createdAt": DATE, "size": 0, "totalFiles": len(files)})
        else:
            self.send({"id": "user/repo", "sha": self.server.head, "siblings": [], "private": False, "tags": []})

    def content(self, files: dict[str, tuple[bytes, str]], name: str) -> None:
        if name not in files:
            self.send({"error": "Entry not found"}, 404, "EntryNotFound")
            return
        data, code, more = files[name][0], 200, {"X_Repo_Commit": self.server.head, "ETag": '"1"'}
        if "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
            code, more = 206, {**more, "Content_Range": f"bytes {begin}-{end}/{len(data)}"}
            data = data[begin : end + 1]
        self.send(data, code, **more)

    def listing(self, files: Iterable[str], folder: str, entry: Callable[[str], dict[str, Any]]) -> None:
        above = f"{folder}/" if folder else ""
        inside = {name: name.removeprefix(above) for name in files if name.startswith(above)}
        if folder and not inside:
            self.send({"error": "Entry not found"}, 404, "EntryNotFound")
            return
        found = [entry(name) for name, rest in inside.items() if "/" not in rest]
        folders = {above + rest.partition("/")[0] for rest in inside.values() if "/" in rest}
        self.send(found + [{"type": "directory", "path": name, "oid": "2" * 40, "size": 0} for name in folders])

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path, hub = unquote(urlsplit(self.path).path), self.server
        if not path.startswith("/api/datasets/user/repo/"):
            self.send({"error": "Repository not found"}, 404, "RepoNotFound")
        elif "/preupload/" in path:
            fields = {"uploadMode": "regular", "shouldIgnore": False}
            names = [file["path"] for file in json.loads(body)["files"]]
            self.send({"files": [{"path": name, **fields, "oid": self.blob(name)} for name in names]})
        elif "/paths-info/" in path:
            wanted = parse_qs(body.decode())["paths"]
            with hub.lock:
                self.send([self.entry(name) for name in wanted if name in hub.files])
        else:
            self.commit([json.loads(line) for line in body.splitlines()])

    def commit(self, lines: list[dict[str, Any]]) -> None:
        hub = self.server
        between, hub.between = hub.between, None
        if between is not None:
            between()
        with hub.lock:
            parent = lines[0]["value"].get("parentCommit")
            if parent is not None and parent != hub.head:
                hub.refused += 1
                self.send({"error": "A commit has happened since. Please refresh and try again."}, 412)
                return
            added = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
            removed = [x["value"]["path"] for x in lines if x["key"] == "deletedFile"]
            if not {*removed} <= {*hub.files}:
                self.send({"error": "A file with this name doesn't exist"}, 404, "EntryNotFound")
                return
            hub.files |= {name: (data, now()) for name, data in added.items()}
            for name in removed:
                del hub.files[name]
            hub.commits.append(sorted([*added, *(f"-{name}" for name in removed)]))
            url = f"{hub.url}/datasets/user/repo/commit/{hub.head}"
            if hub.lose_answers:
                hub.lose_answers -= 1
                self.send({"error": "gone"}, 502)
                return
            self.send({"success": True, "commitOid": hub.head, "commitUrl": url, "hookOutput": ""})
