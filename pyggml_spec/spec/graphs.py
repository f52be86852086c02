"""Which graph each kind of step is, and the cache that keeps them: one graph per (role, width, span).

role      rows                 recurrent state               drafter
prefill   a padded chunk       written directly              K/V rows of the chunk
logits    an exact chunk       written directly              -            (all logits readable; parity checks)
capture   an exact chunk       written directly              -            (inputs of named target layers readable; doctor)
plain     1                    written directly              features of the token into the ring
verify    W, ids from host     replay, then left pending     K/V rows of the block
fused     W                    replay, then left pending     drafts the block first, then its K/V rows
commit    -                    replay into another width     -
catchup   RING                 -                             K/V rows of the tokens whose features are in the ring
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ..cache.features import RING, FeatureRing
from ..cache.kv import KVCache, spans_up_to
from ..cache.recurrent import DeltaRows, DeltaState
from ..checks import whole
from ..errors import EngineError
from ..ggml.device import Backend
from ..ggml.graph import Graph, Role, RoleCounters
from ..ggml.library import Tensor, ffi, lib
from ..ggml.step_io import StepFields, StepIO
from ..models.base import Rows, Seen, Target
from ..models.dflash import BlockRows, DFlash

MEASURED_SPANS = 16
MOST_CANDIDATES = 1024  # of a row's largest logits; beyond, whole rows are read
KEEP_SPANS = 12  # graphs kept per (role, width) besides the widest span; about 2 MB of host memory each


@dataclass
class Step:
    """One graph with its input and output fields. ``host`` are numpy views; ``extra`` holds tensors that a caller reads itself."""

    graph: Graph
    fields: StepFields
    extra: dict
    _logits: np.ndarray | None = None

    @property
    def host(self) -> dict[str, np.ndarray]:
        return self.fields.host

    @property
    def finite(self) -> bool:
        """Whether the target produced neither NaN nor Inf."""
        return all(np.isfinite(self.host[name]).all() for name in ("ids_sum", "logits_sum") if name in self.host)

    def ids(self) -> np.ndarray:
        """I32 [rows] greedy choice after each row that has logits, once the step has run."""
        if "ids" in self.host:
            return self.host["ids"].copy()
        return self._host_logits().argmax(axis=1).astype(np.int32)

    def _host_logits(self) -> np.ndarray:
        if self._logits is None:
            self._logits = self.graph.host_view(self.extra["logits"])
        return self._logits

    def candidates(self, row: int) -> tuple[np.ndarray | None, np.ndarray]:
        """I32 token ids (None: all of the vocabulary) and F32 logits after ``row``, until the next step runs.

        Rows in device memory are read one by one: most of a block's rows are never asked for.
        """
        rows = self.host["ids"].size if "ids" in self.host else len(self._host_logits())
        row = whole(row, "the row whose candidates are asked for", 0, rows - 1)
        if "best_ids" in self.host:
            return self.host["best_ids"].reshape(rows, -1)[row], self.host["best_logits"].reshape(rows, -1)[row]
        if "ids" not in self.host:
            return None, self._host_logits()[row]
        logits = self.extra["logits"]
        out = np.empty(logits.ne[0], np.float32)
        lib.ggml_backend_tensor_get(logits, ffi.from_buffer(out), row * logits.nb[1], out.nbytes)
        self.fields.io.reads += 1
        self.fields.io.read_bytes += out.nbytes
        return None, out


def most_nodes(target: Target, drafter: DFlash | None) -> int:
    """Nodes that no step of this pair exceeds: layers take 28 to 66, and three for each expert that a token uses; slots, scales, biases and
    the rotation of quantised rows take at most 40 more.
    """
    experts = getattr(target, "experts", None)
    per_layer = 160 + (4 * experts.n_used if experts is not None else 0)
    return 4096 + (target.n_layer + (drafter.hp.n_layer if drafter is not None else 0)) * per_layer


class StepGraphs:
    """Builds and keeps the graphs of one engine. Owns the roles."""

    def __init__(
        self,
        backend: Backend,
        io: StepIO,
        target: Target,
        drafter: DFlash | None,
        kv: KVCache,
        draft_kv: KVCache | None,
        delta: DeltaState | None,
        ring: FeatureRing | None,
        widths: dict[str, tuple[int, ...]],
    ) -> None:
        self.backend, self.io, self._widths = backend, io, widths
        self._widest = max(RING, *(width for of_role in widths.values() for width in of_role))
        self.target, self.drafter = target, drafter
        self.kv, self.draft_kv, self.delta, self.ring = kv, draft_kv, delta, ring
        self.roles: dict[str, Role] = {}
        self.closed = False
        self.spans = spans_up_to(kv.live)
        self.drafting = drafter is not None  # whether target graphs also write drafter rows
        self.candidates: int | None = 0  # how many of a row's largest logits are read with the ids; None: whole rows, on demand
        self._steps: dict[tuple, Step] = {}
        self._reserved: set[tuple] = set()
        self._builders: dict[str, Callable[..., dict | None]] = {
            "prefill": self._prefill,
            "logits": self._logits,
            "capture": self._capture,
            "plain": self._plain,
            "verify": self._verify,
            "fused": self._fused,
            "commit": self._commit,
            "catchup": self._catchup,
        }

    # -- the cache

    def get(self, role: str, width: int, span: int, *more: Any) -> Step:
        """The graph of this role, width and span, as ``drafting`` and ``candidates`` ask; built if it is not there or its memory has moved."""
        if self.closed:
            raise EngineError("the session is closed: load the model again")
        key = (role, width, span, *more, self.drafting, self.candidates)
        step = self._steps.get(key)
        if step is not None and not self._stale(step):
            return step
        if step is not None:
            step.graph.close()
            del self._steps[key]
        if role in self._widths and (role, self.candidates) not in self._reserved:
            self._reserve(role)
            step = self._steps.get(key)
            if step is not None:
                return step
        self._make_room(role, width)
        return self._keep(self._make(role, width, span, *more), role, width, span, *more)

    def has(self, role: str, width: int, span: int) -> bool:
        """Whether ``get`` would not have to build."""
        step = self._steps.get((role, width, span, self.drafting, self.candidates))
        return step is not None and not self._stale(step)

    def _reserve(self, role: str) -> None:
        """Plans the role's graph with the largest buffer first, so that no later one makes it grow.

        Which graph needs most is not a matter of its size alone: the allocator packs 16 rows over 256 worse than over 2,048, and over 1,280
        worst. So every width is measured at up to MEASURED_SPANS spans; the largest of all and each width's widest are planned and kept.
        """
        few = max(1, len(self.spans) // MEASURED_SPANS)
        spans, made = {*self.spans[::few], self.kv.live}, {}
        drafting, self.drafting = self.drafting, self.drafter is not None
        try:
            for shape in product(self._widths[role], spans):
                made[shape] = self._make(role, *shape)
            sizes = {shape: step.graph.measure() for shape, step in made.items()}
            largest = max(sizes, key=sizes.__getitem__)
            for shape in sorted(made, key=lambda shape: shape != largest):
                if shape == largest or shape[1] == self.kv.live:
                    self._keep(made.pop(shape), role, *shape)
            self._reserved.add((role, self.candidates))
        finally:
            self.drafting = drafting
            for step in made.values():
                step.graph.close()

    def _make(self, role: str, width: int, span: int, *more: Any) -> Step:
        if role not in self._builders:
            raise EngineError(f"there is no step called {role!r}: use one of {', '.join(self._builders)}")
        width = whole(width, f"the width of a {role} step", 0 if role == "commit" else 1, self._widest)
        if role not in self.roles:
            self.roles[role] = Role(self.backend, role, most_nodes(self.target, self.drafter))
        graph = Graph(self.roles[role])
        try:
            fields = StepFields(self.io, graph)
            extra = self._builders[role](graph, fields, width, span, *more) or {}
        except BaseException:
            graph.close()
            raise
        return Step(graph, fields, extra)

    def _keep(self, step: Step, role: str, *shape: Any) -> Step:
        """Plans the step's graph and keeps it; it is closed if it cannot be planned."""
        try:
            self._plan(step)
        except BaseException:
            step.graph.close()
            raise
        key = (role, *shape, self.drafting, self.candidates)
        if key in self._steps:  # of a reservation that failed half-way
            self._steps[key].graph.close()
        self._steps[key] = step
        return step

    def _plan(self, step: Step) -> None:
        step.graph.plan()

    def _stale(self, step: Step) -> bool:
        return step.graph.stale

    def _make_room(self, role: str, width: int) -> None:
        family = [key for key in self._steps if key[:2] == (role, width)]
        widest = max((key[2] for key in family), default=0)
        for key in [key for key in family if key[2] != widest][: max(0, len(family) - KEEP_SPANS)]:
            self._steps.pop(key).graph.close()

    def counters(self) -> dict[str, RoleCounters]:
        return {name: role.counters for name, role in self.roles.items()}

    def steps(self) -> dict[tuple, Step]:
        """The kept graphs by key (tests and inspection)."""
        return dict(self._steps)

    @property
    def compute_bytes(self) -> int:
        return sum(role.buffer_bytes for role in self.roles.values())

    def close(self) -> None:
        for step in self._steps.values():
            step.graph.close()
        for role in self.roles.values():
            role.close()
        self._steps, self.roles, self.closed = {}, {}, True

    # -- parts

    def _target_inputs(self, g: Graph, f: StepFields, width: int, span: int) -> dict:
        positions = f.input("positions", "i32", width)
        kv_rows = f.input("kv_rows", "i64", width)
        q_last = f.input("q_last", "f32", 1, width)
        mask = g.span_mask(self.kv.near, q_last, None, span)
        sliding = self._sliding(g, f, kv_rows, q_last, span) if self.target.window else None
        return {"positions": positions, "kv_rows": kv_rows, "mask": mask, "span": span, "sliding": sliding}

    def _sliding(self, g: Graph, f: StepFields, kv_rows: Tensor, q_last: Tensor, span: int, slots: int = 1) -> Seen:
        """What sliding layers write and see: a ring of rows, or all rows where the context is no longer than one.

        Rows of a ring beyond the span hold nothing yet. All of gemma4's would be 1.3 GB per step at 31B, 7 % of what its weights are.
        """
        rows, near = kv_rows, self.kv.near
        q_first = f.input("q_first", "f32", 1, kv_rows.ne[0])
        if self.kv.ring:
            span = min(span, self.kv.ring)
            rows, near = f.input("sliding_rows", "i64", kv_rows.ne[0]), f.input("sliding_near", "f32", span, slots)
        return Seen(rows, g.span_mask(near, q_last, q_first, span, slots), span)

    def _begin_block(self, g: Graph, f: StepFields, width: int, replay: bool) -> None:
        if self.delta is None:
            return
        keep = f.input("keep", "f32", 1, width) if replay else None
        tail = f.input("tail", "i32", self.delta.history_rows, self.delta.shape.layers)
        self.delta.begin(g, width, width, keep, tail)

    def _begin_prefill(self, g: Graph, f: StepFields, width: int) -> DeltaRows | None:
        if self.delta is None:
            return None
        on = f.input("on", "f32", 1, width)
        last = f.input("last", "i32", self.delta.history_rows)
        self.delta.begin(g, 0, 0, None, None)
        return DeltaRows(self.delta, 0, False, on, last)

    def _forward(self, g: Graph, f: StepFields, tokens: Tensor, inputs: dict, delta: DeltaRows | None) -> tuple[Tensor, list[Tensor]]:
        capture = self.drafter.hp.target_layers if self.drafter is not None and self.drafting else ()
        return self.target.forward(g, Rows(tokens=tokens, kv=self.kv.layers, delta=delta, **inputs), capture)

    def _draft_context(self, g: Graph, features: list[Tensor], inputs: dict) -> None:
        if self.drafting:
            assert self.drafter is not None and self.draft_kv is not None
            self.drafter.context_rows(g, features, inputs["positions"], inputs["kv_rows"], self.draft_kv.layers)

    def _emit(self, g: Graph, f: StepFields, hidden: Tensor) -> dict:
        """Greedy ids of all rows, and the sum of each hidden row: not finite if anything in it is NaN or Inf.

        On the CPU the host takes the argmax of the logits where they lie: ggml's own is one scalar loop on one thread, 0.4 ms for each row
        of a 248k vocabulary against 0.04.
        """
        f.output("ids_sum", "f32", g.sum_rows(hidden))
        logits = self.target.logits(g, hidden)
        in_host = self.backend.device.kind == "cpu" and not self.candidates
        if in_host or self.candidates is None:
            g.keep(logits)
        if not in_host:
            f.output("ids", "i32", g.argmax(logits))
        if self.candidates:
            f.output("logits_sum", "f32", g.sum_rows(logits))
            best, values = g.largest(logits, min(self.candidates, logits.ne[0]))
            f.output("best_ids", "i32", best)
            f.output("best_logits", "f32", values)
        return {"logits": logits}

    # -- the graphs

    def _prefill(self, g: Graph, f: StepFields, width: int, span: int) -> dict:
        inputs = self._target_inputs(g, f, width, span)
        delta = self._begin_prefill(g, f, width)
        out_row = f.input("out_row", "i32", 1)
        hidden, features = self._forward(g, f, f.tokens(width), inputs, delta)
        out = self._emit(g, f, g.rows(hidden, out_row))
        self._draft_context(g, features, inputs)
        return out

    def _logits(self, g: Graph, f: StepFields, width: int, span: int) -> dict:
        inputs = self._target_inputs(g, f, width, span)
        delta = self._begin_prefill(g, f, width)
        hidden, _ = self._forward(g, f, f.tokens(width), inputs, delta)
        logits = self.target.logits(g, hidden)
        g.expand(logits)
        return {"logits": logits}

    def _capture(self, g: Graph, f: StepFields, width: int, span: int, layers: tuple[int, ...]) -> dict:
        inputs = self._target_inputs(g, f, width, span)
        delta = self._begin_prefill(g, f, width)
        hidden, features = self.target.forward(g, Rows(tokens=f.tokens(width), kv=self.kv.layers, delta=delta, **inputs), layers)
        for feature in features:
            g.keep(feature)
        return {**self._emit(g, f, hidden), "features": features}

    def _plain(self, g: Graph, f: StepFields, width: int, span: int) -> dict:
        inputs = self._target_inputs(g, f, 1, span)
        self._begin_block(g, f, 1, replay=False)
        delta = DeltaRows(self.delta, 1, False) if self.delta is not None else None
        hidden, features = self._forward(g, f, f.tokens(1), inputs, delta)
        out = self._emit(g, f, hidden)
        if self.drafting:
            assert self.ring is not None
            row = f.input("ring_row", "i64", 1)
            g.kv_write_rows(self.ring.rows, g.concat(features), row)
        return out

    def _catchup(self, g: Graph, f: StepFields, width: int, span: int) -> None:
        assert self.ring is not None
        inputs = {"positions": f.input("positions", "i32", width), "kv_rows": f.input("kv_rows", "i64", width)}
        self._draft_context(g, [self.ring.rows], inputs)

    def _verify(self, g: Graph, f: StepFields, width: int, span: int) -> dict:
        inputs = self._target_inputs(g, f, width, span)
        self._begin_block(g, f, width, replay=True)
        return self._verify_rows(g, f, f.tokens(width), inputs, width)

    def _verify_rows(self, g: Graph, f: StepFields, tokens: Tensor, inputs: dict, width: int) -> dict:
        delta = DeltaRows(self.delta, width, True) if self.delta is not None else None
        hidden, features = self._forward(g, f, tokens, inputs, delta)
        out = self._emit(g, f, hidden)
        self._draft_context(g, features, inputs)
        return out

    def _fused(self, g: Graph, f: StepFields, width: int, span: int) -> dict:
        assert self.drafter is not None and self.draft_kv is not None
        inputs = self._target_inputs(g, f, width, span)
        block = f.input("block", "i32", width)
        masks = self._draft_masks(g, f, width, span)
        self._begin_block(g, f, width, replay=True)
        rows = BlockRows(block, inputs["positions"], inputs["kv_rows"], masks, span, self.draft_kv.layers)
        hidden = self.drafter.denoise(g, rows, self.target)
        # row 0 of the block is the pending token itself: its logits are never needed
        logits = self.drafter.logits(g, g.tail_rows(hidden, 1), self.target)
        drafts = g.argmax(logits)
        tokens = f.drafted_tokens(width, drafts)
        g.expand(drafts)
        f.output("draft_sum", "f32", g.sum_rows(hidden))
        return {**self._verify_rows(g, f, tokens, inputs, width), "draft_logits": logits}

    def _draft_masks(self, g: Graph, f: StepFields, width: int, span: int) -> tuple:
        """One mask per drafter layer; layers with the same window share theirs."""
        assert self.drafter is not None and self.draft_kv is not None
        last = f.input("draft_last", "f32", 1, width)
        by_window = {}
        for window in self.drafter.hp.window:
            if window not in by_window:
                first = f.input(f"draft_first_{window}", "f32", 1, width) if window else None
                by_window[window] = g.span_mask(self.draft_kv.near, last, first, span)
        return tuple(by_window[window] for window in self.drafter.hp.window)

    def _commit(self, g: Graph, f: StepFields, width: int, span: int, width_to: int, replay: bool) -> None:
        """``width`` is the one that is left; ``span`` plays no part."""
        if self.delta is None:
            raise EngineError("a model without recurrent state has nothing to commit")
        keep = f.input("keep", "f32", 1, width) if replay else None
        tail = f.input("tail", "i32", self.delta.history_rows, self.delta.shape.layers)
        self.delta.begin(g, width, width_to, keep, tail)
