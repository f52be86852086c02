"""Choices under constraints where logits are in device memory: masks go there, logits do not come here.

A step leaves its logits in ``logits``. After it one small graph takes rows of them, adds a number far below
zero wherever a row's bits are not set, and gives the likeliest token of each, or the largest logits of each, in one read. A row of bits of
248,000 tokens is 35 kB, a row of logits a megabyte. The bits are uploaded as weights of one bit, which every backend reads as 1 and -1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DeviceError, EngineError
from ..ggml.device import Backend
from ..ggml.graph import Graph, GraphAllocator
from ..ggml.library import Tensor, ffi, lib, new_context
from ..ggml.step_io import StepFields, StepIO
from .graph_cache import Step

MOST_ROWS = 32  # at once, some 3 MB each of a vocabulary of 248,000; more go one part after another
FAR = 1e30  # below every allowed logit; not infinity, which would make the sum of a row no number
ROLE = "masked"


class MaskedRows:
    """F32 [n_vocab, rows] logits of the last step, and the graphs that choose from them. Owns both; one per engine."""

    def __init__(self, backend: Backend, n_vocab: int, rows: int, most: int) -> None:
        """
        Args:
            rows: the most that a step has.
            most: logits per row that ``largest`` returns at most.

        Raises:
            DeviceError: no memory.
            EngineError: the backend cannot do it.
        """
        self.backend, self.n_vocab, self.rows = backend, n_vocab, rows
        most_rows = min(rows, MOST_ROWS)
        self._sizes = [*(1 << i for i in range(7) if 1 << i < most_rows), most_rows]  # rows that graphs are made for
        self._graphs: dict[tuple[int, int], Step] = {}
        self._role: Any = None
        self.io: Any = None
        self._ctx = new_context(1)
        self.logits = lib.ggml_new_tensor(self._ctx, lib.GGML_TYPE_F32, 2, (n_vocab, rows))
        self._buffer: Any = backend.allocate(self._ctx)
        if self._buffer == ffi.NULL:
            lib.ggml_free(self._ctx)
            raise DeviceError(f"no memory on {backend.device.name} for {rows} rows of {n_vocab} logits that constraints choose from")
        lib.ggml_backend_buffer_clear(self._buffer, 0)
        try:
            at_once = self._sizes[-1]
            self.io = StepIO(backend, at_once * (n_vocab // 7 + 8 * most + 64) + 4096)
            self._role = GraphAllocator(backend, ROLE, 2048)
            self._graph(at_once, 0)  # the largest first: the buffer is allocated once
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return lib.ggml_backend_buffer_get_size(self._buffer) + self._role.buffer_bytes

    def keep(self, g: Graph, logits: Tensor) -> None:
        """Puts the logits of a step, of ``rows`` rows at most, where they stay until the next one has run."""
        g.place(self.logits, 0, logits)
        g.expand(logits)

    def fits(self, logits: Tensor) -> bool:
        return logits.ne[0] == self.n_vocab and logits.ne[1] <= self.rows and logits.view_src == ffi.NULL

    def likeliest(self, choices: Sequence[tuple[int, np.ndarray]]) -> list[int]:
        """The tokens with the largest logits among those that are allowed; any token where none is.

        Args:
            choices: (row, bits) each, bits as ``Grammar.bits`` gives them.
        """
        out: list[int] = []
        for first in range(0, len(choices), self._sizes[-1]):
            part = choices[first : first + self._sizes[-1]]
            out += self._run(part, 0).host["ids"][: len(part)].tolist()
        return out

    def largest(self, row: int, bits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """I32 [count] ids and F32 [count] logits of the likeliest tokens that are allowed; -inf where there are not as many."""
        count = min(count, self.n_vocab)
        step = self._run([(row, bits)], count)
        logits = step.host["best_logits"].copy()
        logits[logits < -FAR / 2] = -np.inf
        return step.host["best_ids"].copy(), logits

    def _run(self, choices: Sequence[tuple[int, np.ndarray]], count: int) -> Step:
        step = self._graph(next(n for n in self._sizes if len(choices) <= n), count)
        rows = step.host["rows"]
        rows[:] = 0
        for i, (row, bits) in enumerate(choices):
            rows[i] = row
            step.fields.put_bits("bits", i, bits)
        for i in range(len(choices), rows.size):  # not read, but has to be finite
            step.fields.put_bits("bits", i, choices[0][1][:0])
        step.host["each"][:] = np.arange(rows.size)
        step.fields.run()
        return step

    def _graph(self, n: int, count: int) -> Step:
        """Of ``n`` rows; ``count`` of each one's largest logits, 0 for the likeliest token alone."""
        step = self._graphs.get((n, count))
        if step is not None and not step.graph.stale:
            return step
        if step is not None:
            step.graph.close()
        g = Graph(self._role)
        try:
            f = StepFields(self.io, g)
            signs = g.rows(f.signs("bits", self.n_vocab, n), f.input("each", "i32", n))
            away = g.scale(g.clamp(signs, -1.0, 0.0), FAR)
            logits = g.add(g.rows(self.logits, f.input("rows", "i32", n)), g.slice(away, 0, 0, self.n_vocab))
            if count:
                ids, values = g.top_k_unordered(logits, count)
                f.output("best_ids", "i32", ids)
                f.output("best_logits", "f32", values)
            else:
                f.output("ids", "i32", g.argmax(logits))
            g.plan()
        except BaseException:
            g.close()
            raise
        step = self._graphs[n, count] = Step(g, f, {})
        return step

    def close(self) -> None:
        for step in self._graphs.values():
            step.graph.close()
        self._graphs = {}
        for part in (self._role, self.io):
            if part is not None:
                part.close()
        self._role = self.io = None
        if self._buffer is not None:
            lib.ggml_backend_buffer_free(self._buffer)
            lib.ggml_free(self._ctx)
            self._buffer = None


def masked_rows(backend: Backend, n_vocab: int, rows: int, most: int) -> tuple[MaskedRows | None, str]:
    """None where the backend lacks an operation or memory, and the reason: whole rows are read then."""
    try:
        return MaskedRows(backend, n_vocab, rows, most), ""
    except (DeviceError, EngineError) as error:
        return None, f"constraints read whole rows of logits, which is slower: {error}"
