"""A target whose layers are split over several devices: which layers each one has, and the weights of all of them.

The first device has the embedding, the last one the last norm, the head and the drafter. What every layer may read (factors of rotations) is on
each of them; an embedding that the drafter borrows is on the last one too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from ..drafters.dflash import DFlash
from ..drafters.eagle3 import Eagle3
from ..drafters.mtp import MTP
from ..drafters.multi import AnyDrafter
from ..engine.devices import Segment
from ..errors import EngineError, PairError
from ..ggml.device import Backend
from ..ggml.host_experts import ExpertCounts
from ..ggml.library import Tensor
from ..ggml.weight_stream import WeightStream
from ..models.decoder import Decoder
from ..models.placement import Placement
from ..models.weights import Spec, Weights
from .devices import MultiDevice
from .offload import OffloadedWeights

EMBEDDING = "token_embd.weight"
FIRST = (EMBEDDING, "per_layer_")  # what names begin with that only the first device needs
LAST = ("output_norm.", "output.")


def segments_of(target: Decoder, backends: Sequence[Backend], cuts: Sequence[int]) -> tuple[Segment, ...]:
    """The segments of a target: the i-th of ``cuts`` is the first layer on ``backends[i + 1]``.

    Raises:
        EngineError: cuts that are not ascending, or where a later layer reads what an earlier one wrote.
    """
    bounds = [0, *cuts, target.n_layer]
    if len(bounds) != len(backends) + 1 or any(a >= b for a, b in pairwise(bounds)):
        raise EngineError(
            f"{target.n_layer} layers cannot be cut before the layers {', '.join(map(str, cuts))} for {len(backends)} devices: "
            "each device needs one layer at least"
        )
    if cuts and cuts[-1] > target.last_cut():
        raise EngineError(
            f"{target.file.path.name} cannot be cut before layer {cuts[-1]}: later layers read rows that layers from {target.last_cut()} on wrote"
        )
    return tuple(Segment(backend, a, b) for backend, (a, b) in zip(backends, pairwise(bounds), strict=True))


def cuts_by(shares: Sequence[float], sizes: Sequence[int], last: int) -> list[int]:
    """Where layers of these ``sizes`` are cut so that each device's share of their sum is nearest to ``shares``; no cut is after ``last``, and
    each device gets a layer. Without a share above 0 all are alike."""
    shares = shares if any(shares) else [1.0] * len(shares)
    whole, total, cuts = sum(shares), sum(sizes), list[int]()
    sums = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    for index in range(1, len(shares)):
        wanted = total * sum(shares[:index]) / whole
        low, high = (cuts[-1] if cuts else 0) + 1, min(last, len(sizes) - 1) - (len(shares) - 1 - index)
        cuts.append(min(range(low, max(low, high) + 1), key=lambda cut: abs(sums[cut] - wanted)))
    return cuts


def split(
    target: Decoder, backends: Sequence[Backend], shares: Sequence[float] | None, free: Sequence[int], at_last: int, per_layer: int
) -> tuple[Segment, ...]:
    """The segments of a target on several devices.

    Args:
        shares: how many of the layers each device gets, in proportion; None: as many as its free memory has a share in that of all, and the
            CPU those that GPUs have no room for.
        free: bytes that each device has for them.
        at_last: bytes on the last device besides layers: the head and the drafter.
        per_layer: bytes of one layer's K/V rows and states.

    Raises:
        EngineError: fewer layers than devices, or shares that are no numbers above 0, one for each device.
    """
    if shares is not None and (len(shares) != len(backends) or not all(0 < share < float("inf") for share in shares)):
        raise EngineError(
            f"the proportions {','.join(f'{share:g}' for share in shares)} do not fit {len(backends)} devices: give a number above 0 for each"
        )
    if target.last_cut() + 1 < len(backends):
        raise EngineError(
            f"{target.file.path.name} can be cut into {target.last_cut() + 1} parts at most, and {len(backends)} devices are named"
        )
    if shares is not None:
        return segments_of(target, backends, cuts_by(shares, [1] * target.n_layer, target.last_cut()))
    tensors, sizes = target.file.tensors.values(), []
    for layer in range(target.n_layer):
        sizes.append(per_layer + sum(info.nbytes for info in tensors if info.name.startswith(f"blk.{layer}.")))
    sizes[-1] += at_last
    return segments_of(
        target, backends, cuts_by(_shares([b.device.kind == "cpu" for b in backends], free, sum(sizes)), sizes, target.last_cut())
    )


def _shares(on_cpu: Sequence[bool], free: Sequence[int], need: int) -> list[float]:
    """What each device gets: GPUs before CPUs, each by its free memory."""
    room = [0.9 * nbytes for nbytes in free]  # compute buffers need some too
    of_gpus = sum(nbytes for nbytes, cpu in zip(room, on_cpu, strict=True) if not cpu)
    if not any(on_cpu) or not of_gpus:
        return room
    rest = max(need - of_gpus, 0.0) / sum(on_cpu)
    return [rest if cpu else min(1.0, need / of_gpus) * nbytes for nbytes, cpu in zip(room, on_cpu, strict=True)]


def check_drafter(drafter: AnyDrafter | None) -> None:
    """Raises PairError for a drafter that reads what may be on another device."""
    for member in drafter.methods if drafter is not None else ():
        if not isinstance(member, (DFlash, Eagle3, MTP)):
            raise PairError(f"{member.title} drafts as {member.method}, which needs its target on one device: name one with `device`")


def specs_on(specs: Sequence[Spec], segments: Sequence[Segment], index: int, borrowed: bool) -> list[Spec]:
    """Those of a target's tensors that the device of the segment ``index`` needs."""
    segment, first, last = segments[index], index == 0, index == len(segments) - 1

    def here(spec: Spec) -> bool:
        name = spec.name
        if name.startswith("blk.") or spec.layer >= 0:
            return segment.first <= (spec.layer if spec.layer >= 0 else int(name.split(".")[1])) < segment.end
        if name == EMBEDDING and borrowed and last:
            return True
        return first if name.startswith(FIRST) else last if name.startswith(LAST) else True

    return [spec for spec in specs if here(spec)]


def _within(target: Decoder, specs: Sequence[Spec]) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, ...]]]:
    """The target's groups of these tensors, and which of them fuse alike."""
    names = {spec.name for spec in specs}
    groups = {name: members for name, members in target.groups().items() if set(members) <= names}
    return groups, [tuple(name for name in family if name in groups) for family in target.fused_alike()]


def _file_bytes(target: Decoder, specs: Sequence[Spec]) -> int:
    tensors = target.file.tensors
    return sum(tensors[name].nbytes for name in {spec.source or spec.name for spec in specs} if name in tensors)


def _over_parts(name: str, combine: Callable[[Iterable], Any] = sum) -> property:
    return property(lambda weights: combine(getattr(part, name) for part in weights.parts))


class SplitWeights:
    """The ``Weights`` of each segment as one: names are those of the segment that a graph is being built for. Owns them.

    Attributes:
        segments: of the layers.
        parts: each one's weights.
        offloaded: those of the first segment's layers, while the second one's device computes chunks of prompts with copies of them.
    """

    def __init__(
        self,
        target: Decoder,
        segments: Sequence[Segment],
        drafter: AnyDrafter | None,
        placement: Placement | None,
        host: Backend | None,
        progress: Callable[[int, int], None],
        borrowed: bool = False,
    ) -> None:
        """``borrowed``: the last device has the embedding too, for drafters that come later."""
        check_drafter(drafter)
        self.segments, self.placement, self.file, self._target = tuple(segments), placement, target.file, target
        self.parts: list[Weights] = []
        self._here: Any = None  # weights of the segment that is being built
        self.offloaded: OffloadedWeights | None = None
        specs, methods = target.specs(), drafter.methods if drafter is not None else ()
        borrowed = borrowed or any(all(spec.name != EMBEDDING for spec in method.specs()) for method in methods)
        needed = [specs_on(specs, segments, index, borrowed) for index in range(len(segments))]
        total, done = sum(_file_bytes(target, mine) for mine in needed), 0
        try:
            for segment, mine in zip(segments, needed, strict=True):
                hot = None if placement is None else placement.within(segment.first, segment.end)
                report = partial(lambda before, done, of: progress(min(before + done, total), total), done)
                self.parts.append(Weights(segment.backend, target.file, mine, *_within(target, mine), report, hot, host))
                done += _file_bytes(target, mine)
        except BaseException:
            self.close()
            raise
        self._here = self.parts[-1]

    def devices(self, drafter: AnyDrafter | None) -> MultiDevice:
        """What a runner needs for steps over these devices."""
        check_drafter(drafter)
        return MultiDevice(self.segments, self)

    def enter(self, segment: int) -> None:
        """Nodes from now on are of this segment."""
        self._here = self.parts[segment]

    def visit(self) -> None:
        """Nodes from now on are of streamed layers, in the second segment."""
        assert self.offloaded is not None
        self._here = self.offloaded

    def stream_layers(self, rows: int, progress: Callable[[int, int], None] | None = None) -> WeightStream:
        """Chunks of ``rows`` rows and more compute on the second device with copies of the first one's layers from now on, if it has memory for them:
        see the stream's ``fits``.

        Raises:
            DeviceError: the host has none.
        """
        end = self.segments[0].end
        specs = [spec for spec in self._target.specs() if spec.name.startswith("blk.") and int(spec.name.split(".")[1]) < end]
        within = _within(self._target, specs)
        self.offloaded = OffloadedWeights(self.parts[1], self.parts[0], specs, *within, progress)
        stream = self.parts[1].open_stream(rows, self.offloaded.layers)
        assert stream is not None
        if stream.fits:
            self.offloaded.lend(stream)
        return stream

    # -- of the segment that is being built

    def __getitem__(self, name: str) -> Tensor:
        return self._here[name]

    def __contains__(self, name: str) -> bool:
        return name in self._here

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here, name)

    # -- of all

    hosts_experts, pinned = (_over_parts(name, any) for name in ("hosts_experts", "pinned"))
    host_bytes, repacked_bytes, native_bytes, other_matrix_bytes, buffer_bytes = map(
        _over_parts, ("host_bytes", "repacked_bytes", "native_bytes", "other_matrix_bytes", "buffer_bytes")
    )

    @property
    def streams(self) -> list[WeightStream]:
        return [stream for part in self.parts for stream in part.streams]

    @property
    def streaming(self) -> bool:
        return self.parts[0].streaming

    @streaming.setter
    def streaming(self, on: bool) -> None:
        for part in self.parts:
            part.streaming = on

    def close_streams(self) -> None:
        for part in self.parts:
            part.close_streams()
        if self.offloaded is not None:
            self.offloaded.close()
            self.offloaded = None

    def expert_counts(self) -> ExpertCounts | None:
        counts = [count for part in self.parts if (count := part.expert_counts()) is not None]
        return ExpertCounts(*(sum(numbers) for numbers in zip(*((c.chosen, c.hits, c.host_us) for c in counts)))) if counts else None

    def experts_chosen(self) -> dict[int, Any]:
        return {layer: row for part in self.parts for layer, row in part.experts_chosen().items()}

    @property
    def bytes_by_type(self) -> dict[str, int]:
        return dict(sum((Counter(part.bytes_by_type) for part in self.parts), Counter[str]()))

    @property
    def nbytes(self) -> int:
        return sum(self.nbytes_by_segment)

    @property
    def nbytes_by_segment(self) -> list[int]:
        """The first one's includes the second copy of its layers in host memory, from which they are streamed."""
        out = [part.nbytes for part in self.parts]
        if self.offloaded is not None:
            out[0] += self.offloaded.buffer_bytes
        return out

    def close(self) -> None:
        self.close_streams()
        for part in reversed(self.parts):
            part.close()
        self.parts = []
