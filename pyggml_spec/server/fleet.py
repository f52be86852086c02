"""The models of a router: which are loaded, what waits for them, and which one leaves when memory is needed."""

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import ApiError, api_error
from .model_process import END_SECONDS, RETRY, ModelProcess, ModelSpec, how

ANY = "any"
MAX_WAITING = 1024  # requests, for one model that is being loaded
WATCH_SECONDS = 0.5
_SHOWN = 12  # names in a message


class Model:
    """One model of the list, loaded or not."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.process: ModelProcess | None = None
        self.loading: asyncio.Task[None] | None = None
        self.waiting: list[asyncio.Future[ModelProcess]] = []
        self.used = 0.0  # of ``time.monotonic``, when its last request ended
        self.idle_seconds = spec.idle_seconds
        self.loads, self.load_seconds = 0, 0.0  # of the last one
        self.waits = ""  # what its loading waits for
        self.created = int(time.time())

    @property
    def ready(self) -> ModelProcess | None:
        """Its process, if that takes requests."""
        return self.process if self.process is not None and self.process.about and not self.process.leaving else None

    @property
    def state(self) -> str:
        return "loaded" if self.ready is not None else "loading" if self.loading is not None else "sleeping"

    @property
    def progress(self) -> str:
        """Of its loading."""
        if self.waits or self.process is None:
            return self.waits or "starts"
        what, done = self.process.progress
        return f"{what} {100 * done:.0f} %"

    @property
    def file_bytes(self) -> int | None:
        try:
            return self.spec.path.stat().st_size if self.spec.path is not None else None
        except OSError:
            return None


class Fleet:
    """Loads one model at a time. Where memory is needed, the model that was used least recently leaves, idle ones first; it takes no new requests then, and its
    running ones end."""

    def __init__(
        self, specs: Callable[[], Sequence[ModelSpec]], memory: int | None, most: int | None, drain: float, report: Callable[[str], None]
    ) -> None:  # fmt: skip
        """
        Args:
            specs: lists the models anew: files come and go.
            memory: bytes that all loaded models may take together; None: what their devices have free.
            most: models that may be loaded at once.
        """
        self._specs, self._memory, self._most, self._seconds, self._report = specs, memory, most, drain, report
        self._turn = asyncio.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="pyspec-")  # of the sockets: for this user alone
        self._number = 0
        self._spare: ModelProcess | None = None  # for the next model: its imports take a second
        self._all: dict[str, Model] = {}
        self.draining = False
        self.running: set[Any] = set()  # requests
        self._done = asyncio.Event()
        self._done.set()

    # -- names

    def models(self) -> list[Model]:
        """All of them, in the order of the preset, then of their files."""
        specs = {spec.name: spec for spec in self._specs()}
        for name, spec in specs.items():
            if (known := self._all.get(name)) is None or (known.process is None and known.loading is None and known.spec != spec):
                self._all[name] = Model(spec)
        kept = [name for name, model in self._all.items() if model.process is not None or model.loading is not None]
        self._all = {name: self._all[name] for name in (*specs, *kept)}
        return list(self._all.values())

    def find(self, name: str) -> Model:
        """By name or alias, also followed by Ollama's ":latest"; "any", or "": the loaded one that was used last, else the first. Raises ApiError."""
        for known in (list(self._all.values()), None):
            models = self.models() if known is None else known
            for wanted in (name, name.removesuffix(":latest")):
                for model in models:
                    if wanted in (model.spec.name, *model.spec.aliases):
                        return model
            if name in ("", ANY) and models:
                loaded = [(one.process.running > 0, one.used, i) for i, one in enumerate(models) if one.process is not None and one.ready]
                return models[max(loaded)[2]] if loaded else next((one for one in models if one.loading is not None), models[0])
        names = [model.spec.name for model in models]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        there = (
            f"there are {', '.join(names[:_SHOWN])}{more}; {ANY!r} is the one that was used last"
            if names
            else "put a GGUF file into the folder of models"
        )
        raise ApiError(404, f"there is no model {name[:100]!r}; {there}", param="model")

    # -- requests

    def begin(self, request: Any) -> None:
        """Counts a request until ``end_of``. Raises ApiError: the server ends."""
        if self.draining:
            raise ApiError(503, "the server is ending and takes no more requests; send this one to another", headers={"retry-after": "5"})
        self.running.add(request)
        self._done.clear()

    def end_of(self, request: Any) -> None:
        self.running.discard(request)
        if not self.running:
            self._done.set()

    async def enter(self, model: Model) -> ModelProcess:
        """Its process, which is loaded if it is not; the caller ``leave``s it. Raises ApiError: it cannot be loaded, or too many wait."""
        if (process := model.ready) is not None:
            process.enter()
            return process
        if len(model.waiting) >= MAX_WAITING:
            raise ApiError(429, f"{MAX_WAITING} requests wait for {model.spec.name} already; try again later", headers={"retry-after": "5"})
        place: asyncio.Future[ModelProcess] = asyncio.get_running_loop().create_future()
        model.waiting.append(place)
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model))
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave(model, place.result())
            raise
        finally:
            if place in model.waiting:
                model.waiting.remove(place)

    def leave(self, model: Model, process: ModelProcess) -> None:
        process.leave()
        model.used = time.monotonic()

    # -- loading

    async def load(self, model: Model) -> None:
        """Raises ApiError."""
        self.leave(model, await self.enter(model))

    async def _load(self, model: Model) -> None:
        places, model.waits = model.waiting, "waits until another model is loaded"
        process: ModelProcess | None = None
        try:
            async with self._turn:
                if model.process is not None:  # it is leaving
                    await model.process.ended.wait()
                began, model.waits = time.monotonic(), ""
                process, self._spare = self._spare, None
                if process is None or process.ended.is_set():
                    process = await self._started()
                process.take(model.spec)
                waited = await self._make_room(model, process)
                model.process = process
                await process.load()
                model.used = time.monotonic()
                model.loads, model.load_seconds = model.loads + 1, model.used - began - waited
                more = f", after {waited:.1f} s in which others ended" if waited else ""
                self._report(f"loaded {model.spec.name} in {model.load_seconds:.1f} s{more}")
        except Exception as error:
            refusal = api_error(error)
            self._report(refusal.message)
            if process is not None:
                process.signal(signal.SIGKILL)
            model.loading = None
            for place in places[:]:
                if not place.done():
                    place.set_exception(ApiError(refusal.status, refusal.message, headers=refusal.headers))
            return
        model.loading = None
        for place in places[:]:
            if not place.done():
                process.enter()  # now: an idle process could be ended before they run
                place.set_result(process)

    async def _started(self) -> ModelProcess:
        self._number += 1
        process = ModelProcess(Path(self._folder.name) / f"{self._number}.sock", self._seconds, self._gone)
        await process.start()
        return process

    async def _make_room(self, model: Model, process: ModelProcess) -> float:
        """Ends models until this one fits, by its plan; the seconds that they took. Raises ApiError: it never does."""
        waited = 0.0
        while self._most is not None and len(self._loaded()) >= self._most:
            waited += await self._replace(model, f"{self._most} models may be loaded, and all of them are pinned")
        while True:
            others = self._loaded()
            plan = await process.plan(None if self._memory is None else max(0, self._memory - sum(other.need for other in others)))
            if plan["fits"]:
                return waited
            if any(other.ended.is_set() for other in others):  # meanwhile
                continue
            need, free = (f"{plan[name] / (1 << 20):.0f} MiB" for name in ("total", "free"))
            why = f"{model.spec.name} needs {need} with a context of {plan['n_ctx']}, and {free} are free; give it a smaller context, fewer slots or a smaller quantisation"
            waited += await self._replace(model, why)

    def _loaded(self) -> list[ModelProcess]:
        return [model.process for model in self._all.values() if model.process is not None]

    async def _replace(self, model: Model, why: str) -> float:
        """Ends the model that was used least recently, an idle one if there is one, for ``model``; in how many seconds. Raises ApiError, with ``why``: there
        is none."""
        others = [one for one in self._all.values() if one is not model and one.process is not None and not one.spec.pinned]
        if not others:
            raise ApiError(500, why)
        victim = min(others, key=lambda one: (one.process is not None and one.process.running > 0, one.used))
        began, model.waits = time.monotonic(), f"waits until {victim.spec.name} has ended"
        await self._end(victim)
        model.waits = ""
        return time.monotonic() - began

    async def _end(self, model: Model) -> None:
        if (process := model.process) is not None:
            await process.end()
            self._report(f"unloaded {model.spec.name}")

    async def unload(self, model: Model) -> None:
        """When its running requests have ended; it is loaded again by the next one."""
        await self._end(model)

    def _gone(self, process: ModelProcess, status: int) -> None:
        for model in self._all.values():
            if model.process is process:
                model.process = None
        if status and process.about and not self.draining:
            self._report(f"the process of {process.name} {how(status)}; the next request starts it again")

    async def watch(self) -> None:
        """Loads what is pinned; then unloads what is idle for long enough, and starts the process of the next model while nothing computes."""
        for model in self.models():
            if model.spec.pinned:
                try:
                    await self.load(model)
                except ApiError:
                    continue  # it is in the log, and in the answer to each request
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for model in list(self._all.values()):
                process, seconds = model.ready, model.idle_seconds
                idle = process is not None and not process.running and not model.spec.pinned
                if idle and seconds is not None and time.monotonic() - model.used >= seconds:
                    await self._end(model)
            computing = any(model.loading or (model.process is not None and model.process.running) for model in self._all.values())
            if self._spare is None and not computing and any(model.process is None for model in self._all.values()):
                self._spare = await self._started()

    # -- ending

    async def drain(self, seconds: float) -> bool:
        """Each process drains what it runs, and ends; what waits for a model is refused."""
        self.draining = True
        for model in self._all.values():
            for place in model.waiting:
                if not place.done():
                    place.set_exception(ApiError(503, "the server is ending", headers=RETRY))
        for process in self._loaded():
            process.leaving = True
            process.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._done.wait(), seconds + 3)  # the processes have ended what was cut off by then
        except TimeoutError:
            return False
        return True

    def cancel_all(self, reason: str) -> None:
        for process in self._loaded():
            process.signal(signal.SIGKILL)

    async def close(self) -> None:
        processes = [*self._loaded(), *([self._spare] if self._spare is not None else [])]
        for process in processes:
            process.signal(signal.SIGTERM)
        ends = [asyncio.ensure_future(process.ended.wait()) for process in processes]
        if ends:
            await asyncio.wait(ends, timeout=END_SECONDS)
        self.cancel_all("the server ends")
        self._folder.cleanup()
