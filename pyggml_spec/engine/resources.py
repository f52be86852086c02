"""Memory of a model runner: slots, caches, hidden states for drafters, and the step buffer."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from ..cache.draft_state import DraftState
from ..cache.hidden import HiddenStateBuffer, LastHiddenState, PictureTable, batch_of
from ..cache.kv import KVCache, KVTypes, check_types
from ..cache.recurrent import RecurrentSegment, RecurrentState
from ..cache.slots import Cursor, Slot
from ..cache.snapshot import SequenceMemory
from ..drafters.base import Drafter
from ..drafters.model import ModelDrafter
from ..drafters.multi import AnyDrafter
from ..errors import DeviceError, EngineError
from ..ggml.cores import ThreadRule
from ..ggml.device import Backend
from ..ggml.step_io import StepIO
from ..models.base import KVShape
from ..models.decoder import Decoder
from .devices import Devices, Segment
from .drafting import Drafting, drafting_of
from .graph_cache import Step
from .masked import MaskedRows
from .options import MOST_CANDIDATES, EngineOptions, candidate_widths, check_masks, check_options, prefill_widths

TRASH_ROWS = 16
ROW_BYTES = 152  # of the step buffer


class Closable(Protocol):
    def close(self) -> None: ...


P = TypeVar("P", bound=Closable)


class Resources:
    """Owns caches and the step buffer, and what is added by ``own``; borrows models (with their weights) and backends.
    With a counting backend nothing is allocated, and only sizes are known.

    Attributes:
        devices: where the target's layers are; ``backend`` is the last one's, which has the drafter too.
        slots: the sequences.
        kv, draft_kv, recurrent, draft_state, hidden_states, last_hidden: caches; None where the models keep nothing in them.
        pictures: rows of pictures of a step, on each segment's device; empty where prompts have none.
        sequence: where each sequence lies in them.
        drafting: how each drafter takes part in steps, by method; ``chain``: the drafter that drafts token by token.
        chunks, blocks: rows of prefill graphs, and of verified blocks, ascending.
        masked: logits that stay on the device for constrained choices.
        last: the step whose logits can be read.
        epoch: sequences begun so far; while it stays the same, the caches hold the same sequences.
    """

    def __init__(self, backend: Backend, target: Decoder, drafter: AnyDrafter | None, options: EngineOptions) -> None:
        check_options(options, target, drafter)
        several = target.weights.devices
        self.devices: Devices = Devices((Segment(backend, 0, target.n_layer),)) if several is None else several(drafter)
        if backend.counting:
            self.devices.segments = tuple(segment._replace(backend=segment.backend.counted()) for segment in self.devices.segments)
        self.segments = self.devices.segments
        check_masks(options, [segment.backend for segment in self.segments])
        self.backend, self.target, self.drafter, self.options = backend, target, drafter, options
        self.members: tuple[Drafter, ...] = tuple(drafter.methods) if drafter is not None else ()
        self.chain = next((member for member in self.members if member.chained), None)
        self.slots = [Slot(Cursor(options.n_ctx), drafting=drafter is not None) for _ in range(options.slots)]
        self.epoch = 0
        self.last: Step | None = None
        self.masked: MaskedRows | None = None
        self._owned: list[Closable] = []
        try:
            self._allocate()
        except BaseException:
            self.close()
            raise

    def own(self, part: P) -> P:
        """Closes ``part`` with the others, last in, first out."""
        self._owned.append(part)
        return part

    def disown(self, part: Closable) -> None:
        self._owned.remove(part)
        part.close()

    def _allocate(self) -> None:
        opt, shape, window = self.options, self.target.recurrent_shape(), self.target.window
        widest = max(opt.chunk, opt.width)
        self.chunks, self.blocks = prefill_widths(opt.chunk), candidate_widths(opt.width)
        shapes, before = self.target.kv_shapes(), self.target.caches_before
        homes = [(s.backend, before(s.end)[0] - before(s.first)[0]) for s in self.segments]
        self.kv = self.cache(shapes, opt.kv, window, widest, homes=homes)
        self.draft_kv: KVCache | None = None
        self.recurrent: RecurrentState | None = None
        self.draft_state: DraftState | None = None
        self.hidden_states: HiddenStateBuffer | None = None
        self.last_hidden: LastHiddenState | None = None
        if self.drafter is not None:
            # a ring would take reuse of prompts token by token from a target that needs rows only
            stateful = shape is not None or self.kv.ring or self.drafter.chained
            near = max((member.window for member in self.members if any(s.sliding for s in member.kv_shapes())), default=0)
            # rows of chunks are written, and not read by each other, except those of a whole model, whose catch-up graphs may be wider
            reads = any(member.whole_model for member in self.members)
            widest = max(widest, batch_of(opt.slots)) if reads else max(opt.width, opt.chunk - near)
            self.draft_kv = self.cache(self.drafter.kv_shapes(), opt.draft_kv, near if stateful else 0, widest, draft=True)
        if shape is not None:
            self.recurrent = self.own(RecurrentState(self._delta_homes(), shape, opt.width, opt.slots))
        for member in self.members:
            if isinstance(member, ModelDrafter) and member.model.recurrent_shape() is not None:
                self.draft_state = self.own(DraftState(self.backend, member.model, opt.width, opt.slots))
        if self.drafter is not None and self.drafter.chained:
            self.last_hidden = self.own(LastHiddenState(self.backend, self.drafter.carry_size(self.target), opt.width, opt.slots))
        self.pictures: list[PictureTable] = []
        for segment in self.segments if opt.pictures else ():
            self.pictures.append(self.own(PictureTable(segment.backend, self.target.n_embd * (1 + self.target.deepstack), opt.chunk)))
        self.sequence = SequenceMemory(self.kv, self.draft_kv, self.recurrent, self.last_hidden, self.draft_state)
        self.io = self.new_io(opt.slots, more=8192)
        if self.drafter is not None and (opt.slots == 1 or len(self.segments) == 1):  # micro-batches do not catch up
            kept, methods = len(self.drafter.captures) + self.drafter.chained, [member.method for member in self.members]
            whole_model = next((member.method for member in self.members if member.whole_model), "")
            self.hidden_states = self.own(
                HiddenStateBuffer(self.backend, self.target.n_embd, kept, opt.width, opt.slots, methods, whole_model)
            )
        self.drafting: dict[str, Drafting] = {}
        if self.draft_kv is not None:
            of = self.target, self.kv, self.draft_kv, opt.slots == 1, self.hidden_states, self.draft_state
            self.drafting = {member.method: drafting_of(member, *of) for member in self.members}
        self.devices.open(self)

    def new_io(self, slots: int, turns: object = None, more: int = 8192) -> StepIO:
        """A step buffer for so many slots."""
        opt, shape = self.options, self.target.recurrent_shape()
        tail = 4 * shape.layers * (shape.conv - 1) if shape is not None else 0
        tail += self.draft_state.input_bytes if self.draft_state is not None else 0
        ringed = self.kv.ring * (2 if self.drafter is not None and self.drafter.shares_kv else 1)
        ringed += self.draft_kv.ring if self.draft_kv is not None else 0
        of_slot = ROW_BYTES * max(opt.chunk, opt.width) + tail + 4 * ringed + 8 * MOST_CANDIDATES * opt.width
        return self.own(StepIO(self.backend, slots * of_slot + more, [segment.backend for segment in self.segments[:-1]], turns))

    def _delta_homes(self) -> list[RecurrentSegment]:
        """Where the recurrent states are: with their layers."""
        homes, weights = [], self.target.weights
        for index, s in enumerate(self.segments):
            layers = self.target.caches_before(s.end)[1] - self.target.caches_before(s.first)[1]
            if layers:
                weights.enter(index)
                homes.append(RecurrentSegment(index, s.backend, layers, self.target.recurrent_row(s.first)))
        weights.enter(len(self.segments) - 1)
        return homes

    def cache(
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
        return self.own(KVCache(self.backend, *sizes, types=types, slots=self.options.slots, homes=homes))

    def method_of(self, name: str) -> str:
        """The drafting method of this name, the first one for "".

        Raises:
            EngineError: an unknown method.
        """
        method = name or (self.drafter.method if self.drafter is not None else "")
        if method not in self.drafting:
            known = f"available: {', '.join(self.drafting)}" if self.drafting else "there is no drafter"
            raise EngineError(f"unknown drafting method {method!r}; {known}")
        return method

    def member(self, method: str) -> Drafter:
        """The drafter of this method."""
        return next(member for member in self.members if member.method == method)

    def thread_rules(self) -> list[ThreadRule]:
        """How many threads compute, of each CPU: those that have layers, and those that compute experts in host memory."""
        weights = getattr(self.target.weights, "parts", [self.target.weights])
        hosts = [host for of in weights if (host := getattr(of, "host_experts", None)) is not None]
        rules = [getattr(one, "rule", None) for one in (*(segment.backend for segment in self.segments), *hosts)]
        return [rule for rule in rules if rule is not None]

    def synchronize(self) -> None:
        """Waits for every step in flight. Whatever reads or writes device memory without a step calls this first."""
        self.devices.synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes by purpose, without those of graphs."""
        out = {
            "weights": self.target.weights.nbytes,
            "kv": self.kv.nbytes,
            "compute": sum(part.nbytes for part in (self.masked, *self.pictures) if part is not None),
        }
        if self.draft_kv is not None:
            out["draft_weights"] = sum(member.weights.nbytes for member in self.members)
            out["draft_kv"] = self.draft_kv.nbytes + sum(
                part.nbytes for part in (self.hidden_states, self.last_hidden, self.draft_state) if part is not None
            )
        if self.recurrent is not None:
            out["recurrent"] = self.recurrent.nbytes
        for index in range(len(self.segments)):
            for purpose, nbytes in self.devices.memory(index).items():
                out[purpose] += nbytes
        return out

    def close(self) -> None:
        self.devices.abandon()
        with suppress(DeviceError):  # of a worker that is lost there is nothing to wait for
            if self._owned:
                self.synchronize()
        for part in reversed(self._owned):
            part.close()
        self._owned = []
