#!/usr/bin/env python3
"""Two workers in network namespaces, with delay, loss and disconnection: text equality with one CPU, cost of a step, error messages.

    check_workers.py [--tokens 64] [--width 8] [--delays 0 1 10] [--loss 1]        as root, on Linux with network namespaces and /dev/net/tun

Each worker's only link is carried packet by packet by this program, with delay (one way, ms) and loss; no tc netem is needed. The embedded pair drafts and
verifies blocks of one width. Per link: text equality, milliseconds per step, bytes per step; then the time until a cut link is reported. Exits with
the number of violations.
"""

import argparse
import ctypes
import fcntl
import glob
import heapq
import json
import multiprocessing
import os
import random
import select
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from itertools import count

PROMPT = "def fibonacci(n):\n    "
PORT = 50052
SAID_WITHIN = 10.0  # seconds
CLIENT = """
import json, sys, time
import pyggml_spec as ps
device, kernels, width, tokens, prompt = sys.argv[1], sys.argv[2] or None, int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
began = time.perf_counter()
with ps.load(device=device, kernels=kernels, threads=1, n_ctx=1024, draft_width=width) as session:
    loaded, marks = time.perf_counter() - began, []
    for event in session.steps(prompt, tokens, ignore_end=True):
        traffic = session.backend.traffic
        marks.append((time.perf_counter(), event.stats.steps, traffic and [traffic.sent, traffic.answers, traffic.graphs]))
    first, last = marks[len(marks) // 3], marks[-2]
    steps = last[1] - first[1]
    out = {"loaded": loaded, "ms": 1e3 * (last[0] - first[0]) / steps}
    if last[2]:
        out |= {name: (b - a) / steps for name, a, b in zip(("sent", "answers", "graphs"), first[2], last[2])}
    print(json.dumps(out | {"text": session.generate(prompt, tokens, ignore_end=True)[0]}))
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def open_tun(name: str) -> int:
    """A network device whose packets this process reads and writes."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x0001 | 0x1000))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
    return fd


def carry(ends: tuple[int, int], delay, loss, cut) -> None:
    """Packets from either end to the other, for ever; ``delay`` in milliseconds, ``loss`` as a share, ``cut``: none at all."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number, chance = count(), random.Random(1)
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for fd in select.select(ends, [], [], left)[0]:
            try:
                while packet := os.read(fd, 65536):
                    if not cut.value and chance.random() >= loss.value:
                        other = ends[1] if fd == ends[0] else ends[0]
                        heapq.heappush(waiting, (time.monotonic() + delay.value / 1e3, next(number), other, packet))
            except BlockingIOError:
                pass
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, fd, packet = heapq.heappop(waiting)
            os.write(fd, packet)


class Host:
    """A worker in a network namespace of its own. ``device``: what programs here call it."""

    def __init__(self, index: int):
        self.namespace, self.ip = f"pyspec-{index}", f"10.177.{index}.2"
        self.device = f"RPC:{self.ip}:{PORT}"
        self.delay, self.loss, self.cut = (multiprocessing.Value(ctypes.c_double, 0.0) for _ in range(3))
        subprocess.run(["ip", "netns", "del", self.namespace], check=False, stderr=subprocess.DEVNULL)
        run("ip", "netns", "add", self.namespace)
        here, there = f"pyspec-h{index}", f"pyspec-t{index}"
        ends = open_tun(here), open_tun(there)
        run("ip", "link", "set", there, "netns", self.namespace)
        run("ip", "addr", "add", f"10.177.{index}.1/24", "dev", here)
        run("ip", "link", "set", here, "up")
        run("ip", "-n", self.namespace, "addr", "add", f"{self.ip}/24", "dev", there)
        run("ip", "-n", self.namespace, "link", "set", there, "up")
        run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        self.link = multiprocessing.Process(target=carry, args=(ends, self.delay, self.loss, self.cut), daemon=True)
        self.link.start()
        for fd in ends:
            os.close(fd)
        command = [sys.executable, "-m", "pyggml_spec", "worker", "--host", self.ip, "--port", str(PORT), "--device", "CPU", "-t", "1"]
        self.worker = subprocess.Popen(["ip", "netns", "exec", self.namespace, *command], stderr=subprocess.PIPE, text=True)
        assert self.worker.stderr is not None
        self.worker.stderr.readline()
        wait_for(self.namespace)
        as_nice_as_this(self.worker.pid)

    @contextmanager
    def set(self, delay: float = 0.0, loss: float = 0.0, cut: bool = False):
        self.delay.value, self.loss.value, self.cut.value = delay, loss, cut
        yield
        self.delay.value = self.loss.value = self.cut.value = 0.0

    def close(self) -> None:
        self.worker.terminate()
        self.worker.wait(20)
        self.link.terminate()
        self.link.join(20)
        run("ip", "netns", "del", self.namespace)


def as_nice_as_this(worker: int) -> None:
    """The server has a session, and so a scheduling autogroup, of its own, which keeps timings comparable."""
    if not os.path.exists("/proc/self/autogroup"):
        return
    with open("/proc/self/autogroup") as file:
        nice = file.read().split()[-1]
    for children in glob.glob(f"/proc/{worker}/task/*/children"):
        with open(children) as file:
            for pid in file.read().split():
                with open(f"/proc/{pid}/autogroup", "w") as group:
                    group.write(nice)


def wait_for(namespace: str) -> None:
    """Until something listens there."""
    for _ in range(600):
        table = subprocess.run(
            ["ip", "netns", "exec", namespace, "cat", "/proc/net/tcp"], check=True, capture_output=True, text=True
        ).stdout
        if f":{PORT:04X} 00000000:0000 0A" in table:
            return
        time.sleep(0.1)
    sys.exit(f"the worker in {namespace} does not listen")


def measured(device: str, kernels: str, args: argparse.Namespace) -> dict:
    command = [sys.executable, "-c", CLIENT, device, kernels, str(args.width), str(args.tokens), PROMPT]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{device}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def cut_while_running(hosts: list[Host], device: str, args: argparse.Namespace) -> bool:
    """The last host's link is cut once text has come."""
    command = [
        "run",
        "--device",
        device,
        "-p",
        PROMPT,
        "--ignore-eos",
        "-c",
        "4096",
        "-n",
        "4000",
        "--draft-width",
        str(args.width),
        "-t",
        "1",
    ]
    process = subprocess.Popen([sys.executable, "-m", "pyggml_spec", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(20)
    with hosts[-1].set(cut=True):
        began = time.monotonic()
        err = process.communicate(timeout=120)[1].decode().splitlines()
        took = time.monotonic() - began
    good = process.returncode == 1 and took < SAID_WITHIN and err[-1].startswith("pyspec: ") and "is lost" in err[-1]
    print(f"cut while it runs: said within {took:.1f} s, exit code {process.returncode}: {err[-1]}", flush=True)
    return good


def cut_while_idle(host: Host, args: argparse.Namespace) -> bool:
    """Idle longer than the detection time: the worker notices as well, and serves another client."""
    code = f"""
import time, pyggml_spec as ps
with ps.load(device="{host.device}", threads=1, n_ctx=256, draft_width={args.width}) as session:
    session.generate("x", 2)
    print("idle", flush=True)
    time.sleep({SAID_WITHIN})
    began = time.monotonic()
    try:
        session.generate("x", 2)
    except ps.PyspecError as error:
        print(round(time.monotonic() - began, 1), error)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    with host.set(cut=True):
        said = process.communicate(timeout=120)[0].strip()
    again = subprocess.run(
        [sys.executable, "-c", CLIENT, host.device, "", str(args.width), "8", PROMPT], check=False, capture_output=True, text=True
    )
    print(
        f"cut while idle, asked {SAID_WITHIN:g} s later: {said or 'nothing'}; the worker then served another program: {again.returncode == 0}",
        flush=True,
    )
    return "is lost" in said and again.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0, 10.0])
    parser.add_argument("--loss", type=float, default=1.0, help="per cent of the packets")
    parser.add_argument("--split", action="store_true", help="also over both workers, the layers split between them")
    args = parser.parse_args()
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):
        sys.exit("check_workers.py makes network namespaces: it needs root, and /dev/net/tun")
    failed = 0
    with ExitStack() as stack:
        hosts = [Host(i) for i in range(1, 3)]
        for host in hosts:
            stack.callback(host.close)
        expected = measured("CPU", "ggml", args)
        print(f"one CPU: {expected['ms']:.2f} ms per step of {args.width} rows", flush=True)
        devices = [hosts[0].device, *([",".join(host.device for host in hosts)] if args.split else [])]
        for device in devices:
            used = hosts[: device.count(",") + 1]
            for delay, loss in [*((delay, 0.0) for delay in args.delays), (1.0, args.loss / 100)]:
                with ExitStack() as links:
                    for host in used:
                        links.enter_context(host.set(delay, loss))
                    found = measured(device, "", args)
                equal = found["text"] == expected["text"]
                failed += not equal
                print(
                    f"{len(used)} worker{'s' * (len(used) > 1)}, {2 * delay:g} ms round trip, {100 * loss:g} % lost: text {'equal' if equal else 'DIFFERS'}, "
                    f"{found['ms']:.2f} ms per step, {found['answers']:.2f} answers, {found['sent'] / 1e3:.1f} KB and {found['graphs']:.2f} graphs sent; "
                    f"loaded in {found['loaded']:.1f} s",
                    flush=True,
                )
            failed += not cut_while_running(used, device, args)
        failed += not cut_while_idle(hosts[0], args)
    sys.exit(failed)


if __name__ == "__main__":
    main()
