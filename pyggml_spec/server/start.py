"""Starting and ending the server: listening sockets, session, event loop, signals."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from ..api import Session
from ..embedding import Embedder
from ..errors import PyspecError
from ..load_options import LoadOptions
from ..speculation.synthetic import SyntheticAcceptance
from . import embeddings
from .access import Admission, Hosts, Keys, Origins
from .app import ROUTES, create_app, prepare_heap
from .metrics import Metrics
from .pool import Pool
from .protocol import Server, guard
from .reading import Context
from .record import Recorder
from .sampling import Limits
from .served import Served, ServeOptions
from .tasks import Queue, QueueLimits, Task

log = logging.getLogger("pyspec.serve")
BACKLOG = 2048  # connections that wait to be accepted
SWITCH_SECONDS = 0.0005  # that the event loop may keep the interpreter from the engine's thread
ERROR_SECONDS = 0.9  # that readers have for the error that ends what was cut off
STEP_SECONDS = 1.0  # that a running step may take when all readers have gone
FILE_SECONDS = 30.0  # the same where prefixes are still written to files


@dataclass
class Settings:
    """Where and how to serve. ``load``: context and prefix cache of the slots. ``report``: takes the lines about what the server does."""

    keys: Admission
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    slots: int = 8
    load: LoadOptions = field(default_factory=LoadOptions)
    share_prefixes: bool = False
    queue_requests: int | None = None
    queue_tokens: int | None = None
    queue_seconds: float | None = None
    drain: float = 30.0
    origins: str = "localhost"
    allowed_hosts: str = ""
    max_body: int = 8 << 20
    certificate: str | None = None
    certificate_key: str | None = None
    synthetic: float | None = None  # tokens per step, for benchmarks
    rates: Sequence[float] = ()  # or the acceptance rate at each position
    record: str | None = None  # folder that keeps answers for training
    record_limit: int = 1 << 30  # bytes of it
    report: Callable[[str], None] = field(default=lambda line: None)
    started: Callable[[Any], None] = field(default=lambda served: None)  # called with the served model when requests are taken


def serve(session: Session, settings: Settings, limits: Limits, options: ServeOptions, template: str | None) -> int:
    """Serves until a signal ends it; the exit status. ``limits``: defaults of requests; ``template``: Jinja text of the chat template, None for the
    model's. Raises PyspecError: an address, or caches that do not fit."""
    sys.setswitchinterval(SWITCH_SECONDS)
    return run(_ModelService(session, settings, limits, options, template))


def serve_embeddings(embedder: Embedder, settings: Settings, options: ServeOptions) -> int:
    """The same for a model that embeds or ranks texts, and generates none."""
    return run(_EmbeddingService(embedder, settings, options))


def run(service: "Service") -> int:
    """Runs a service at the addresses of its settings; the exit status. Raises PyspecError: an address cannot be had."""
    sockets = listen(service.settings.hosts, service.settings.port)
    try:
        with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
            return runner.run(service.run(sockets))
    finally:
        for sock in sockets:
            sock.close()


class Work(Protocol):
    """What a server does for its clients."""

    @property
    def running(self) -> Collection[Any]: ...
    async def drain(self, seconds: float) -> bool:
        """Takes no more requests; whether the running ones have ended within that time."""

    def cancel_all(self, reason: str) -> None: ...


class Service:
    """A running server: listens, obeys signals, and ends."""

    work: Work

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.exit_status = 0
        self.ending: asyncio.Task[None] | None = None

    async def run(self, sockets: list[socket.socket]) -> int:
        """Until it has ended; the exit status."""
        raise NotImplementedError

    def hosts(self, sockets: Sequence[socket.socket]) -> Hosts:
        named = zip(self.settings.hosts, sockets)
        return Hosts(self.settings.allowed_hosts, [h for host, sock in named if not is_path(host) for h in (host, sock.getsockname()[0])])

    async def serve(
        self, app: ASGIApp, sockets: list[socket.socket], what: Callable[[str], str], started: Callable[[], None] | None = None
    ) -> None:
        """Until a signal ends it. ``what``: the line about what it serves at an address; ``started``: called when signals are obeyed."""
        settings, self.loop = self.settings, asyncio.get_running_loop()
        self.server = Server(guard(uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False, date_header=True,
            loop="none", timeout_keep_alive=30, timeout_graceful_shutdown=5, proxy_headers=False, ssl_certfile=settings.certificate,
            ssl_keyfile=settings.certificate_key,
        )))  # fmt: skip
        prepare_heap()
        signals: dict[int, Callable[[], None]] = {signal.SIGTERM: self.end, signal.SIGINT: self.end}
        if hasattr(signal, "SIGHUP"):
            signals[signal.SIGHUP] = self._read_keys
        for number, handler in signals.items():
            self.loop.add_signal_handler(number, handler)
        if started is not None:
            started()
        try:
            scheme = "https" if settings.certificate else "http"
            for host, sock in zip(settings.hosts, sockets):
                self.report(what(address(scheme, host, sock)))
            await self.server.serve(sockets=sockets)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                self.loop.remove_signal_handler(number)

    def report(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe: signals are obeyed all the same
            self.settings.report(line)

    def _read_keys(self) -> None:
        if not isinstance(self.settings.keys, Keys):
            return
        try:
            self.settings.keys.read()
            self.report("read the API keys anew")
        except PyspecError as error:
            self.report(str(error))

    def end(self, status: int = 0) -> None:
        self.exit_status = max(self.exit_status, status)
        if self.ending is not None:  # the second signal
            self.work.cancel_all("the server ends")
            self.server.should_exit = self.server.force_exit = True
            return
        running = len(self.work.running)
        self.report(f"ending: {running} running" if running else "ending")
        self.ending = self.loop.create_task(self._drain())

    async def _drain(self) -> None:
        seconds, began = self.settings.drain, self.loop.time()
        ended = await self.work.drain(seconds)
        if not ended:
            self.report(f"cut off what had not ended within {seconds:g} s")
        if left := await self.server.read_out(max(ERROR_SECONDS, began + seconds - self.loop.time()) if ended else ERROR_SECONDS):
            self.report(f"cut off {left} {'reader' if left == 1 else 'readers'} that had not taken all of a response")
        self.server.should_exit = True


class _ModelService(Service):
    """Of one model: makes its parts."""

    routes = ROUTES
    recorder: Recorder | None = None

    def __init__(self, session: Session, settings: Settings, limits: Limits, options: ServeOptions, template: str | None) -> None:
        super().__init__(settings)
        self.session, self._made_of = session, (limits, options, template)
        self.failures = 0

    def context(self, metrics: Metrics) -> Context:
        """What handlers have. Made in the event loop."""
        settings, concurrent = self.settings, self._concurrent()
        served = Served(self.session, concurrent, *self._made_of)
        if served.note:
            self.report(served.note)
        queue_limits = QueueLimits(settings.queue_requests, settings.queue_tokens, settings.queue_seconds)
        if settings.record is not None:
            self.recorder = Recorder(settings.record, served.name, settings.record_limit)
            self.report(f"keeps answers in {self.recorder.path}, but those of requests with record false")
        queue = Queue(
            concurrent, settings.slots, queue_limits, self.pool, self._ended(metrics), self._broken, self._synthetic(), settings.share_prefixes
        )  # fmt: skip
        return Context(served, queue, self.pool)

    def _ended(self, metrics: Metrics) -> Callable[[Task], None]:
        def ended(task: Task) -> None:
            metrics.ended(task)
            if self.recorder is not None:
                self.recorder.take(task)

        return ended

    def what(self, context: Context) -> str:
        """What is served, for the user."""
        return f"with {self.settings.slots} slot{'s' * (self.settings.slots > 1)} of {context.served.n_ctx} tokens"

    async def run(self, sockets: list[socket.socket]) -> int:
        settings, metrics, self.loop = self.settings, Metrics(), asyncio.get_running_loop()
        with Pool() as self.pool:
            context = self.context(metrics)
            self.work = self.queue = context.queue
            app = create_app(
                context, metrics, settings.keys, Origins(settings.origins), self.hosts(sockets), settings.max_body, self.routes
            )
            watching = self.loop.create_task(self.queue.watch())
            try:
                await self.serve(
                    app,
                    sockets,
                    lambda at: f"serving {context.served.name} at {at} {self.what(context)}",
                    lambda: settings.started(context.served),
                )
            finally:
                watching.cancel()
                if self.recorder is not None:
                    self.recorder.close()
                await self._close()
        return self.exit_status

    def _concurrent(self) -> Any:
        s = self.settings
        return self.session.concurrent(s.slots, s.load.n_ctx, s.load.prefix_memory, s.load.prefix_cache, s.load.prefix_disk, only=True)

    def _broken(self, error: BaseException) -> Any:
        """Another concurrent session; the second failure ends the server, so that its supervisor starts it anew."""
        log.error("the engine has failed: %s", error, exc_info=None if isinstance(error, PyspecError) else error)
        self.failures += 1
        if self.failures < 2:
            try:
                return self._concurrent()
            except BaseException:
                log.exception("it cannot be made anew")
        self.loop.call_soon_threadsafe(self.end, 1)
        return None

    def _synthetic(self) -> Callable[[int], SyntheticAcceptance] | None:
        length, rates, session = self.settings.synthetic, self.settings.rates, self.session
        if (length is None and not rates) or session.drafter is None:
            return None
        self.report("acceptance is synthetic: texts are not the target's, this is for benchmarks only")
        drafts = session.runner.options.width - 1
        return lambda seed: SyntheticAcceptance.of_rates(rates, seed) if length is None else SyntheticAcceptance(length, drafts, seed)

    async def _close(self) -> None:
        """Ends all threads. A step or a request may take two seconds on a busy machine, and for ever on a device that hangs: the process exits."""
        self.queue.cancel_all("the server ends")
        self.pool.shutdown(wait=False, cancel_futures=True)
        seconds = STEP_SECONDS if self.settings.load.prefix_cache is None else FILE_SECONDS
        stepping = not await self.loop.run_in_executor(None, self.queue.engine.stop, seconds)
        if stepping or not await self.loop.run_in_executor(None, self.pool.idle, STEP_SECONDS):
            self.report(f"ended while a {'step' if stepping else 'request'} was under way")
            sys.stdout.flush()
            os._exit(self.exit_status)
        await self.loop.run_in_executor(None, self.queue.engine.close)


class _EmbeddingService(_ModelService):
    routes = embeddings.ROUTES

    def __init__(self, embedder: Embedder, settings: Settings, options: ServeOptions) -> None:
        Service.__init__(self, settings)
        self.embedder, self.options = embedder, options

    def context(self, metrics: Metrics) -> Context:
        served: Any = embeddings.ServedEmbedder(self.embedder, self.options)
        queue: Any = embeddings.EmbeddingQueue(self.embedder)
        return Context(served, queue, self.pool)

    def what(self, context: Context) -> str:
        return f"with texts of up to {self.embedder.n_ctx} tokens, pooling {self.embedder.pooling}"


def log_to_stderr(verbose: bool) -> None:
    """Lines of the server's own log, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("pyspec.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if verbose and name == "pyspec.serve" else logging.WARNING)


def listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """A listening socket per address; what ends with ".sock" is the path of a unix socket. Raises PyspecError: an address cannot be had."""
    made: list[socket.socket] = []
    try:
        for host in hosts:
            sock = _listen_unix(host) if is_path(host) else _listen_tcp(host, port)
            made.append(sock)
            sock.listen(BACKLOG)
            sock.setblocking(False)
            port = port if is_path(host) else port or sock.getsockname()[1]
    except BaseException:
        for sock in made:
            sock.close()
        raise
    return made


class _UnixListener(socket.socket):
    """It removes its file when it is closed."""

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
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise PyspecError(f"{host}:{port} cannot be listened at: {why}; choose another `port` or `host`") from None


def _listen_unix(path: str) -> socket.socket:
    """The file is for its user, and for the group if the umask allows that; one that a killed server left is replaced."""
    if not hasattr(socket, "AF_UNIX"):
        raise PyspecError(f"{path} is the path of a unix socket, which this system does not have; give `host` an address")
    sock = _UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_abandoned(path)
        sock.bind(path)
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & 0o660)  # before it listens
        return sock
    except OSError as error:
        sock.close()
        raise PyspecError(f"{path} cannot be listened at: {error.strerror or error}; choose another `host`") from None


def _remove_abandoned(path: str) -> None:
    """Raises OSError: another server listens there, or it is no socket."""
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
