"""llama-server as a child process: arguments, start, readiness, stop, reason of exit."""

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self


class ServerEnded(ConnectionError):
    """llama-server exited, or did not become ready; with the reason."""


def environment(tools: Path) -> dict[str, str]:
    """The environment in which llama.cpp's tools find the libraries of their folder."""
    return {**os.environ, "LD_LIBRARY_PATH": f"{tools}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


class LlamaServer:
    """A greedy llama-server on a free port; it ends with its ``with`` block. It loads in the background: `wait` before the first request.

    Args:
        tools: folder of llama-server.
        log: takes what it prints.
        options: the rest of its command line.
        env: what its environment has on top of this process's.
    """

    def __init__(self, tools: Path, log: Path, *options: object, env: dict[str, str] | None = None):
        port = free_port()
        self.log, self.url = log, f"http://127.0.0.1:{port}"
        command = [str(tools / "llama-server"), "--port", str(port), "--no-webui", "--no-warmup", "--temp", "0", *map(str, options)]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env={**environment(tools), **(env or {})})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def wait(self, seconds: float = 1800) -> None:
        """Returns when the model is loaded.

        Raises:
            ServerEnded: it ended instead, or took longer and was stopped.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerEnded(self._reason())
            try:
                self._open("/health", timeout=10)
                return
            except OSError:
                time.sleep(0.5)
        self.close()
        raise ServerEnded(f"llama-server did not become ready in {seconds:.0f} seconds")

    def get(self, path: str) -> str:
        return self._ask(path)

    def post(self, path: str, **body: object) -> dict | list:
        return json.loads(self._ask(path, json.dumps(body).encode()))

    def counters(self) -> dict[str, float]:
        """Counters of /metrics (``--metrics``): ``steps``, and ``<context>.<counter>`` with patch 0001."""
        metrics = self.get("/metrics")
        lines = re.findall(r'^llamacpp:(\w+)\{context="(\w+)"\} (\S+)$', metrics, re.MULTILINE)
        drafts = re.search(r"^llamacpp:spec_decode_num_drafts_total (\S+)$", metrics, re.MULTILINE)
        found = {f"{context}.{name}": float(value) for name, context, value in lines}
        return {**found, "steps": float(drafts[1]) if drafts else 0.0}

    def _open(self, path: str, body: bytes | None = None, timeout: float = 1800) -> str:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read().decode()

    def _ask(self, path: str, body: bytes | None = None) -> str:
        try:
            return self._open(path, body)
        except urllib.error.HTTPError:
            raise  # an answer
        except OSError:
            time.sleep(1)  # it answers nothing more when it dies, and dies a moment later
            if self.process.poll() is None:
                raise
            raise ServerEnded(self._reason()) from None

    def _reason(self) -> str:
        """The last assertion or error in its output."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        for sign in ("GGML_ASSERT", "GGML_ABORT", "error", "failed"):
            told = [line for line in lines if sign in line]
            if told:
                break
        return f"llama-server ended with {self.process.wait()}: {(told or lines or ['no output'])[-1]}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
