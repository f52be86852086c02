"""Steps whose graphs have exactly the rows that they are given, as llama.cpp's batches have: what parity checks and the doctor look at."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..cache.slots import SlotRange
from ..ggml.library import Tensor, lib, read_tensor
from .batch import BatchItem, Prefill
from .graph_cache import Step
from .resources import Resources
from .steps import Steps


def logits(parts: Resources, steps: Steps, ids: np.ndarray, slot: int) -> np.ndarray:
    """Logits after each of ``ids``, F32 [T, n_vocab]."""
    out = np.empty((ids.size, parts.target.n_vocab), np.float32)
    for first, n, step in _chunks(parts, steps, "logits", ids, slot):
        block = out[first : first + n]
        _read(parts, step.extra["logits"], block)
        parts.slots[slot].cursor.last_token = int(block[-1].argmax())
    return out


def nodes(parts: Resources, steps: Steps, ids: np.ndarray, slot: int) -> dict[str, np.ndarray]:
    """F32 values of the nodes that models name, in the order of the graph, behind ``ids`` in one chunk."""
    ((_, _, step),) = _chunks(parts, steps, "logits", ids, slot)
    out = {}
    for name, node in (step.graph.named or {}).items():
        out[name] = np.empty(lib.ggml_nbytes(node) // 4, np.float32)
        _read(parts, node, out[name])
    return out


def logits_together(
    parts: Resources, steps: Steps, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange
) -> dict[int, np.ndarray]:
    """Logits of all rows of several slots, F32 [T, n_vocab] each, in one pass as wide as the longest."""
    parts.graphs.candidates = 0
    width, out = max(rows.values()), {}
    step = steps.rows("logits", work, rows, covered, width)[0]
    tensor = step.extra["logits"]
    for slot, n in rows.items():
        parts.slots[slot].cursor.advance(n, None)
        out[slot] = np.empty((n, parts.target.n_vocab), np.float32)
        _read(parts, tensor, out[slot], (slot - covered.first) * width * tensor.nb[1])
    return out


def capture(parts: Resources, steps: Steps, ids: np.ndarray, layers: Sequence[int], slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy ids after each of ``ids``, I32 [T], and the inputs of the target's ``layers``, F32 [len(layers), T, n_embd]."""
    chosen = np.empty(ids.size, np.int32)
    out = np.empty((len(layers), ids.size, parts.target.n_embd), np.float32)
    for first, n, step in _chunks(parts, steps, "capture", ids, slot, tuple(layers)):
        chosen[first : first + n] = step.ids()
        for block, feature in zip(out[:, first : first + n], step.extra["features"], strict=True):
            _read(parts, feature, block)
        parts.slots[slot].cursor.last_token = int(chosen[first + n - 1])
    return chosen, out


def _chunks(parts: Resources, steps: Steps, role: str, ids: np.ndarray, slot: int, *more: object) -> Iterator[tuple[int, int, Step]]:
    """Computes ``ids`` in chunks of their own number of rows; gives each one's first row, number of rows and step."""
    for first in range(0, ids.size, parts.options.chunk):
        part, s = ids[first : first + parts.options.chunk], parts.slots[slot]
        parts.graphs.aim([s])
        step = steps.rows(role, {slot: Prefill(part)}, {slot: part.size}, SlotRange(slot, 1), part.size, None, *more)[0]
        s.cursor.advance(part.size, None)
        yield first, part.size, step


def _read(parts: Resources, tensor: Tensor, out: np.ndarray, at: int = 0) -> None:
    read_tensor(tensor, out, at, parts.io.workers)
