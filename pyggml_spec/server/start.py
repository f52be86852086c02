"""Starting and ending the server: session, event loop, signals."""

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..api import Session
from ..errors import PyspecError
from ..load_options import LoadOptions
from ..speculation.synthetic import SyntheticAcceptance
from .sockets import address, is_path, listen

if TYPE_CHECKING:
    from .access import Keys
    from .sampling import Limits
    from .served import ServeOptions

log = logging.getLogger("pyspec.serve")
LIBRARIES = {  # of the extra `serve`: their modules
    "uvicorn": "uvicorn", "httptools": "httptools", "msgspec": "msgspec", "starlette": "starlette", "prometheus-client": "prometheus_client",
}  # fmt: skip
SWITCH_SECONDS = 0.0005  # that the event loop may keep the interpreter from the engine's thread
ERROR_SECONDS = 0.9  # that readers have for the error that ends what was cut off
STEP_SECONDS = 1.0  # that a running step may take when all readers have gone
FILE_SECONDS = 30.0  # the same where prefixes are still written to files


def missing() -> str | None:
    """The sentence about libraries of the extra that are not installed; None if all are."""
    absent = [name for name, module in LIBRARIES.items() if importlib.util.find_spec(module) is None]
    if not absent:
        return None
    return f"the server needs {' and '.join(absent)}: run: pip install {' '.join(LIBRARIES)}"


@dataclass
class Settings:
    """Where and how to serve. ``load``: context and prefix cache of the slots. ``report``: takes the lines about what the server does."""

    keys: "Keys"
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
    report: Callable[[str], None] = field(default=lambda line: None)


def serve(session: Session, settings: Settings, limits: "Limits", options: "ServeOptions", template: str | None) -> int:
    """Serves until a signal ends it; the exit status.

    Args:
        limits: defaults of requests.
        template: Jinja text of the chat template; None takes the model's.

    Raises:
        PyspecError: an address, or caches that do not fit.
    """
    from .protocol import loop_factory

    sockets = listen(settings.hosts, settings.port)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_Service(session, settings).run(limits, options, template, sockets))
    finally:
        for sock in sockets:
            sock.close()


class _Service:
    """The running server: makes its parts, obeys signals, and ends."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self.session, self.settings = session, settings
        self.failures = 0
        self.exit_status = 0
        self.ending: asyncio.Task[None] | None = None

    async def run(self, limits: "Limits", options: "ServeOptions", template: str | None, sockets: list[socket.socket]) -> int:
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

        settings, metrics = self.settings, Metrics()
        bound = [h for host, sock in zip(settings.hosts, sockets) if not is_path(host) for h in (host, sock.getsockname()[0])]
        hosts = Hosts(settings.allowed_hosts, bound)
        self.loop = asyncio.get_running_loop()
        with Pool() as self.pool:
            concurrent = self._concurrent()
            served = Served(self.session, concurrent, limits, options, template)
            if served.note:
                self.report(served.note)
            queue_limits = QueueLimits(settings.queue_requests, settings.queue_tokens, settings.queue_seconds)
            self.queue = Queue(
                concurrent, settings.slots, queue_limits, self.pool, metrics.ended, self._broken, self._synthetic(), settings.share_prefixes
            )  # fmt: skip
            context = Context(served, self.queue, self.pool)
            app = create_app(context, metrics, settings.keys, Origins(settings.origins), hosts, settings.max_body)
            self.server = Server(guard(uvicorn.Config(
                app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False, date_header=True,
                loop="none", timeout_keep_alive=30, timeout_graceful_shutdown=5, proxy_headers=False, ssl_certfile=settings.certificate,
                ssl_keyfile=settings.certificate_key,
            )))  # fmt: skip
            heap.prepare()
            signals: dict[int, Callable[[], None]] = {signal.SIGTERM: self.end, signal.SIGINT: self.end}
            if hasattr(signal, "SIGHUP"):
                signals[signal.SIGHUP] = self._read_keys
            for number, handler in signals.items():
                self.loop.add_signal_handler(number, handler)
            watching = self.loop.create_task(self.queue.watch())
            try:
                scheme = "https" if settings.certificate else "http"
                for host, sock in zip(settings.hosts, sockets):
                    self.report(
                        f"serving {served.name} at {address(scheme, host, sock)} with {settings.slots} slots of {served.n_ctx} tokens"
                    )
                await self.server.serve(sockets=sockets)
            finally:
                watching.cancel()
                for number in (signal.SIGTERM, signal.SIGINT):
                    self.loop.remove_signal_handler(number)
                await self._close()
        return self.exit_status

    def report(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe: signals are obeyed all the same
            self.settings.report(line)

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

    def _read_keys(self) -> None:
        try:
            self.settings.keys.read()
            self.report("read the API keys anew")
        except PyspecError as error:
            self.report(str(error))

    def end(self, status: int = 0) -> None:
        self.exit_status = max(self.exit_status, status)
        if self.ending is not None:  # the second signal
            self.queue.cancel_all("the server ends")
            self.server.should_exit = self.server.force_exit = True
            return
        running = len(self.queue.running)
        self.report(f"ending: {running} running" if running else "ending")
        self.ending = self.loop.create_task(self._drain())

    async def _drain(self) -> None:
        seconds, began = self.settings.drain, self.loop.time()
        ended = await self.queue.drain(seconds)
        if not ended:
            self.report(f"cut off what had not ended within {seconds:g} s")
        if left := await self.server.read_out(max(ERROR_SECONDS, began + seconds - self.loop.time()) if ended else ERROR_SECONDS):
            self.report(f"cut off {left} {'reader' if left == 1 else 'readers'} that had not taken all of a response")
        self.server.should_exit = True

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


def log_to_stderr(verbose: bool) -> None:
    """Lines of the server's own log, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("pyspec.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if verbose and name == "pyspec.serve" else logging.WARNING)
