"""How much memory a pair will take, before any of it is allocated.

The engine's own code plans: weights, caches and graphs are made as it makes them, except that weights, K/V and compute buffers get sizes
instead of memory. So the numbers are those of a session that is loaded afterwards, whatever the models and the backend. Only the step buffer
and the rows of experts in host memory exist for a moment.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..api import DEMO_TARGET, MOST_BYTES, Session, check_offload, demo_drafters, draft_files, load
from ..cache.kv_types import MOST_CONTEXT, KVTypes
from ..checks import either, numbers, path, whole
from ..engine.options import EngineOptions
from ..engine.planned import PlannedEngine, PlannedGraphs, largest, plan_weights
from ..engine.request import PLAIN, SPECULATIVE, LoopOptions
from ..engine.resources import P
from ..errors import ContextError, PyspecError
from ..ggml.device import devices, free_bytes, pick_device
from ..ggml.devices import pick_devices
from ..gguf_io import GGUFFile
from ..models.placement import ExpertOptions
from ..models.registry import open_target
from ..speculation.methods import Methods, methods


@dataclass(frozen=True)
class PlanPart:
    """What one device of several takes: ``layers`` in words, ``total`` of its bytes, and what it had ``free`` of those."""

    device: str
    layers: str
    total: int
    free: int

    @property
    def fits(self) -> bool:
        return self.total <= self.free


@dataclass(frozen=True)
class Plan:
    """What a pair takes on one device, in bytes.

    Attributes:
        memory: by purpose, as ``ModelRunner.memory`` reports it after loading.
        slots, slots_memory: sequences at once, 1 for none but the session's own; what ``Session.concurrent`` takes for them on top, by
            purpose, each with ``n_ctx`` tokens of context.
        prefix_memory: what copies of prompts that begin alike may take, as it was asked for.
        weights_by_type: the target's and the drafter's tensors together, by type.
        compute_by_role: compute buffers by kind of step.
        host_bytes: pages of the file that experts in host memory are read from, while they are used.
        kv_per_token: K/V of one token of context, drafter included.
        free: what the device had free, before anything was loaded.
        largest_context: the longest context up to the trained one that fits and that the devices can compute, a multiple of 256 or the trained
            one; 0 if none does.
        split: the devices that share the layers; empty for one. A device that is named twice is one that has to have room for both.
        copied: bytes of the weights in ``memory`` that are copies of experts or layers in host memory, for prompts (``offload_prompts``): two places
            on the device, and of layers what they are copied from, which the host has beside its own.
    """

    device: str
    n_ctx: int
    trained_context: int
    memory: dict[str, int]
    slots: int
    slots_memory: dict[str, int]
    prefix_memory: int
    weights_by_type: dict[str, int]
    compute_by_role: dict[str, int]
    host_bytes: int
    kv_per_token: int
    free: int
    largest_context: int
    split: tuple[PlanPart, ...] = ()
    copied: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device, all purposes together."""
        return sum(self.memory.values()) + sum(self.slots_memory.values()) + self.prefix_memory

    @property
    def per_slot(self) -> int:
        """Bytes of one slot's rows and states; compute buffers grow with the slots too, by less."""
        return sum(self.slots_memory.get(name, 0) for name in ("kv", "draft_kv", "recurrent")) // self.slots

    @property
    def fits(self) -> bool:
        """Whether that is no more than what is free."""
        return self.total <= self.free and _fit(self.split)

    def as_dict(self) -> dict:
        return {**asdict(self), "total": self.total, "fits": self.fits, "per_slot": self.per_slot}


def _fit(parts: Sequence[PlanPart]) -> bool:
    """Whether every device has room for all that it has to hold."""
    return all(sum(other.total for other in parts if other.device == part.device) <= part.free for part in parts)


@dataclass(frozen=True)
class NoPlan:
    """A device that cannot run the pair at all. ``reason``: one sentence."""

    device: str
    reason: str

    def as_dict(self) -> dict:
        return asdict(self)


def plan(
    target: str | Path | None = None,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    n_ctx: int | None = None,
    draft_width: int | None = None,
    chunk: int = 512,
    slots: int = 1,
    prefix_memory: int = 0,
    free: int | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    draft_cache_type_k: str = "f16",
    draft_cache_type_v: str = "f16",
    experts: ExpertOptions | None = None,
    kernels: str | None = None,
    spec: Sequence[str] | None = None,
    no_spec: Sequence[str] = (),
    draft_vocab: int | None = None,
    tensor_split: Sequence[float] | None = None,
    offload_prompts: int | str | None = None,
) -> Plan:
    """What ``session.load`` with the same arguments will take on one device; without a target, for the embedded pair.

    Args:
        device, tensor_split: as of ``load``; None takes the first GPU, or the CPU.
        offload_prompts: as of ``load``; with "auto", what is taken where copies pay. What does not fit with them is planned without, as it is loaded.
        threads: no number of them changes what is allocated.
        slots: more than 1: ``Session.concurrent`` with so many slots is planned too.
        prefix_memory: counted as if it were full.
        free: bytes to take as free, instead of what the device reports.

    Raises:
        PyspecError: the pair cannot be loaded there at all, for the reason that ``load`` would give.
    """
    if target is None:
        if draft is not None:
            raise PyspecError(f"the drafter {draft} needs its target: name it with `target`")
        target, draft = DEMO_TARGET, demo_drafters(methods(spec, no_spec, draft_vocab))
    either(experts, ExpertOptions, "`experts`")
    tensor_split = None if tensor_split is None else numbers(tensor_split, "the proportions (`tensor_split`)")
    prefix_memory = whole(prefix_memory, "the memory for the prefix cache", 0, MOST_BYTES, PyspecError)
    kv, draft_kv = KVTypes(cache_type_k, cache_type_v), KVTypes(draft_cache_type_k, draft_cache_type_v)
    options = {"chunk": chunk, "kv": kv, "draft_kv": draft_kv}
    return _plan_on(
        device,
        tensor_split,
        path(target, "`target`"),
        draft_files(draft),
        threads,
        kernels,
        n_ctx,
        draft_width,
        options,
        slots,
        prefix_memory,
        free,
        experts,
        methods(spec, no_spec, draft_vocab),
        check_offload(offload_prompts, chunk),
    )


def plan_everywhere(target=None, draft=None, **options) -> list[Plan | NoPlan]:
    """``plan`` for every device of this machine; a device that cannot run the pair is a NoPlan.

    Raises:
        PyspecError: no device can, for the reason that the last one gives (a file that is wrong is wrong everywhere).
    """
    out: list[Plan | NoPlan] = []
    for device in devices():
        try:
            out.append(plan(target, draft, device=device.name, **options))
        except PyspecError as error:
            out.append(NoPlan(device.name, str(error)))
            last = error
    if not any(isinstance(one, Plan) for one in out):
        raise last
    return out


@dataclass(frozen=True)
class Checked:
    """A plan beside what was allocated for it.

    Attributes:
        memory, slots_memory: bytes by purpose after generating, as in the plan.
        taken: bytes that the device itself had less free than before; None on the CPU, where other programs move that number.
    """

    plan: Plan
    memory: dict[str, int]
    slots_memory: dict[str, int]
    taken: int | None

    @property
    def planned(self) -> int:
        """Bytes that the plan has for it: there are no copies of prompts."""
        return self.plan.total - self.plan.prefix_memory

    @property
    def total(self) -> int:
        """Bytes that were allocated, all purposes together."""
        return sum(self.memory.values()) + sum(self.slots_memory.values())

    @property
    def error(self) -> float:
        """How far the plan is off, relative to what was allocated."""
        return abs(self.planned - self.total) / self.total

    def as_dict(self) -> dict:
        """The plan, JSON-ready, with what was allocated."""
        allocated = {
            "memory": self.memory,
            "slots_memory": self.slots_memory,
            "total": self.total,
            "taken": self.taken,
            "error": self.error,
        }
        return {**self.plan.as_dict(), "allocated": allocated}


def check(
    target: str | Path | None = None,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    slots: int = 1,
    prefix_memory: int = 0,
    free: int | None = None,
    **options,
) -> Checked:
    """Plans, then loads, generates a little in every mode, and looks at what is allocated. Arguments as of ``plan``.

    Raises:
        PyspecError: it does not fit, or cannot be loaded.
    """
    names = device if device is not None else pick_device().name
    picked = list(dict.fromkeys(pick_devices(names)))
    before = [free_bytes(one) for one in picked]
    planned = plan(target, draft, device=names, slots=slots, prefix_memory=prefix_memory, free=free, **options)
    if not planned.fits:
        raise PyspecError(
            f"{planned.total} bytes are planned and {planned.free} are free on {planned.device}, so nothing was loaded; "
            f"the longest context that fits is {planned.largest_context} (`n_ctx`)"
        )
    of_slots = {}
    with ExitStack() as stack:
        # one thread where it only has to be right: several wait for each other
        on_cpu = any(one.kind == "cpu" for one in picked)
        threads = threads or (1 if on_cpu else None)
        session = stack.enter_context(load(target, draft, device=names, threads=threads, prefix_memory=0, **options))
        room = planned.n_ctx - 1
        prompt = [i % session.target.n_vocab for i in range(max(1, min(700, room // 2)))]
        for mode in ("speculative", "plain") if session.drafter is not None else ("plain",):
            session.generate(prompt, min(32, room // 4), mode=mode, ignore_end=True)
        if slots != 1:
            scheduler = stack.enter_context(session.batch(slots))
            for i in range(slots):
                scheduler.submit(prompt[: 40 + i], LoopOptions(min(16, room // 4), PLAIN if session.drafter is None else SPECULATIVE))
            scheduler.run()
            of_slots = {name: n for name, n in scheduler.engine.memory().items() if name not in ("weights", "draft_weights")}
        taken = sum(before) - sum(free_bytes(pick_device(one.name)) for one in picked) if not on_cpu else None
        return Checked(planned, session.engine.memory(), of_slots, taken)


def _plan_on(
    names: str | None,
    shares: Sequence[float] | None,
    target_path: Path,
    drafts: Sequence[Path],
    threads: int | None,
    kernels: str | None,
    n_ctx: int | None,
    draft_width: int | None,
    asked: dict[str, Any],
    slots: int,
    prefix_memory: int,
    free: int | None,
    experts: ExpertOptions | None,
    spec: Methods,
    offload: int | str | None,
) -> Plan:
    with ExitStack() as stack:

        def own(part: P) -> P:
            stack.callback(part.close)
            return part

        session = own(Session())  # only for what it makes of the arguments
        file = own(GGUFFile(target_path))
        target = session.target = open_target(file)
        drafter = session.drafter = session._open_drafters(file, drafts, spec)
        chosen = n_ctx is None
        n_ctx = session._context(n_ctx)
        backends = session._open(names, threads, kernels)
        implied = session._implied(spec, draft_width)
        lookup = spec.lookup or implied
        width = session._width(draft_width, lookup is not None)
        backend, found = backends[-1], [b.device for b in backends]
        options = EngineOptions(n_ctx=n_ctx, width=width, given=lookup is not None, implied=implied is not None, **asked)
        placed = session._place_experts(experts, threads, max(options.chunk, width), offload is not None)
        if chosen:
            n_ctx = session._own_context(replace(options, slots=slots), shares, placed, offload, free, prefix_memory)
            options = replace(options, n_ctx=n_ctx)
        segments = session._split(backends, shares, options)
        plan_weights(target, drafter, backend, segments, placed, own)
        members = drafter.methods if drafter is not None else ()
        session._open_streams(offload)

        @cache  # of the same context it is asked up to three times; building the graphs is what a plan takes
        def memory_of(context: int, slots: int) -> tuple[dict[str, int], dict[str, int], list[int]]:
            """By purpose, by role, and on each device: of several slots without the weights."""
            engine = PlannedEngine(backend, target, drafter, replace(options, n_ctx=context, slots=slots))
            try:
                assert isinstance(engine.graphs, PlannedGraphs)
                apart = ("weights", "draft_weights") if slots != 1 else ()
                by_part = [sum(n for name, n in part.items() if name not in apart) for part in engine.memory_by_segment()]
                return engine.memory(), dict(engine.graphs.bytes_by_role), by_part
            finally:
                engine.close()

        def of_slots(context: int) -> dict[str, int]:
            memory = memory_of(context, slots)[0] if slots != 1 else {}
            return {name: nbytes for name, nbytes in memory.items() if name not in ("weights", "draft_weights")}  # which are shared

        def on_devices(context: int) -> tuple[PlanPart, ...]:
            one = memory_of(context, 1)[2]
            more = [*memory_of(context, slots)[2]] if slots != 1 else [0] * len(one)
            more[-1] += prefix_memory
            totals = [a + b for a, b in zip(one, more, strict=True)]
            rooms = [free_bytes(d) if free is None else free for d in found]
            layers = [str(segment) for segment in segments] or [""]
            return tuple(PlanPart(d.name, what, n, room) for d, what, n, room in zip(found, layers, totals, rooms, strict=True))

        def fits(context: int) -> bool:
            try:
                return _fit(on_devices(context))
            except ContextError:  # a device cannot count the values of its masks; nobody asked for this context
                return False

        parts = on_devices(n_ctx)
        if target.weights.streams and not _fit(parts):  # nor are they taken at load
            target.weights.close_streams()
            memory_of.cache_clear()
            parts = on_devices(n_ctx)
        (memory, roles, _), slots_memory = memory_of(n_ctx, 1), of_slots(n_ctx)
        by_type: dict[str, int] = {}
        for weights in (target.weights, *(member.weights for member in members)):
            for name, nbytes in weights.bytes_by_type.items():
                by_type[name] = by_type.get(name, 0) + nbytes
        trained = target.context_length
        longest = largest(fits, min(trained, MOST_CONTEXT))
        room = sum({part.device: part.free for part in parts}.values())
        draft_shapes = drafter.kv_shapes() if drafter is not None else ()
        per_token = sum(map(options.kv.row_bytes, target.kv_shapes())) + sum(map(options.draft_kv.row_bytes, draft_shapes))
        host_bytes = target.weights.host_bytes
        guests = target.weights.guests
        copied = sum(stream.nbytes for stream in target.weights.streams) + (guests.buffer_bytes if guests is not None else 0)
        return Plan(
            ",".join(d.name for d in found), n_ctx, trained, memory, slots, slots_memory, prefix_memory, by_type, roles, host_bytes, per_token,
            room, longest, parts if segments else (), copied
        )  # fmt: skip
