"""Starting and ending: the session, the sockets, the event loop, signals."""

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api import Session
from ..errors import PyspecError
from ..speculation.synthetic import SyntheticAcceptance
from .access import Keys

log = logging.getLogger("pyspec.serve")
LIBRARIES = {
    "uvicorn": "uvicorn",
    "httptools": "httptools",
    "msgspec": "msgspec",
    "starlette": "starlette",
    "prometheus_client": "prometheus-client",
}
SWITCH_SECONDS = 0.0005  # how long the event loop may keep the interpreter from the thread of the steps
TOLD_SECONDS = 0.9  # that readers have for the error that ends what was cut off
STEP_SECONDS = 1.0  # that a step may take which is under way when all readers have gone
FILE_SECONDS = 30.0  # the same where beginnings of prompts are still written to files
STARTING_SOCKETS = 2048  # connections that wait to be taken


def missing() -> str | None:
    """The sentence about libraries of the extra that are not installed; None if all are."""
    absent = [name for module, name in LIBRARIES.items() if importlib.util.find_spec(module) is None]
    if not absent:
        return None
    return f"the server needs {' and '.join(absent)}: run: pip install {' '.join(LIBRARIES.values())}"


@dataclass
class Settings:
    """Where and how to serve."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    slots: int = 8
    n_ctx: int | None = None
    prefix_memory: int | None = None
    prefix_cache: str | None = None
    prefix_disk: int | None = None
    share_prefixes: bool = False
    queue_requests: int | None = None
    queue_tokens: int | None = None
    queue_seconds: float | None = None
    drain: float = 30.0
    keys: Keys = field(default_factory=Keys)
    origins: str = "localhost"
    allowed_hosts: str = ""
    max_body: int = 8 << 20
    certificate: str | None = None
    certificate_key: str | None = None
    synthetic: float | None = None  # tokens per step, for benchmarks
    rates: Sequence[float] = ()  # or the share in which the draft of each position is accepted
    told: Callable[[str], None] = field(default=lambda line: None)


def listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """A listening socket per address; what ends with ".sock" is the path of a unix socket.

    Raises:
        PyspecError: an address cannot be had.
    """
    made: list[socket.socket] = []
    try:
        for host in hosts:
            sock = _listen_unix(host) if is_path(host) else _listen_tcp(host, port)
            made.append(sock)
            sock.listen(STARTING_SOCKETS)
            sock.setblocking(False)
            port = port if is_path(host) else port or sock.getsockname()[1]
    except BaseException:
        for sock in made:
            sock.close()
        raise
    return made


class _UnixListener(socket.socket):
    """Whose file goes when it is closed."""

    _file: tuple[str, int] | None = None

    def bind(self, path: Any) -> None:
        super().bind(path)
        self._file = path, os.stat(path).st_ino

    def close(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None and os.stat(file[0]).st_ino == file[1]:
                os.unlink(file[0])
        super().close()


def is_path(host: str) -> bool:
    return host.endswith(".sock")


def address(scheme: str, host: str, sock: socket.socket) -> str:
    """Where to request, as it is shown."""
    if is_path(host):
        return f"unix:{host}"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}/"


def _listen_tcp(host: str, port: int) -> socket.socket:
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(STARTING_SOCKETS)
        return sock
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PyspecError(f"{host}:{port} cannot be listened at: {why}; choose another `port` or `host`") from None


def _listen_unix(path: str) -> socket.socket:
    """The file is for its user, and for the group where the umask lets it; one that a killed server left is replaced."""
    if not hasattr(socket, "AF_UNIX"):
        raise PyspecError(f"{path} is the path of a unix socket, which this system does not have; give `host` an address")
    sock = _UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_abandoned(path)
        sock.bind(path)
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & 0o660)  # nobody can connect before it listens
        return sock
    except OSError as error:
        sock.close()
        raise PyspecError(f"{path} cannot be listened at: {error.strerror or error}; choose another `host`") from None


def _remove_abandoned(path: str) -> None:
    """Raises OSError: somebody listens there, or it is no socket."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("there is a file of this name, which is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except PermissionError:
            raise
        except OSError:
            pass
    raise OSError("another server listens there")


def serve(session: Session, settings: Settings, limits: Any, options: Any, template: str | None) -> int:
    """Serves until a signal ends it; the exit status.

    Args:
        limits: ``fields.Limits``, what counts where a request says nothing.
        options: ``served.ServeOptions``.
        template: Jinja text of the chat template; None takes the model's.

    Raises:
        PyspecError: an address, or caches that do not fit.
    """
    from .protocol import loop_factory

    sockets = listen(settings.hosts, settings.port)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_serve(session, settings, limits, options, template, sockets))
    finally:
        for sock in sockets:
            sock.close()


async def _serve(
    session: Session, settings: Settings, limits: Any, options: Any, template: str | None, sockets: list[socket.socket]
) -> int:
    import uvicorn

    from . import heap
    from .access import Hosts, Origins
    from .app import create_app
    from .metrics import Metrics
    from .pool import Pool
    from .protocol import Server, guard
    from .reading import Context
    from .served import Served
    from .tasks import Queue, QueueLimits

    keys, origins, metrics = settings.keys, Origins(settings.origins), Metrics()
    hosts = Hosts(
        settings.allowed_hosts,
        [h for host, sock in zip(settings.hosts, sockets) if not is_path(host) for h in (host, sock.getsockname()[0])],
    )
    failures: list[BaseException] = []

    def told(line: str) -> None:
        """Whoever read these lines may be gone; a signal that could not be told of was not obeyed."""
        with contextlib.suppress(OSError, ValueError):
            settings.told(line)

    def make() -> Any:
        return session.concurrent(
            settings.slots, settings.n_ctx, settings.prefix_memory, settings.prefix_cache, settings.prefix_disk, only=True
        )

    def broken(error: BaseException) -> Any:
        """One more try; the second failure ends the server, so that its supervisor starts it anew."""
        log.error("the engine has failed: %s", error)
        failures.append(error)
        if len(failures) > 1:
            loop.call_soon_threadsafe(end, 1)
            return None
        try:
            return make()
        except BaseException:
            log.exception("it cannot be made anew")
            loop.call_soon_threadsafe(end, 1)
            return None

    loop, exit_status = asyncio.get_running_loop(), [0]
    with Pool() as pool:
        concurrent = make()
        served = Served(session, concurrent, limits, options, template)
        if served.note:
            told(served.note)
        queue_limits = QueueLimits(settings.queue_requests, settings.queue_tokens, settings.queue_seconds)
        synthetic: Callable[[int], SyntheticAcceptance] | None = None
        if (settings.synthetic is not None or settings.rates) and session.drafter is not None:
            length, drafts = settings.synthetic, session.engine.options.width - 1

            def draws(seed: int) -> SyntheticAcceptance:
                return (
                    SyntheticAcceptance(length, drafts, seed) if length is not None else SyntheticAcceptance.of_rates(settings.rates, seed)
                )

            synthetic = draws
            told("acceptance is synthetic: texts are not the target's, this is for benchmarks only")
        queue = Queue(concurrent, settings.slots, queue_limits, pool, metrics.ended, broken, synthetic, settings.share_prefixes)
        app = create_app(Context(served, queue, pool), metrics, keys, origins, hosts, settings.max_body)
        config = uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False, date_header=True,
            loop="none", timeout_keep_alive=30, timeout_graceful_shutdown=5, proxy_headers=False, ssl_certfile=settings.certificate, ssl_keyfile=settings.certificate_key,
        )  # fmt: skip
        server = Server(guard(config))
        heap.prepare()
        ending: list[asyncio.Task[None]] = []

        async def drain() -> None:
            began = loop.time()
            ended = await queue.drain(settings.drain)
            if not ended:
                told(f"cut off what had not ended within {settings.drain:g} s")
            if left := await server.read_out(max(TOLD_SECONDS, began + settings.drain - loop.time()) if ended else TOLD_SECONDS):
                told(f"cut off {left} {'reader' if left == 1 else 'readers'} that had not taken all of an output")
            server.should_exit = True

        def end(status: int = 0) -> None:
            exit_status[0] = max(exit_status[0], status)
            if ending:  # the second signal
                queue.cancel_all("the server ends")
                server.should_exit = server.force_exit = True
                return
            running = len(queue.running)
            told(f"ending: {running} running" if running else "ending")
            ending.append(loop.create_task(drain()))

        def reread() -> None:
            try:
                keys.read()
                told("read the API keys anew")
            except PyspecError as error:
                told(str(error))

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, reread)
        watching = loop.create_task(queue.watch())
        try:
            scheme = "https" if settings.certificate else "http"
            for host, sock in zip(settings.hosts, sockets):
                told(f"serving {served.name} at {address(scheme, host, sock)} with {settings.slots} slots of {served.n_ctx} tokens")
            await server.serve(sockets=sockets)
        finally:
            watching.cancel()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            queue.cancel_all("the server ends")
            pool.shutdown(wait=False, cancel_futures=True)
            stepping = not await loop.run_in_executor(
                None, queue.engine.stop, STEP_SECONDS if settings.prefix_cache is None else FILE_SECONDS
            )
            if stepping or not await loop.run_in_executor(None, pool.idle, STEP_SECONDS):
                told(
                    f"ended while a {'step' if stepping else 'request'} was under way"
                )  # two threads on two cores that others use: 1.5 s; a device that hangs: for ever
                sys.stdout.flush()
                os._exit(exit_status[0])
            await loop.run_in_executor(None, queue.engine.close)
    return exit_status[0]


def log_to_stderr(verbose: bool) -> None:
    """Lines of the server's own log, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("pyspec.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if verbose and name == "pyspec.serve" else logging.WARNING)
