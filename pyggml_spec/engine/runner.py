"""The engine: one target, perhaps a drafter, 1 to 64 sequences in slots. One forward pass per step, whatever each of them needs.

Order of life of a slot (slot.py has its states): ``admit`` -> any number of ``step`` and ``accept`` (a prompt is work for ``step`` like
everything else) -> ``release``. What each slot does in a step is its own business: a part of a prompt, a plain token, given drafts or drafting,
at widths of its own; slots that are not named do nothing and are left as they are. Which steps to run is the scheduler's business, or the
loop's.

The only slot of an engine need not be admitted; ``reset``, ``prefill``, ``plain_step``, ``fused_step`` and ``verify_step`` are its steps by name.

Here is what can be asked, and what callers hand in is checked, once. What it takes is done by sequences.py (slots), steps.py (forward passes),
candidates.py (what they leave to choose from), commits.py (what they leave for later), ahead.py (graphs) and exact.py (logits of llama.cpp's batches), over the parts that parts.py owns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from ..cache.cursor import Cursor
from ..cache.slots import SlotRange, covering
from ..cache.snapshot import Snapshot
from ..checks import token_ids, whole
from ..drafters.multi import AnyDrafter
from ..errors import EngineError
from ..ggml.cores import CORE_MONITOR, ThreadCounts
from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..models.decoder import Decoder
from ..multi_device.lanes import Flight
from . import exact
from .batch import Batch, BatchItem, Draft, Prefill, StepOutput, Verify
from .candidates import Ask, Candidates
from .commits import Commits
from .graph_prebuilder import GraphPrebuilder
from .graphs import StepGraphs
from .options import MOST_SLOTS, EngineOptions
from .resources import Resources
from .sequences import Sequences
from .steps import Meanwhile, Steps


class ModelRunner:
    """Runs steps over its slots. Owns its parts; borrows models (with their weights) and the backend."""

    def __init__(self, backend: Backend, target: Decoder, drafter: AnyDrafter | None, options: EngineOptions) -> None:
        self.resources = p = Resources(backend, target, drafter, options)
        self.backend, self.target, self.drafter, self.options, self.slots = backend, target, drafter, options, p.slots
        self.graphs, self.io, self.sequence = p.graphs, p.io, p.sequence
        self.kv, self.draft_kv, self.delta, self.ring = p.kv, p.draft_kv, p.delta, p.ring
        self.threads = ThreadCounts(p.thread_rules())
        self.ahead = GraphPrebuilder(p)
        self._commits = Commits(p)
        self._sequences = Sequences(p, self._commits)
        self._steps = Steps(p, self._commits, self._sequences, self.ahead)
        self._candidates = Candidates(p, self._sequences)
        self._groups = [Steps(p, self._commits, self._sequences, GraphPrebuilder(p, lane.graphs), lane.graphs) for lane in p.lanes]
        self._flights: dict[int, Flight] = {}

    # -- sequences

    def admit(self, drafting: bool = True, candidates: int | None = 0, masked: bool = False) -> int | None:
        """Takes the lowest free slot for a new sequence; None if there is none.

        ``drafting`` False: it will not be drafted for. ``candidates``, ``masked``: as in ``read_candidates``.
        """
        self.resources.synchronize()
        self.resources.check_open()
        slot = self._sequences.free()
        if slot is not None:
            self.read_candidates(candidates, slot, masked)
            self._sequences.begin(slot, drafting)
        return slot

    def reset(self, drafting: bool = True, slot: int = 0) -> None:
        """Forgets the slot's sequence and begins another one.

        ``drafting`` False: the next sequence will not be drafted for, and its drafter rows are not computed.
        """
        self.resources.synchronize()
        self.resources.check_open()
        self._sequences.begin(self._sequences.number(slot), drafting)

    def release(self, slot: int) -> None:
        """Ends the sequence; the slot can be admitted again."""
        self.resources.synchronize()
        self._sequences.release(slot)

    def accept(self, rows: int, last_token: int, slot: int = 0) -> None:
        """Commits the first ``rows`` rows of the slot's last block; ``last_token`` is the token chosen after them."""
        self._sequences.accept(rows, last_token, slot)

    def choose(self, last_token: int, slot: int = 0) -> None:
        """Puts ``last_token`` in the place of the greedy choice after a prompt."""
        self._sequences.choose(last_token, slot)

    def commit(self, batch: Batch, accepted: Mapping[int, Sequence[int]]) -> None:
        """Commits the tokens that each slot's step emitted; none of a prompt that is not complete."""
        for slot, tokens in accepted.items():
            if not isinstance(batch.items[slot], Prefill):
                self.accept(len(tokens), tokens[-1], slot)
            elif tokens:
                self.choose(tokens[0], slot)

    def read_candidates(self, count: int | None, slot: int = 0, masked: bool = False) -> None:
        """What ``candidates`` gives from the next step on: so many of a row's largest logits, None for all; 0 if nobody will ask.

        ``masked``: ``likeliest`` and ``largest`` will be asked, too, if the slot's ``masked`` says so afterwards. If not, because the device
        lacks an operation or memory for it, ``candidates`` gives all. On the CPU all logits lie in host memory, and nothing has to be read.
        """
        self.resources.synchronize()
        self._candidates.announce(count, self._sequences.number(slot), masked)

    def candidates(self, row: int, slot: int = 0) -> tuple[np.ndarray | None, np.ndarray]:
        """What may come after ``row`` of the slot's last work (of a prompt, after its last row): I32 token ids (None: all of the vocabulary)
        and F32 logits. To be asked before ``accept`` and the next step."""
        return self._candidates.after(row, slot)

    @property
    def unmasked(self) -> str:
        """Why ``masked`` of ``read_candidates`` was not possible here; empty where it was, or was not asked for."""
        return self._candidates.unmasked

    def likeliest(self, asks: Sequence[Ask]) -> list[int]:
        """The likeliest tokens among some, for rows as ``candidates`` takes them; any token where no bit is set. Valid until the next step.

        Raises:
            EngineError: a slot that ``read_candidates`` made no room for.
        """
        return self._candidates.likeliest(asks)

    def largest(self, row: int, bits: np.ndarray, slot: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Like ``candidates``, but of the tokens whose bits are set (an ``Ask`` has such); -inf where there are not as many."""
        return self._candidates.largest(row, bits, slot)

    def rollback_range(self, slot: int = 0) -> tuple[int, int]:
        """The lengths, lowest and highest, that ``rollback`` takes now."""
        return self._sequences.rollback_range(slot)

    def rollback(self, n: int, slot: int = 0) -> None:
        """Makes the sequence ``n`` tokens long; the token that stood at position n becomes the last token again.

        Valid exactly for lengths within the last block, rows that were not accepted included: shorter ones are in the recurrent state
        already. After plain steps and prompts the only such length is the current one.

        Raises:
            EngineError: any other length; nothing has changed then.
        """
        self.resources.synchronize()
        self._sequences.rollback(n, slot)

    def settle(self, slot: int | None = None) -> None:
        """Commits what is accepted in one slot, or in all: caches and recurrent states hold the whole sequences, whose lengths are final."""
        self.resources.synchronize()
        self.resources.check_open()
        self._commits.settle(None if slot is None else self._sequences.number(slot))

    def flush(self, covered: SlotRange | None = None) -> None:
        """Folds what was accepted of last blocks into the recurrent states now; the next step would otherwise do it first.

        Open blocks stay open.
        """
        self.resources.synchronize()
        self._commits.flush(covered or self.graphs.every)

    def snapshot(self, slot: int = 0) -> Snapshot:
        """A copy of the slot's sequence as it stands, on the device. ``restore`` it any number of times, into any slot; ``close`` it.

        Raises:
            DeviceError: the device has no memory for it.
            EngineError: the slot has no sequence, or a block that was not accepted yet.
        """
        self.resources.synchronize()
        self.resources.check_open()
        return self._sequences.snapshot(slot, self)

    def restore(self, snapshot: Snapshot, slot: int = 0) -> None:
        """Makes ``snapshot`` of this engine the sequence of an admitted slot: the next step gives what it would have given then.

        Raises:
            EngineError: the slot has no sequence; the snapshot was closed, or taken of another engine.
        """
        self.resources.synchronize()
        self.resources.check_open()
        self._sequences.restore(snapshot, slot, self)

    def resume(self, committed: int, last_token: int | None = None, slot: int = 0) -> None:
        """Says that ``committed`` tokens of the slot's sequence are in the caches, whatever brought them there; a prompt goes on behind them.

        Raises:
            EngineError: fewer than it has already, more than the context holds, or a last token that there is not.
        """
        self._sequences.resume(committed, last_token, slot)

    # -- steps

    def forward(self, batch: Batch, meanwhile: Meanwhile = None) -> dict[int, StepOutput]:
        """One forward pass over a batch; outputs by slot. Arguments and errors as those of ``step``."""
        return self.step(batch.items, meanwhile)

    def step(self, work: Mapping[int, BatchItem], meanwhile: Meanwhile = None) -> dict[int, StepOutput]:
        """One forward pass over the slots named in ``work``. Results have the rows of their slot only; a prompt's has its last row.

        ``meanwhile`` is called once the pass is under way: what it does costs no time as long as a device computes on its own.

        Raises:
            ContextError: a prompt that is empty, does not fit the context or has ids outside the vocabulary.
            EngineError: a slot without a sequence, a block that was not accepted yet, a width that was not planned for.
        """
        self.resources.check_open()
        CORE_MONITOR.poll()
        if self._flights:
            raise EngineError("a group's step is still under way: land it first")
        if not (type(work) is dict or isinstance(work, Mapping)) or not work:
            raise EngineError("a step needs work for at least one slot, as {slot: Prefill(...), Verify(...) or Draft(...)}")
        rows, covered = self._checked(work)
        if self.resources.under_way is not None and not all(isinstance(item, Prefill) for item in work.values()):
            self.resources.synchronize()
        for item in work.values():
            if isinstance(item, Draft) and (item.check is not None or item.weigh is not None):
                return self._steps.looked_at(work, rows, covered, meanwhile)
        return self._steps.run(work, rows, covered, meanwhile)

    # -- groups of slots of a split target, whose steps are under way together

    @property
    def groups(self) -> int:
        """Steps that can be under way together; 0 where the target is not split, or there is one slot (lanes.py)."""
        return len(self._groups)

    def launch(self, group: int, work: Mapping[int, BatchItem]) -> None:
        """Begins a pass of plain tokens and blocks over the slots named in ``work``, none of them of another group; follow with ``land``.

        Until then nothing can be asked of these slots, and no block of another width can be computed.

        Raises:
            EngineError: as ``step``; a group that there is not, or one that is under way, prompts, slots that another group's step covers, drafts
                that are to be looked at.
        """
        self.resources.check_open()
        CORE_MONITOR.poll()
        if not 0 <= whole(group, "the group", 0, MOST_SLOTS) < len(self._groups) or group in self._flights:
            raise EngineError(f"group {group} cannot begin a step: it is under way, or there is none of this number")
        if any(
            isinstance(item, Prefill) or (isinstance(item, Draft) and (item.check is not None or item.weigh is not None))
            for item in work.values()
        ):
            raise EngineError("prompts, and drafts that are looked at, are no group's work: use step")
        if self.resources.under_way is not None:
            self.resources.synchronize()
        rows, covered = self._checked(work, self.resources.lanes[group].graphs)
        self.resources.check_landed(covered)
        self._flights[group] = self._groups[group].launch(work, rows, covered)

    def land(self, group: int) -> dict[int, StepOutput]:
        """Waits for a group's step; results as of ``step``."""
        if group not in self._flights:
            raise EngineError(f"group {group} has no step under way: launch one")
        return self._groups[group].land(self._flights.pop(group))

    def lay_out(self, width: int) -> None:
        """Makes the states of all slots ready for blocks of ``width`` rows, as the first step with such blocks would, which is too late for a group's
        beside another one."""
        self.resources.check_landed(self.graphs.every)
        self._commits.before_block(self.graphs.width_for(whole(width, "the block width", 2, self.options.width)), (), "", False)

    def abandon(self) -> None:
        """Waits for every group's step, and forgets what it brought: its slots can only be released."""
        self._flights = {}
        self.resources.abandon()

    def _checked(self, work: Mapping[int, BatchItem], graphs: StepGraphs | None = None) -> tuple[dict[int, int], SlotRange]:
        """The rows of each slot, and the slots that the step covers."""
        rows = {slot: self._sequences.rows_of(slot, item) for slot, item in work.items()}
        (self.graphs if graphs is None else graphs).aim([self.slots[slot] for slot in rows])
        covered = covering(rows, len(self.slots))
        if covered.count > len(rows):
            self._sequences.clean_unused(covered)
        return rows, covered

    @property
    def rows_alike(self) -> bool:
        """Whether a row has the same bits in steps of every shape: on CPUs, where native kernels compute all of the target."""
        target = self.target
        levels = [segment.backend.level for segment in self.resources.segments]
        return None not in levels and not target.weights.other_matrix_bytes and not target.ggml_attention

    def chunk_width(self, rows: int) -> int:
        """Rows of the graph that computes ``rows`` certain rows of one of several slots."""
        return self.graphs.chunk_width(rows) if rows > 1 else 1

    # -- steps of one slot, by name

    def prefill(
        self,
        tokens: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] | None = None,
        slot: int = 0,
    ) -> int | None:
        """Computes ``tokens`` behind what is already there and returns the greedy next token, which becomes the last token. A block that nothing was
        accepted of is given up.

        Args:
            tokens: at least one token id.
            progress: called with (done, total) after each chunk.
            stop: asked before each chunk; True ends the prefill early with None, the chunks done so far stay committed.

        Raises:
            ContextError: empty, too long for the context, or an id outside the vocabulary.
            EngineError: NaN or Inf came out.
        """
        ids, last_token = self._sequences.next_tokens(tokens, slot), None
        for done in range(0, ids.size, self.options.chunk):
            if stop is not None and stop():
                return None
            part = ids[done : done + self.options.chunk]
            more = done + part.size < ids.size
            result = self.step({slot: Prefill(part, more)})[slot]
            if not result.target_finite:
                raise EngineError(self.not_finite(slot))
            last_token = int(result.ids[0]) if result.ids.size else None
            if progress is not None:
                progress(done + part.size, ids.size)
        return last_token

    def plain_step(self, slot: int = 0) -> StepOutput:
        """Computes the last token alone, which is committed by it. Follow with ``accept(1, ids[0])``."""
        return self._by_name(slot, Verify())

    def fused_step(
        self, width: int | None = None, masks: np.ndarray | None = None, slot: int = 0, drafter: str = "", verified: int = 0
    ) -> StepOutput:
        """Drafts a block behind the last token and verifies it, in one graph. Follow with ``accept``. The others are as in ``Draft``."""
        return self._by_name(slot, Draft(self.options.width if width is None else width, masks, verified=verified, drafter=drafter))

    def verify_step(self, drafts: Sequence[int], slot: int = 0) -> StepOutput:
        """Verifies given ids behind the last token: a block of len(drafts) + 1 rows. Follow with ``accept``."""
        return self._by_name(slot, Verify(token_ids(drafts, self.target.n_vocab, "the block of drafts")))

    def _by_name(self, slot: int, item: BatchItem) -> StepOutput:
        self._sequences.give_up(slot)
        return self.step({slot: item})[slot]

    def logits(self, tokens: Sequence[int], slot: int = 0) -> np.ndarray:
        """Logits of all ``tokens`` in graphs of exactly their number of rows (chunked by the prefill chunk). F32 [T, n_vocab].

        This is llama.cpp's batch shape, so results can be compared bit for bit. Commits the tokens; no drafter rows are written.
        """
        self.resources.synchronize()
        return exact.logits(self.resources, self._steps, self._sequences.next_tokens(tokens, slot), slot)

    def nodes(self, tokens: Sequence[int], slot: int = 0) -> dict[str, np.ndarray]:
        """F32 values of the nodes that models name, of one graph over ``tokens``, which fit a chunk; empty unless ``Graph.debug`` was set."""
        return exact.nodes(self.resources, self._steps, self._sequences.next_tokens(tokens, slot), slot)

    def logits_together(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Logits of all tokens of several slots, F32 [T, n_vocab] each, in one forward pass as wide as the longest (one prefill chunk at
        most). Commits the tokens; no token becomes the last token, and no drafter rows are written."""
        self.resources.synchronize()
        work = {slot: Prefill(tokens) for slot, tokens in prompts.items()}
        return exact.logits_together(self.resources, self._steps, work, *self._checked(work))

    def capture(self, tokens: Sequence[int], layers: Sequence[int], slot: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Greedy ids after each of ``tokens``, I32 [T], and the inputs of the target ``layers``, F32 [len(layers), T, n_embd].

        Layer v means what it does in a drafter's ``target_layers``: n_layer is the last layer's output. Commits the tokens; no drafter rows
        are written.

        Raises:
            ContextError: as ``prefill``.
            EngineError: a layer that the target does not have.
        """
        self.resources.synchronize()
        layers = [whole(v, "a captured layer", 0, self.target.n_layer) for v in layers]
        return exact.capture(self.resources, self._steps, self._sequences.next_tokens(tokens, slot), layers, slot)

    # -- graphs ahead of their steps

    def drafting_role(self, kind: str, method: str, width: int, rows: int) -> tuple:
        """(role, width, ...) for ``prepare`` of the steps in which ``method`` drafts ``width`` - 1 tokens behind the last token, of which the graph
        has ``rows`` rows; ``kind``: "fused", or "draft" for the drafts alone."""
        role, more, _ = self.graphs.of_drafts(kind, self.graphs.method_of(method), rows, width - 1)
        return role, rows, *more

    def given_role(self, width: int) -> tuple:
        """(role, width, ...) for ``prepare`` of the first slot's steps of ``width`` rows that verify given ids, or nothing if that is 1."""
        self.graphs.aim(self.slots[:1])
        return ("verify", width, *self.graphs.late) if width > 1 else ("plain", 1)

    def prepare(self, kinds: Sequence[tuple], tokens: int) -> None:
        """Announces the (role, width), as of ``drafting_role`` where somebody drafts, of the steps that the next ``tokens`` tokens of the first slot
        will take, so that none of them waits for its graph.

        What is needed at once is built here. The graphs of the next span are built one per step, while the device computes; the CPU has no
        such time to spare: it plans for the largest of each role here and builds each when its step comes, which ``waited_us`` says.
        """
        self.resources.synchronize()
        self.ahead.prepare(kinds, tokens)

    def prepare_transitions(self, widths: Sequence[int]) -> None:
        """Announces, as ``prepare`` does, the commit graphs between blocks of these widths, and from prompts into them: ten nodes each."""
        self.resources.synchronize()
        self.ahead.prepare_transitions(widths)

    def step_graph(self, role: str, width: int) -> Graph:
        """The graph that a step of the first slot, of this role and width, would compute now."""
        self.graphs.aim(self.slots[:1])
        return self.graphs.get(role, width, self.kv.bucket(self.cursor.committed + width), SlotRange(0, 1)).graph

    # -- what there is to know

    @property
    def cursor(self) -> Cursor:
        """Of the first slot."""
        return self.slots[0].cursor

    @property
    def epoch(self) -> int:
        """Sequences begun so far: whoever remembers what lies in the caches can tell whether it still does."""
        return self.resources.epoch

    @property
    def built_ahead(self) -> int:
        """Graphs that were announced and that no measured time has in it: built before their steps, or on a CPU when those came."""
        return self.ahead.built + self.graphs.built_as_announced

    @property
    def waited_us(self) -> int:
        """Microseconds that steps have waited for graphs to be built or captured."""
        return self.graphs.waited_us

    @property
    def catch_ups(self) -> int:
        """Graphs so far that computed rows which drafters lacked."""
        return self._commits.catch_ups

    @property
    def catch_up_us(self) -> int:
        """Microseconds that they took."""
        return self._commits.catch_up_us

    @property
    def forwards(self) -> int:
        return self._steps.forwards + sum(steps.forwards for steps in self._groups)

    @property
    def rows_computed(self) -> int:
        return self._steps.rows_computed + sum(steps.rows_computed for steps in self._groups)

    @property
    def rows_used(self) -> int:
        return self._steps.rows_used + sum(steps.rows_used for steps in self._groups)

    def not_finite(self, slot: int = 0) -> str:
        """What to say of a slot whose target produced NaN or Inf."""
        return (
            f"{self.target.file.path.name} produced NaN or Inf after {self.slots[slot].cursor.committed} tokens; the weights are damaged or "
            "overflow on this device"
        )

    def expert_counts(self) -> dict[str, int] | None:
        """Choices of routed experts so far, hits among them, and the host's microseconds; None where all experts are on the device."""
        counts = self.target.weights.expert_counts()
        return asdict(counts) if counts is not None else None

    def memory(self) -> dict[str, int]:
        """Bytes on the device by purpose."""
        return self.resources.memory()

    def memory_by_segment(self) -> list[dict[str, int]]:
        """The same, of each device that has some of the layers, in their order."""
        return self.resources.memory_by_segment()

    def close(self) -> None:
        self.abandon()
        self.resources.close()
