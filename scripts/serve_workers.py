#!/usr/bin/env python3
"""Several `pyspec serve` processes at one address, with a router that sends prompts with a common prefix to the same one.

    python scripts/serve_workers.py [--workers 2] [--router sglang|nginx] [--port 8080] -- [options of pyspec serve]
    python scripts/serve_workers.py --devices CUDA0,CUDA1 -- -m target.gguf -md drafter.gguf --slots 16     # a worker per GPU

sglang (`pip install sglang-router`) routes by prompt; nginx (`apt-get install nginx-light`) by the header x-session-id. SIGTERM or SIGINT is forwarded to
the workers, which drain for --drain seconds, and the router ends last; a second signal ends them at once. If the router ends, the workers do; a
worker's exit is reported, and the others continue. See docs/scaling.md.
"""

import argparse
import importlib.util
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    map $http_x_session_id $affinity {{ "" $request_id; default $http_x_session_id; }}
    upstream workers {{
        hash $affinity consistent;
        {servers}
        keepalive 64;
    }}
    server {{
        listen {host}:{port};
        client_max_body_size 32m;
        location / {{
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_buffering off;
            proxy_read_timeout 1h;
            proxy_connect_timeout 2s;
            proxy_next_upstream error timeout http_503 http_429 non_idempotent;
        }}
    }}
}}
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def missing(router: str) -> str | None:
    """The command that installs a router that is not here."""
    if router == "sglang":
        return None if importlib.util.find_spec("sglang_router") is not None else "pip install sglang-router"
    return None if shutil.which("nginx") is not None or Path("/usr/sbin/nginx").exists() else "apt-get install nginx-light"


class Workers(list[subprocess.Popen[str]]):
    """The worker processes, in their own process group, so that Ctrl-C reaches them only through this one. ``ending``: whether they were signalled."""

    ending = False

    def end(self, *_: object) -> None:
        self.ending = True
        for process in self:
            process.terminate()


def start_worker(workers: Workers, number: int, options: list[str], device: str | None) -> str | None:
    """Starts a worker and waits until it is ready; its address, or None if it was signalled. Its output goes to stderr, prefixed with its number."""
    command = [sys.executable, "-m", "pyggml_spec", "serve", *options, "--port", "0", *(["--device", device] if device else [])]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0)
    workers.append(process)
    if workers.ending:  # between these two lines
        process.terminate()
    found: list[str] = []
    ready = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            print(f"worker {number}: {line}", end="", file=sys.stderr, flush=True)
            if address := re.match(r"serving .* at (https?://\S+)/ with", line):
                found.append(address[1])
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    ready.wait()
    if not found and not workers.ending:
        sys.exit(f"worker {number} did not start")
    return found[0] if found else None


def router_command(router: str, urls: list[str], host: str, port: int, folder: str) -> list[str]:
    if router == "nginx":
        # max_fails=0: status 429 would count as a failure; a dead worker refuses connections at once
        servers = "\n        ".join(f"server {url.removeprefix('http://')} max_fails=0;" for url in urls)
        conf = Path(folder) / "nginx.conf"
        conf.write_text(NGINX.format(folder=folder, servers=servers, host=host, port=port))
        return [shutil.which("nginx") or "/usr/sbin/nginx", "-c", str(conf), "-p", folder, "-e", "stderr"]
    # no circuit breaker: it counts 429 as a failure; health checks find dead workers, and requests are retried elsewhere
    more = {
        "policy": "cache_aware", "balance-abs-threshold": 2, "balance-rel-threshold": 1.2,
        "retry-max-retries": 6, "retry-initial-backoff-ms": 200, "health-check-interval-secs": 1, "health-failure-threshold": 2, "health-success-threshold": 1,
        "prometheus-port": free_port(), "log-level": "warn",
    }  # fmt: skip
    settings = ["--disable-circuit-breaker", *(str(part) for name, value in more.items() for part in (f"--{name}", value))]
    return [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *urls, "--host", host, "--port", str(port), *settings]


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    ours, theirs = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--devices", help="a worker on each, with commas between them")
    parser.add_argument("--router", choices=["sglang", "nginx"], default="sglang")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    asked = parser.parse_args(ours)
    if (command := missing(asked.router)) is not None:
        sys.exit(f"the router {asked.router} is not installed: {command}")
    devices: list[str | None] = list(asked.devices.split(",")) if asked.devices else []
    devices += [None] * (max(asked.workers or (0 if devices else 2), len(devices)) - len(devices))
    workers, urls, router = Workers(), [], None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, workers.end)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for i, device in enumerate(devices):
                if (url := start_worker(workers, i, theirs, device)) is None or workers.ending:
                    return
                urls.append(url)
                print(f"worker {i} is process {workers[-1].pid} at {url}", file=sys.stderr, flush=True)
            router = subprocess.Popen(router_command(asked.router, urls, asked.host, asked.port, folder), process_group=0)
            print(f"{asked.router} is at http://{asked.host}:{asked.port}/", file=sys.stderr, flush=True)
            while router.poll() is None and not workers.ending:
                time.sleep(0.1)
        finally:
            if not workers.ending:
                workers.end()
            for process in workers:
                process.wait()
            if router is not None:  # it carries the streams of those that end: the last one
                router.terminate()
                router.wait()


if __name__ == "__main__":
    main()
