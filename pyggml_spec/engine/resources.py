"""What an engine is made of: its slots, caches, step buffer and graphs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol, TypeVar, cast

from ..cache.cursor import Cursor
from ..cache.hidden import HiddenStateBuffer, LastHiddenState
from ..cache.kv import KVCache
from ..cache.kv_types import KVTypes, check_types
from ..cache.recurrent import DeltaSegment, DeltaState
from ..cache.slots import SlotRange
from ..cache.snapshot import SequenceMemory
from ..drafters.multi import AnyDrafter
from ..errors import DeviceError, EngineError
from ..ggml.cores import ThreadRule
from ..ggml.device import Backend
from ..ggml.step_io import StepIO
from ..models.base import KVShape
from ..models.decoder import Decoder
from ..multi_device.chain import Turns
from ..multi_device.lanes import GROUPS, Lane, half_of, ready_for
from ..multi_device.offload_cache import Guests
from ..multi_device.split import Segment, SplitWeights, check_drafter
from .graph_cache import Step
from .graphs import StepGraphs
from .masked import MaskedRows
from .options import MOST_CANDIDATES, EngineOptions, candidate_widths, check_masks, check_options, prefill_widths
from .slot import Slot

TRASH_ROWS = 16
ROW_BYTES = 112  # of the step buffer


class Closable(Protocol):
    def close(self) -> None: ...


P = TypeVar("P", bound=Closable)


class Resources:
    """Owns caches, graphs and the step buffer; borrows models (with their weights) and the backends. On counting backends it knows its sizes only.

    Attributes:
        segments: of the target's layers, one for each device; ``backend`` is the last one's, which has the drafter too.
        slots: the sequences.
        kv, draft_kv, delta, ring, last_hidden: caches; None where the models have nothing to keep in them.
        sequence: where in them each sequence lies.
        chunks: rows of the graphs that prompts are computed by, ascending.
        epoch: sequences begun so far: whoever remembers what lies in the caches can tell whether it still does.
        last: the step whose logits can be read.
        under_way: a step that nobody has waited for yet.
        lanes: of two groups of slots whose steps can be under way together; none where the target is not split.
        flying: slots whose step is under way in a lane, until it has landed.
        turns: of the devices of a split target, for whoever wants steps part by part.
        guests: K/V rows and states of the first device's layers on the second one, which computes chunks of prompts with copies of their weights; None
            where it does not.
    """

    def __init__(self, backend: Backend, target: Decoder, drafter: AnyDrafter | None, options: EngineOptions) -> None:
        check_options(options, target, drafter)
        self.segments: tuple[Segment, ...] = target.weights.segments or (Segment(backend, 0, target.n_layer),)
        if backend.counting:
            self.segments = tuple(segment._replace(backend=segment.backend.counted()) for segment in self.segments)
        check_masks(options, [segment.backend for segment in self.segments])
        if len(self.segments) > 1:
            check_drafter(drafter)
        self.backend, self.target, self.drafter, self.options = backend, target, drafter, options
        self.slots = [Slot(Cursor(options.n_ctx), drafting=drafter is not None) for _ in range(options.slots)]
        self.epoch = 0
        self.last: Step | None = None
        self.under_way: Step | None = None
        self.lanes: list[Lane] = []
        self.flying: dict[int, Step] = {}
        self.turns: Turns | None = None
        self._owned: list[Closable] = []
        try:
            self._allocate()
            self.graphs.plan_largest()
            for lane in self.lanes:
                lane.graphs.plan_decoding()
        except BaseException:
            self.close()
            raise

    def thread_rules(self) -> list[ThreadRule]:
        """How many threads compute, of each CPU: those that have layers, and those that compute experts in host memory."""
        weights = getattr(self.target.weights, "parts", [self.target.weights])
        hosts = [host for of in weights if (host := getattr(of, "host_experts", None)) is not None]
        rules = [getattr(one, "rule", None) for one in (*(segment.backend for segment in self.segments), *hosts)]
        return [rule for rule in rules if rule is not None]

    def _own(self, part: P) -> P:
        self._owned.append(part)
        return part

    def _allocate(self) -> None:
        opt, shape = self.options, self.target.delta_shape()
        widest = max(opt.chunk, opt.width)
        self.chunks, blocks = prefill_widths(opt.chunk), candidate_widths(opt.width)
        self.kv = self._cache(self.target.kv_shapes(), opt.kv, self.target.window, widest, homes=self._kv_homes())
        self.draft_kv: KVCache | None = None
        self.delta: DeltaState | None = None
        self.ring: HiddenStateBuffer | None = None
        if self.drafter is not None:
            self.draft_kv = self._cache(self.drafter.kv_shapes(), opt.draft_kv, draft=True)
        if shape is not None:
            self.delta = self._own(DeltaState(self._delta_homes(), shape, opt.width, opt.slots))
        self.last_hidden: LastHiddenState | None = None
        if self.drafter is not None and self.drafter.chained:
            self.last_hidden = self._own(LastHiddenState(self.backend, self.drafter.carry_size(self.target), opt.width, opt.slots))
        shapes, window = self.target.kv_shapes(), self.target.window
        self.sequence = SequenceMemory(self.kv, self.draft_kv, self.delta, shapes, window, self.last_hidden)
        tail = 4 * shape.layers * (shape.conv - 1) if shape is not None else 0
        rings = 2 if self.drafter is not None and self.drafter.shares_kv else 1
        of_slot = ROW_BYTES * widest + tail + 4 * rings * self.kv.ring + 8 * MOST_CANDIDATES * opt.width
        before = [segment.backend for segment in self.segments[:-1]]
        self.io = self._own(StepIO(self.backend, opt.slots * of_slot + 8192, before))
        if self.drafter is not None and (
            opt.slots == 1 or len(self.segments) == 1
        ):  # groups of a split target catch up in no step of theirs
            kept, methods = len(self.drafter.captures) + self.drafter.chained, [member.method for member in self.drafter.methods]
            self.ring = self._own(HiddenStateBuffer(self.backend, self.target.n_embd, kept, opt.width, opt.slots, methods))
        widths = {"prefill": self.chunks, "logits": (opt.chunk,), "plain": (1,), "verify": blocks}
        for at, member in enumerate(self.drafter.methods if self.drafter is not None else ()):
            own = tuple(w for w in blocks if w <= member.block_size) or blocks[:1]
            widths |= {role if at == 0 else f"{role} {member.method}": own for role in ("fused", "draft")}
        caches = self.kv, self.draft_kv, self.delta, self.ring, self.last_hidden
        self.graphs = self._own(StepGraphs(self.segments, self.io, self.target, self.drafter, *caches, widths, opt.slots))
        self.graphs.looked_at, self.graphs.given = True, opt.given
        self.guests = self.graphs.guests = self._visitors()
        if len(self.segments) > 1:
            self.turns = self._own(Turns(self.io))
        if self.turns is not None and self._has_groups():
            for _ in range(GROUPS):
                io = self._own(StepIO(self.backend, half_of(opt.slots) * of_slot + 8192, before, self.turns.handle))
                graphs = StepGraphs(self.segments, io, self.target, self.drafter, *caches, widths, opt.slots, half_of(opt.slots))
                graphs.given = opt.given
                self.lanes.append(Lane(io, self._own(graphs)))

    def _visitors(self) -> Guests | None:
        weights, opt, shape = self.target.weights, self.options, self.target.delta_shape()
        if weights.guests is None:
            return None
        first = self.target.caches_before(self.segments[1].first)
        shapes, window, backend = self.target.kv_shapes(), self.target.window, self.segments[1].backend
        kv = self._cache(shapes[: first[0]], opt.kv, window, max(opt.chunk, opt.width), homes=[(backend, first[0])])
        delta = None
        if shape is not None and first[1]:
            cast(SplitWeights, weights).visit()
            home = DeltaSegment(1, backend, first[1], self.target.delta_row(0))
            weights.enter(len(self.segments) - 1)
            delta = self._own(DeltaState([home], replace(shape, layers=first[1]), opt.width, opt.slots))
        there = SequenceMemory(kv, None, delta, shapes, window, first=first)
        return Guests(kv, delta, there, SequenceMemory(self.kv, None, self.delta, shapes, window, first=first), opt.slots)

    def drop_guests(self) -> None:
        """Frees what was kept for chunks that compute with copies of layers. No graph over it may be left."""
        if self.guests is not None:
            for part in (self.guests.kv, self.guests.delta):
                if part is not None:
                    self._owned.remove(part)
                    part.close()
            self.guests = self.graphs.guests = None

    def _has_groups(self) -> bool:
        return self.options.groups and not ready_for(self.segments, self.options.slots, self.target.weights.expert_counts() is not None)

    def _kv_homes(self) -> list[tuple[Backend, int]]:
        """Where the target's K/V rows are: with their layers."""
        before = self.target.caches_before
        return [(s.backend, before(s.end)[0] - before(s.first)[0]) for s in self.segments]

    def _delta_homes(self) -> list[DeltaSegment]:
        """And the recurrent states."""
        homes, weights = [], self.target.weights
        for index, s in enumerate(self.segments):
            layers = self.target.caches_before(s.end)[1] - self.target.caches_before(s.first)[1]
            if layers:
                weights.enter(index)
                homes.append(DeltaSegment(index, s.backend, layers, self.target.delta_row(s.first)))
        weights.enter(len(self.segments) - 1)
        return homes

    def widest(self, method: str) -> int:
        """Rows of the widest block of the drafter that drafts as ``method``."""
        assert self.drafter is not None
        method = self.graphs.method_of(method)
        return next(member.block_size for member in self.drafter.methods if member.method == method)

    def chain_waits(self, slot: int) -> bool:
        """Whether the slot's last step left the rows of the drafter of chains for later: the boundary is not its last token's then."""
        if self.ring is None or self.graphs.chain is None:
            return False
        return self.ring.has_missing(self.graphs.chain.method, slot)

    def keep_masked(self, rows: MaskedRows | None) -> None:
        """Owns these from now on, and has graphs leave their logits there where somebody asks."""
        self.graphs.masked = self._own(rows) if rows is not None else None

    def _cache(
        self,
        shapes: list[KVShape],
        types: KVTypes,
        window: int = 0,
        widest: int = 0,
        draft: bool = False,
        homes: Sequence[tuple[Backend, int]] = (),
    ) -> KVCache:
        for backend in dict.fromkeys(home for home, _ in homes or ((self.backend, 0),)):
            check_types(types, shapes, backend, draft)
        sizes = (shapes, self.options.n_ctx, TRASH_ROWS, window, widest)
        return self._own(KVCache(self.backend, *sizes, types=types, slots=self.options.slots, homes=homes))

    def check_open(self) -> None:
        if self.graphs.closed:
            raise EngineError("the session is closed: load the model again")

    def synchronize(self) -> None:
        """Waits for steps that are still under way. What reads or writes memory of devices in another way than by a step comes behind it."""
        if self.under_way is not None:
            step, self.under_way = self.under_way, None
            step.fields.wait()
        for step in self._in_lanes() if self.flying else ():
            step.fields.wait()

    def abandon(self) -> None:
        """Waits for what lanes have under way, however it ends."""
        for step in self._in_lanes():
            with suppress(DeviceError, EngineError):
                step.fields.wait()
        self.flying.clear()

    def _in_lanes(self) -> list[Step]:
        """The steps under way in lanes, each once."""
        return list({id(step): step for step in self.flying.values()}.values())

    @contextmanager
    def apart(self) -> Iterator[Turns]:
        """Steps of a split target go through its devices part by part in here, so that ``Turns.spent`` says what each of them did."""
        if self.turns is None:
            raise EngineError("the layers are on one device: a step has one part")
        self.synchronize()
        with self.turns.lane(self.io):
            yield self.turns

    def check_landed(self, covered: SlotRange) -> None:
        """Raises EngineError if the step of one of these slots is under way in a lane."""
        for slot in covered.slots if self.flying else ():
            if slot in self.flying:
                raise EngineError(f"the step of slot {slot} is still under way: land its group first")

    def memory(self) -> dict[str, int]:
        """Bytes on the device by purpose."""
        self.check_open()
        out = {"weights": self.target.weights.nbytes, "kv": self.kv.nbytes, "compute": self.graphs.compute_bytes}
        if self.drafter is not None and self.draft_kv is not None:
            out["draft_weights"] = sum(member.weights.nbytes for member in self.drafter.methods)
            out["draft_kv"] = self.draft_kv.nbytes + sum(part.nbytes for part in (self.ring, self.last_hidden) if part is not None)
        if self.delta is not None:
            out["recurrent"] = self.delta.nbytes
        for purpose, nbytes in self.guests.memory.items() if self.guests is not None else ():
            out[purpose] += nbytes
        if self.graphs.masked is not None:
            out["compute"] += self.graphs.masked.nbytes
        out["compute"] += sum(lane.graphs.compute_bytes for lane in self.lanes)
        return out

    def memory_by_segment(self) -> list[dict[str, int]]:
        """The same, of each segment's device."""
        whole, last = self.memory(), len(self.segments) - 1
        weights, kv = getattr(self.target.weights, "nbytes_by_segment", [self.target.weights.nbytes]), self.kv.nbytes_by_home
        states = self.delta.nbytes_by_segment if self.delta is not None else {}
        out, graphs = [], [self.graphs, *(lane.graphs for lane in self.lanes)]
        for index, segment in enumerate(self.segments):
            mine = {"weights": weights[index], "kv": kv[index], "compute": sum(of.compute_bytes_on(segment.backend) for of in graphs)}
            if index in states or (last == 0 and states):
                mine["recurrent"] = sum(states.values()) if last == 0 else states[index]
            for purpose, nbytes in self.guests.memory.items() if index == 1 and self.guests is not None else ():
                mine[purpose] = mine.get(purpose, 0) + nbytes
            out.append(mine)
        out[last] |= {name: nbytes for name, nbytes in whole.items() if name.startswith("draft_")}
        out[last]["compute"] += whole["compute"] - sum(mine["compute"] for mine in out)  # logits that are kept there
        return out

    def close(self) -> None:
        self.abandon()  # both groups, also where the first one's worker is lost
        with suppress(DeviceError):  # of a worker that is lost there is nothing to wait for
            if self._owned:
                self.synchronize()
        for part in reversed(self._owned):
            part.close()
        self._owned = []
