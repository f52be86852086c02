"""How much memory a pair will take, before any of it is allocated.

The steps of loading run on backends that count: weights, caches and graphs are made as loading makes them, and buffers get sizes instead of memory. Only
the step buffer and the rows of experts in host memory exist for a moment.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..api import load
from ..cache.kv import MOST_CONTEXT
from ..engine.memory import SHARED, longest
from ..engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from ..errors import PyspecError
from ..ggml.device import devices, free_bytes, pick_device, pick_devices
from ..gguf_io import GGUFFile
from ..load_options import AUTO, LoadOptions
from ..loading import Drafts, Loader, files_to_load, owned_by, token_bytes
from ..vision.encoder import check_encoder, companion


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
        prefix_memory: what copies of shared prompt prefixes may take, as requested.
        encoder: weights of the encoder of images; its own buffers are not counted.
        weights_by_type: the target's and the drafter's tensors together, by type.
        compute_by_role: compute buffers by kind of step; 0 for one whose graphs fit the buffer of another.
        host_bytes: pages of the file that experts in host memory are read from, while they are used.
        kv_per_token: K/V of one token of context, drafter included.
        free: what the device had free, before anything was loaded.
        largest_context: the longest context up to the trained one that fits and that the devices can compute, a multiple of 256 or the trained
            one; 0 if none does, or if it was not looked for.
        split: the devices that share the layers; empty for one. A device that is named twice is one that has to have room for both.
        copied: bytes of the weights in ``memory`` that are copies of experts or layers in host memory, for prompts (``offload_prompts``): two places
            on the device, and of layers what they are copied from, which the host has in addition to its own.
        draft_kv_type: types of the drafter's K and V rows.
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
    encoder: int = 0
    draft_kv_type: str = ""

    @property
    def total(self) -> int:
        """Bytes on the device, all purposes together."""
        return sum(self.memory.values()) + sum(self.slots_memory.values()) + self.prefix_memory + self.encoder

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
    draft: Drafts = None,
    options: LoadOptions | None = None,
    *,
    slots: int = 1,
    free: int | None = None,
    largest: bool = True,
    **fields: Any,
) -> Plan:
    """What ``load`` with the same arguments takes on its devices; without a target, for the embedded pair.

    Args:
        options, fields: as of ``load``. ``prefix_memory`` counts as if it were full, None as 0. With ``offload_prompts`` "auto", copies are counted; what
            does not fit with them is planned without, as it is loaded.
        slots: more than 1: ``Session.concurrent`` with so many slots is planned too.
        free: bytes to take as free, instead of what the devices report.
        largest: whether the longest context is looked for, which takes most of the time.

    Raises:
        PyspecError: the pair cannot be loaded there at all, for the reason that ``load`` would give.
    """
    options = LoadOptions.of(options, fields)
    files, prefix_memory = files_to_load(target, draft, options.methods), options.prefix_memory or 0
    with ExitStack() as stack:
        named = companion(files[0]) if options.mmproj == AUTO else options.mmproj
        loader = Loader(*files, replace(options, mmproj=None), owned_by(stack))
        loader.open()
        encoder = 0
        if named is not None:
            with GGUFFile(named) as file:
                check_encoder(file)
                encoder = file.nbytes
            loader.engine_options = replace(loader.engine_options, pictures=True)
        reserved = prefix_memory + encoder
        loader.choose_context(slots, free, reserved)
        n_ctx = loader.engine_options.n_ctx
        stack.enter_context(loader.counted(n_ctx))
        parts = _parts(loader, n_ctx, slots, reserved, free)
        weights = loader.target.weights
        if weights.streams and not _fit(parts):  # nor are they taken at load
            loader.close_copies()
            parts = _parts(loader, n_ctx, slots, reserved, free)
        if loader.engine_options.slots_chunk and not _fit(parts):
            loader.narrow_chunks()
            parts = _parts(loader, n_ctx, slots, reserved, free)
        one, of_slots = loader.count(n_ctx), loader.count(n_ctx, slots).caches() if slots != 1 else {}
        by_type = Counter[str]()
        for mine in (weights, *(member.weights for member in loader.drafters)):
            by_type.update(mine.bytes_by_type)
        trained, rooms, most = loader.target.context_length, [part.free for part in parts], 0
        if largest:
            most = longest(lambda n: loader.by_device(loader.totals(n, slots, reserved)), rooms, min(trained, MOST_CONTEXT))
        loader.check_tokenizer()
        copied = sum(stream.nbytes for stream in weights.streams) + (weights.offloaded.buffer_bytes if weights.offloaded is not None else 0)
        return Plan(
            device=",".join(part.device for part in parts),
            n_ctx=n_ctx,
            trained_context=trained,
            memory=one.by_purpose,
            slots=slots,
            slots_memory=of_slots,
            prefix_memory=prefix_memory,
            weights_by_type=dict(by_type),
            compute_by_role=one.compute,
            host_bytes=weights.host_bytes,
            kv_per_token=token_bytes(loader.target, loader.drafter, loader.engine_options),
            free=sum({part.device: part.free for part in parts}.values()),
            largest_context=most,
            split=parts if len(parts) > 1 else (),
            copied=copied,
            encoder=encoder,
            draft_kv_type=str(loader.engine_options.draft_kv) if loader.drafter is not None else "",
        )


def _parts(loader: Loader, n_ctx: int, slots: int, reserved: int, free: int | None) -> tuple[PlanPart, ...]:
    layers = [str(segment) for segment in loader.target.weights.segments] or [""]
    rooms = [free_bytes(backend.device) if free is None else free for backend in loader.backends]
    names = [backend.device.name for backend in loader.backends]
    return tuple(map(PlanPart, names, layers, loader.totals(n_ctx, slots, reserved), rooms))


def plan_everywhere(
    target: str | Path | None = None, draft: Drafts = None, options: LoadOptions | None = None, **more: Any
) -> list[Plan | NoPlan]:
    """``plan`` for every device of this machine; a device that cannot run the pair is a NoPlan.

    Raises:
        PyspecError: no device can, for the reason that the last one gives (a file that is wrong is wrong everywhere).
    """
    out: list[Plan | NoPlan] = []
    for device in devices():
        try:
            out.append(plan(target, draft, options, device=device.name, **more))
        except PyspecError as error:
            out.append(NoPlan(device.name, str(error)))
            last = error
    if not any(isinstance(one, Plan) for one in out):
        raise last
    return out


@dataclass(frozen=True)
class Checked:
    """A plan and what was allocated for it.

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
        """Bytes that the plan has for it: there are no copies of prompts, and an encoder does not say what it takes."""
        return self.plan.total - self.plan.prefix_memory - self.plan.encoder

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
        allocated = {name: getattr(self, name) for name in ("memory", "slots_memory", "total", "taken", "error")}
        return {**self.plan.as_dict(), "allocated": allocated}


def check(target: str | Path | None = None, draft: Drafts = None, options: LoadOptions | None = None, *, slots: int = 1,
          free: int | None = None, **fields: Any) -> Checked:  # fmt: skip
    """Plans, then loads, generates a little in every mode, and looks at what is allocated. Arguments as of ``plan``.

    Raises:
        PyspecError: it does not fit, or cannot be loaded.
    """
    options = LoadOptions.of(options, fields)
    options = replace(options, device=options.device or pick_device().name)
    picked = list(dict.fromkeys(pick_devices(options.device)))
    before = [free_bytes(one) for one in picked]
    planned = plan(target, draft, options, slots=slots, free=free)
    if not planned.fits:
        said = f"{planned.total} bytes are planned and {planned.free} are free on {planned.device}"
        raise PyspecError(f"{said}, so nothing was loaded; the longest context that fits is {planned.largest_context} (`n_ctx`)")
    of_slots = {}
    with ExitStack() as stack:
        # one thread where it only has to be right: several wait for each other
        on_cpu = any(one.kind == "cpu" for one in picked)
        threads = options.threads or (1 if on_cpu else None)
        session = stack.enter_context(load(target, draft, options, threads=threads, prefix_memory=0))
        room = planned.n_ctx - 1
        prompt = [i % session.target.n_vocab for i in range(max(1, min(700, room // 2)))]
        for mode in ("speculative", "plain") if session.drafter is not None else ("plain",):
            session.generate(prompt, min(32, room // 4), mode=mode, ignore_end=True)
        if slots != 1:
            scheduler = stack.enter_context(session.batch(slots))
            for i in range(slots):
                scheduler.submit(prompt[: 40 + i], GenerationOptions(min(16, room // 4), PLAIN if session.drafter is None else SPECULATIVE))
            scheduler.run()
            of_slots = {name: n for name, n in scheduler.runner.memory().items() if name not in SHARED}
        taken = sum(before) - sum(free_bytes(pick_device(one.name)) for one in picked) if not on_cpu else None
        return Checked(planned, session.runner.memory(), of_slots, taken)
