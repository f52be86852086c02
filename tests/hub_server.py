"""A server that speaks what huggingface_hub asks of a hub: the files of a repository, their headers, and their bytes."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        self.server.asked.append(f"{self.command} {self.path}")

    def _answer(self, status: int, body: bytes = b"", **headers) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if self.server.broken:
            return self._answer(503)
        if parts[:2] == ["api", "models"]:
            repo = self.server.repos.get("/".join(parts[2:4]))
            if repo is None:
                return self._answer(404, X_Error_Code="RepoNotFound")
            siblings = [{"rfilename": name} for name in repo]
            body = json.dumps(
                {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            )
            return self._answer(200, body.encode(), Content_Type="application/json")
        if "/".join(parts[:2]) in self.server.closed:
            return self._answer(403, X_Error_Code="GatedRepo")
        repo, name = self.server.repos.get("/".join(parts[:2]), {}), "/".join(parts[4:])
        if parts[2:3] != ["resolve"] or name not in repo:
            return self._answer(404, X_Error_Code="EntryNotFound")
        tag = hashlib.sha256(repo[name]).hexdigest()
        return self._answer(200, repo[name], ETag=f'"{tag}"', X_Repo_Commit=COMMIT, Accept_Ranges="none")

    def do_HEAD(self):
        self.do_GET()


class Hub(ThreadingHTTPServer):
    """``repos``: the bytes of each file by repository and name. ``asked``: the requests so far."""

    daemon_threads = True

    def __init__(self, repos: dict[str, dict[str, bytes]]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.asked, self.closed, self.broken = repos, [], set(), False
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
