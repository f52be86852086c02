"""Steps whose graphs have exactly the rows that they are given, as llama.cpp's batches have: for parity checks and the doctor."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..cache.slots import SlotRange
from ..ggml.library import Tensor, lib, read_tensor
from .batch import Batch, Prefill
from .graph_cache import Step

Runner = Any  # ModelRunner, which imports this module


def logits(runner: Runner, ids: np.ndarray, slot: int) -> np.ndarray:
    """Logits after each of ``ids``, F32 [T, n_vocab]."""
    out = np.empty((ids.size, runner.target.n_vocab), np.float32)
    for first, n, step in _chunks(runner, "logits", ids, slot):
        block = out[first : first + n]
        _read(runner, step.extra["logits"], block)
        runner.slots[slot].cursor.last_token = int(block[-1].argmax())
    return out


def nodes(runner: Runner, ids: np.ndarray, slot: int) -> dict[str, np.ndarray]:
    """F32 values of the nodes that models name, in the order of the graph, of ``ids`` in one chunk."""
    ((_, _, step),) = _chunks(runner, "logits", ids, slot)
    out = {}
    for name, node in (step.graph.named or {}).items():
        out[name] = np.empty(lib.ggml_nbytes(node) // 4, np.float32)
        _read(runner, node, out[name])
    return out


def logits_together(runner: Runner, batch: Batch) -> dict[int, np.ndarray]:
    """Logits of all rows of several slots, F32 [T, n_vocab] each, in one pass as wide as the longest."""
    width, out = max(batch.rows.values()), {}
    step = _run(runner, batch, "logits", width)
    tensor = step.extra["logits"]
    for slot, n in batch.rows.items():
        runner.slots[slot].cursor.advance(n, None)
        out[slot] = np.empty((n, runner.target.n_vocab), np.float32)
        _read(runner, tensor, out[slot], (slot - batch.slots.first) * width * tensor.nb[1])
    return out


def capture(runner: Runner, ids: np.ndarray, layers: Sequence[int], slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy ids after each of ``ids``, I32 [T], and the inputs of the target's ``layers``, F32 [len(layers), T, n_embd]."""
    chosen = np.empty(ids.size, np.int32)
    out = np.empty((len(layers), ids.size, runner.target.n_embd), np.float32)
    for first, n, step in _chunks(runner, "capture", ids, slot, tuple(layers)):
        chosen[first : first + n] = step.ids()
        for block, feature in zip(out[:, first : first + n], step.extra["features"], strict=True):
            _read(runner, feature, block)
        runner.slots[slot].cursor.last_token = int(chosen[first + n - 1])
    return chosen, out


def _chunks(runner: Runner, kind: str, ids: np.ndarray, slot: int, layers: tuple[int, ...] = ()) -> Iterator[tuple[int, int, Step]]:
    """Computes ``ids`` in chunks of their own number of rows; yields each one's first row, number of rows and step."""
    cursor = runner.slots[slot].cursor
    for first in range(0, ids.size, runner.options.chunk):
        part = ids[first : first + runner.options.chunk]
        items, rows = {slot: Prefill(part)}, {slot: part.size}
        batch = Batch({}, computed=items, rows=rows, context=cursor.committed, slots=SlotRange(slot, 1), layers=layers)
        step = _run(runner, batch, kind, part.size)
        cursor.advance(part.size, None)
        yield first, part.size, step


def _run(runner: Runner, batch: Batch, kind: str, width: int) -> Step:
    batch.drafting, batch.candidates, batch.keep_logits = runner.drafter is not None, 0, False
    step = runner.prepare_rows(batch, kind, width)
    runner.run(step, batch, None)
    runner.stored(step, batch)
    return step


def _read(runner: Runner, tensor: Tensor, out: np.ndarray, at: int = 0) -> None:
    read_tensor(tensor, out, at, runner.io.workers)
