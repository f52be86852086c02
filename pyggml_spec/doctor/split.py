"""Cost of layers on several devices: copies, waiting devices, and better cuts.

A decode step takes the sum of all devices, so layers belong on the fastest device with room. Prefill chunks are pipelined, so a prompt
takes as long as the slowest device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ..engine.runner import ModelRunner
from ..errors import PyspecError
from ..ggml.device import free_bytes, present
from ..ggml.peer import DISABLE
from ..multi_device.split import EMBEDDING, FIRST, cuts_by
from ..tools.split_steps import HOST_ONLY, CopySpeed, DeviceShare, SplitStep, copy_speeds, split_chunk, split_steps
from .report import NOT_APPLICABLE, OK, RUNNING, WARN, Check

DEAR = 0.1  # share of a step that copies may take
WORTH = 0.1  # least saving of a step or chunk that is reported
ROOM = 0.9  # of free memory: compute buffers grow with the layers

_Check = partial(Check, stage=RUNNING)


@dataclass(frozen=True)
class Layers:
    """One device: number of layers, milliseconds of each, further layers that fit; ``next_layers``: how many layers' worth of memory the
    next device needs if this one is removed."""

    device: str
    count: int
    each_ms: float
    room: int
    next_layers: int = 0


@dataclass(frozen=True)
class Move:
    """Other cuts: layers per device, and milliseconds saved. ``spare``: a device that could be removed."""

    counts: tuple[int, ...]
    saved_ms: float
    spare: str = ""


def layers_of(engine: ModelRunner, step: SplitStep, head: bool = True) -> list[Layers]:
    """Milliseconds of a layer on each device, by its share of the bytes read there; head and drafter count as well, unless ``head`` is
    False."""
    target, drafter, segments = engine.target, engine.drafter, engine.resources.segments
    tensors = target.file.tensors
    sizes = [sum(info.nbytes for name, info in tensors.items() if name.startswith(f"blk.{layer}.")) for layer in range(target.n_layer)]
    extra = tensors["output.weight" if "output.weight" in tensors else EMBEDDING].nbytes if head else 0
    if step.width > 1 and drafter is not None and head:
        extra += sum(member.weights.nbytes for member in drafter.methods)
    states = engine.resources.recurrent.nbytes if engine.resources.recurrent is not None else 0
    whole, out = max(1, max(sizes) + (engine.resources.kv.nbytes + states) // target.n_layer), list[Layers]()
    of_first = sum(info.nbytes for name, info in tensors.items() if name.startswith(FIRST))
    for index, (segment, share) in enumerate(zip(segments, step.devices, strict=True)):
        mine, count = sum(sizes[segment.first : segment.end]), segment.end - segment.first
        read = mine + (extra if index == len(segments) - 1 else 0)
        room = int(ROOM * free_bytes(present(segment.backend.device)) / whole)
        each_ms = share.compute_ms * mine / max(1, read) / count
        out.append(Layers(share.device, count, each_ms, room, -(-of_first // whole) if index == 0 else 0))
    return out


def faster_step(layers: Sequence[Layers], last_cut: int) -> Move | None:
    """Moving one cut to give the faster neighbour as many layers as fit; None if no device is faster."""
    best: Move | None = None
    counts = [device.count for device in layers]
    for left in range(len(layers) - 1):
        slow, fast = (left, left + 1) if layers[left].each_ms > layers[left + 1].each_ms else (left + 1, left)
        n = min(counts[slow] - 1, layers[fast].room)
        if fast < slow:  # a cut may not move past last_cut
            n = min(n, last_cut - sum(counts[: left + 1]))
        if n <= 0:
            continue
        moved = list(counts)
        moved[slow], moved[fast] = counts[slow] - n, counts[fast] + n
        saved = n * (layers[slow].each_ms - layers[fast].each_ms)
        if best is None or saved > best.saved_ms:
            best = Move(tuple(moved), saved, layers[slow].device if _spare(layers, slow) else "")
    return best


def _spare(layers: Sequence[Layers], index: int) -> bool:
    """Whether the other devices have room for this one's layers. Never for the last device, which also holds head and drafter."""
    one, rooms = layers[index], {other.device: other.room for i, other in enumerate(layers) if i != index}
    if index == len(layers) - 1 or one.device in rooms:
        return False
    return layers[index + 1].room >= one.next_layers and sum(rooms.values()) >= one.count + one.next_layers


def level_chunks(layers: Sequence[Layers], last_cut: int) -> Move | None:
    """Cuts that balance prefill chunks; None if they do not fit."""
    if not all(device.each_ms > 0 for device in layers):
        return None
    total = sum(device.count for device in layers)
    cuts = cuts_by([1 / device.each_ms for device in layers], [1] * total, last_cut)
    counts = tuple(b - a for a, b in pairwise([0, *cuts, total]))
    if any(count - device.count > device.room for count, device in zip(counts, layers, strict=True)):
        return None
    before, after = (max(n * device.each_ms for n, device in zip(of, layers, strict=True)) for of in ([d.count for d in layers], counts))
    return Move(counts, before - after) if after < before else None


def _named(share: DeviceShare) -> str:
    return f"{share.device} ({share.layers})"


def _moved(move: Move, takes: float, what: str) -> str:
    split = ",".join(map(str, move.counts))
    out = f"{split} layers (`tensor_split` {split}) would take {what} from {takes:.2f} to about {takes - move.saved_ms:.2f} ms"
    return out + (f"; {move.spare} could be left out, the others have room for what it holds" if move.spare else "")


def cut_cost(step: SplitStep, copies: Sequence[CopySpeed]) -> Check:
    """Share of a step spent on copies at cuts."""
    copying, whole = sum(d.copy_ms for d in step.devices), sum(d.copy_ms + d.compute_ms for d in step.devices)
    n = sum(d.copies for d in step.devices)
    what = f"a block of {step.width} rows" if step.width > 1 else "a plain step"
    found = (
        f"{len(step.devices) - 1} cut{'s' * (len(step.devices) > 2)}: {n} cop{'ies' if n != 1 else 'y'} of {copying:.3f} ms in {whole:.2f} ms of {what} "
        f"({100 * step.cut_share:.1f} %)"
    )
    data = {"width": step.width, "copy_ms": copying, "parts_ms": whole, "step_ms": step.step_ms, "cut_share": step.cut_share}
    check = partial(_Check, "cut cost", data=data)
    if step.cut_share <= DEAR:
        return check(OK, found)
    if any("network" in speed.way for speed in copies):
        remedy = "each copy waits for the network: use fewer workers, nearer ones, or blocks that accept more tokens per step"
    elif any(f"{DISABLE}=0" in speed.way for speed in copies):
        remedy = f"start without {DISABLE}=0, so that GPUs copy to each other directly"
    else:
        remedy = "put the model on fewer devices if one has room for it; smaller types of weights need less"
    return check(WARN, found, remedy)


def waiting(engine: ModelRunner, step: SplitStep) -> Check:
    """Which device waits in a step, and whether another cut is faster."""
    layers = layers_of(engine, step)
    takes = sum(d.copy_ms + d.compute_ms for d in step.devices)
    shares = ", ".join(f"{_named(d)} computes {d.compute_ms:.2f} ms and waits {100 * d.waits:.0f} %" for d in step.devices)
    each = ", ".join(f"{device.each_ms:.3f} ms on {device.device}" for device in layers)
    what = f"blocks of {step.width} rows" if step.width > 1 else "plain steps"
    move = faster_step(layers, engine.target.last_cut())
    data = {"width": step.width, "waits": [d.waits for d in step.devices], "layer_ms": [device.each_ms for device in layers]}
    found = f"{what}: {shares}; a layer takes {each}"
    if move is None or move.saved_ms < WORTH * takes:
        return _Check("waiting devices", OK, f"{found}, so no other cut would save {100 * WORTH:.0f} %", data=data)
    remedy = _moved(move, takes, "that step")
    return _Check("waiting devices", WARN, found, remedy, data=data | {"better_split": list(move.counts)})


def prompts(engine: ModelRunner, step: SplitStep | None) -> Check:
    """Which device limits prefill."""
    check = partial(_Check, "prompts on devices")
    if step is None:
        return check(NOT_APPLICABLE, "the context holds no chunk that could be measured")
    layers = layers_of(engine, step, head=False)
    slowest = max(step.devices, key=lambda d: d.compute_ms)
    times = ", ".join(f"{d.compute_ms:.1f} ms on {_named(d)}" for d in step.devices)
    found = f"a chunk of {step.width} rows computes {times}: chunks are pipelined, so each takes as long as {_named(slowest)}"
    data = {"rows": step.width, "compute_ms": [d.compute_ms for d in step.devices]}
    move = level_chunks(layers, engine.target.last_cut())
    if move is None or move.saved_ms < WORTH * slowest.compute_ms:
        return check(OK, found, data=data)
    return check(WARN, found, _moved(move, slowest.compute_ms, "a chunk"), data=data | {"level_split": list(move.counts)})


def device_copies(copies: Sequence[CopySpeed]) -> Check:
    """Latency, bandwidth and path of copies between neighbours."""
    said = []
    for one in copies:
        speed = f"{one.bandwidth / 1e9:.1f} GB/s" if one.bandwidth else "no memory to measure large ones"
        said.append(f"{one.source} to {one.target} {one.small_us:.0f} us and {speed}, {one.way}")
    check = partial(_Check, "device copies", found="; ".join(said), data={"copies": [one.as_dict() for one in copies]})
    if any(f"{DISABLE}=0" in one.way for one in copies):
        return check(WARN, remedy=f"start without {DISABLE}=0")
    if any(HOST_ONLY in one.way for one in copies):
        links = (
            "put neighbouring layers on GPUs that the machine links, or the model on fewer devices: `nvidia-smi topo -m` shows the links"
        )
        return check(WARN, remedy=links)
    return check(OK)


def examine(engine: ModelRunner) -> Iterator[Check]:
    """All checks of an engine on several devices; none otherwise. Discards the sequence."""
    if len(engine.resources.segments) < 2:
        return
    try:
        block = engine.options.width if engine.drafter is None else min(engine.options.width, engine.drafter.methods[0].block_size)
        copies = copy_speeds(engine)
        steps = split_steps(engine, tuple(sorted({1, block})), copies=copies)
        chunk = split_chunk(engine, copies)
    except PyspecError as error:
        yield _Check("cut cost", NOT_APPLICABLE, f"the step cannot be measured by part: {error}")
        return
    if not steps:
        yield _Check("cut cost", NOT_APPLICABLE, "the context has no room for the measured steps; raise `n_ctx`")
    else:
        yield cut_cost(steps[-1], copies)
        yield waiting(engine, steps[0])
    yield prompts(engine, chunk)
    yield device_copies(copies)
