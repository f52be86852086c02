"""Steps whose graphs have exactly the rows that they are given, as llama.cpp's batches have: for parity checks and the doctor."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..cache.slots import SlotRange
from ..checks import whole
from ..ggml.library import Tensor, lib, read_tensor
from .batch import Batch, Prefill
from .graph_cache import Step
from .prompt import Prompt, pictures_of


class ExactSteps:
    """Of a ``ModelRunner``. All of them commit their tokens and write no drafter rows; results can be compared bit for bit with llama.cpp's."""

    def logits(self: Any, tokens: Sequence[int], slot: int = 0) -> np.ndarray:
        """Logits after each of ``tokens``, F32 [T, n_vocab], in graphs of exactly their number of rows (chunked by the prefill chunk)."""
        ids = self.state.next_tokens(tokens, slot)
        out = np.empty((ids.size, self.target.n_vocab), np.float32)
        for first, n, step in self._exact_chunks("logits", ids, slot, prompt=tokens):
            block = out[first : first + n]
            self._read(step.extra["logits"], block)
            self.slots[slot].cursor.last_token = int(block[-1].argmax())
        return out

    def nodes(self: Any, tokens: Sequence[int], slot: int = 0) -> dict[str, np.ndarray]:
        """F32 values of the nodes that models name, of one graph over ``tokens``, which fit a chunk; empty unless ``Graph.debug`` was set."""
        ((_, _, step),) = self._exact_chunks("logits", self.state.next_tokens(tokens, slot), slot)
        out = {}
        for name, node in (step.graph.named or {}).items():
            out[name] = np.empty(lib.ggml_nbytes(node) // 4, np.float32)
            self._read(node, out[name])
        return out

    def logits_together(self: Any, prompts: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Logits of all tokens of several slots, F32 [T, n_vocab] each, in one forward pass as wide as the longest (one prefill chunk at
        most). There is no last token then."""
        batch, out = Batch({slot: Prefill(tokens) for slot, tokens in prompts.items()}), {}
        self.resources.synchronize()
        self.state.check(batch)
        width = max(batch.rows.values())
        tensor = self._exact(batch, "logits", width).extra["logits"]
        for slot, n in batch.rows.items():
            self.slots[slot].cursor.advance(n, None)
            out[slot] = np.empty((n, self.target.n_vocab), np.float32)
            self._read(tensor, out[slot], (slot - batch.slots.first) * width * tensor.nb[1])
        return out

    def capture(self: Any, tokens: Sequence[int], layers: Sequence[int], slot: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Greedy ids after each of ``tokens``, I32 [T], and the inputs of the target ``layers``, F32 [len(layers), T, n_embd].

        Layer v means what it does in a drafter's ``target_layers``: n_layer is the last layer's output.

        Raises:
            ContextError: as ``prefill``.
            EngineError: a layer that the target does not have.
        """
        layers = tuple(whole(v, "a captured layer", 0, self.target.n_layer) for v in layers)
        ids = self.state.next_tokens(tokens, slot)
        chosen, out = np.empty(ids.size, np.int32), np.empty((len(layers), ids.size, self.target.n_embd), np.float32)
        for first, n, step in self._exact_chunks("capture", ids, slot, layers):
            chosen[first : first + n] = step.ids()
            for block, feature in zip(out[:, first : first + n], step.extra["features"], strict=True):
                self._read(feature, block)
            self.slots[slot].cursor.last_token = int(chosen[first + n - 1])
        return chosen, out

    def _exact_chunks(
        self: Any, kind: str, ids: np.ndarray, slot: int, layers: tuple[int, ...] = (), prompt: Sequence[int] = ()
    ) -> Iterator[tuple[int, int, Step]]:
        """Computes ``ids`` in chunks of their own number of rows; yields each one's first row, number of rows and step. ``prompt``: the same, where it may have
        pictures; then it is the whole sequence, and a chunk is one picture, or text."""
        cursor, chunk = self.slots[slot].cursor, self.options.chunk
        self.resources.synchronize()
        edges = sorted({edge for first, picture in pictures_of(prompt) for edge in (first, first + picture.rows)} | {0, ids.size})
        starts = [start for low, high in pairwise(edges) for start in range(low, high, chunk)]
        for first, end in pairwise([*starts, ids.size]):
            part, rows = ids[first:end], prompt.rows_of(first, end - first) if isinstance(prompt, Prompt) else None
            batch = Batch(
                {}, computed={slot: Prefill(part, pictures=rows)}, rows={slot: part.size}, slots=SlotRange(slot, 1), layers=layers
            )
            batch.pictures = rows is not None
            if isinstance(prompt, Prompt):
                self.slots[slot].lag = prompt.lag
            step = self._exact(batch, kind, part.size)
            cursor.advance(part.size, None)
            yield first, part.size, step

    def _exact(self: Any, batch: Batch, kind: str, width: int) -> Step:
        batch.kind, batch.verify_len, batch.adapters = kind, width, self.slots[batch.slots.first].adapters
        batch.drafting, batch.candidates, batch.keep_logits = self.drafter is not None, 0, False
        step = self.graph_of(batch)
        self.run(step, batch, None, read=False)
        self.stored(step, batch)
        return step

    def _read(self: Any, tensor: Tensor, out: np.ndarray, at: int = 0) -> None:
        read_tensor(tensor, out, at, self.io.workers)
