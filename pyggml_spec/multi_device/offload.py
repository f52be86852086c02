"""Layers in host memory of which wide chunks of prompts are computed on another device, with copies of their weights, K/V rows and states.

The host's own weights may be packed for its kernels, so the weights are read from the file once more, into memory that the device copies from by
itself where it has such. A layer is copied whole while the one before computes (``ggml/weight_stream.py``). K/V rows and states are copied to the
device before a chunk, and the new ones back after it: between steps a sequence is on its own device.

From how many rows on copies are used is measured: copying takes as long for 32 rows as for 512, and the host's products take about as long as there
are rows, so the first chunk that copies make faster says that all wider ones are, too.
"""

import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..cache.kv import KVCache
from ..cache.recurrent import RecurrentState
from ..cache.slots import Cursor
from ..cache.snapshot import Pieces, SequenceMemory
from ..engine.runner import ModelRunner
from ..errors import DeviceError
from ..folders import cache_folder
from ..ggml.device import Backend, device_handle, free_bytes
from ..ggml.library import Buffer, BufferType, Context, Tensor, ffi, lib
from ..ggml.weight_stream import WeightStream
from ..gguf_io import TensorInfo
from ..models.weights import Spec, Weights
from ..speculation.calibrate import SEED, Waiting, cost_key, keep, kept

RUNS = 3  # of each chunk, after one that is not counted
NEVER = 1 << 30  # rows


class OffloadedWeights(Weights):
    """``weights[name]`` are the copies of a layer that a stream brings, of whichever layer it has brought last.

    Attributes:
        layers: by the number of a layer, its tensors in host memory.
    """

    def __init__(self, device: Weights, home: Weights, specs: Iterable[Spec], groups: dict[str, tuple[str, ...]], *more: Any) -> None:
        """``device``: what every layer may read. ``home``: the same layers on the host. ``more``: as of ``Weights``."""
        self._home, self._own_of_device = home, device
        self._fused_at_home = {members[0]: len(home.group(name).runs[0].rows) for name, members in groups.items()}
        super().__init__(device.backend, home.file, specs, groups, *more)
        self.layers: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self._tensors.items():
            self.layers.setdefault(int(name.split(".")[1]), {})[name] = tensor

    def _types_of(self, backend: Backend) -> list[BufferType | None]:
        return [backend.default_buffer_type]

    def fusable(self, parts: list[tuple[Spec, TensorInfo]]) -> int:
        """As many as at home: a recurrent state keeps fused projections whole, and its rows are copied between the two."""
        return self._fused_at_home[parts[0][0].name]

    def _new_buffer(self, ctx: Context, home: int) -> Buffer:
        kind = lib.ggml_backend_dev_host_buffer_type(device_handle(self.backend.device)) or lib.ggml_backend_cpu_buffer_type()
        if self.backend.counting:
            return self.backend.allocate(ctx, kind)
        need, free = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, kind), free_bytes(self._home.backend.device)
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(ctx, kind) if need <= free else ffi.NULL
        if buffer == ffi.NULL:
            raise DeviceError(f"copies of its layers need {need >> 20} MiB of host memory in addition, of which {free >> 20} are free")
        return buffer

    def _make_groups(self, groups: dict[str, list[tuple[str, ...]]], found: dict) -> None:
        self._grouped = groups, found
        super()._make_groups(groups, found)

    def lend(self, stream: WeightStream) -> None:
        """From now on names are those of the stream's tensors on the device."""
        for tensors in stream.layers.values():
            self._tensors.update(tensors)
        self._groups.clear()
        super()._make_groups(*self._grouped)

    # -- what every layer may read

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name] if name in self._tensors else self._own_of_device[name]

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name) or self._own_of_device.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._own_of_device


class OffloadCache:
    """Borrows the caches.

    Attributes:
        kv, delta: of these layers, on the device that computes; None where they have no states.
        brought, taken: bytes copied so far, to it and back.
    """

    def __init__(self, kv: KVCache, delta: RecurrentState | None, there: SequenceMemory, home: SequenceMemory, slots: int) -> None:
        self.kv, self.delta, self._there, self._home = kv, delta, there, home
        self.brought = self.taken = 0
        self._there_is = [-1] * slots  # by slot, of how many tokens all is there that they left; -1: of none, not even of an empty sequence

    def bring(self, slot: int, cursor: Cursor) -> None:
        """What a slot's committed tokens left, as far as it is not there."""
        n, there_is = cursor.committed, self._there_is[slot]
        if there_is == n <= cursor.min_committed:
            return
        same = max(0, min(there_is, cursor.min_committed, n))
        self.brought += _copy(self._home.rows(same, n - same, False, slot), self._there.rows(same, n - same, False, slot))
        self.brought += _copy(self._home.state(n, False, slot), self._there.state(n, False, slot))

    def take_back(self, slot: int, n: int, count: int) -> None:
        """What ``count`` tokens after the first ``n`` left; follow with ``agree`` once they count."""
        self.taken += _copy(self._there.rows(n, count, False, slot), self._home.rows(n, count, False, slot))
        self.taken += _copy(self._there.state(n + count, False, slot), self._home.state(n + count, False, slot))
        self._there_is[slot] = n + count

    def agree(self, slot: int, cursor: Cursor) -> None:
        """What was taken back counts: until the cursor moves otherwise, both devices have the same."""
        if self._there_is[slot] == cursor.committed:
            cursor.min_committed = cursor.committed

    def clear(self, slot: int) -> None:
        """Writes zeros over what the slot's sequence left, which may be NaN. The states of one slot alone are brought whole."""
        self._there_is[slot] = -1
        self.kv.fill_slot(slot, 0)
        if self.delta is not None and not self.delta.inline:
            self.delta.fill_slot(slot, 0)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose, as of ``Resources.memory``."""
        return {"kv": self.kv.nbytes} | ({"recurrent": self.delta.nbytes} if self.delta is not None else {})


def _copy(source: Pieces, target: Pieces) -> int:
    """Between devices; waits for both. Returns how many bytes."""
    with source, target:
        for mine, theirs, a, b in zip(source.tensors, target.tensors, source.backends, target.backends, strict=True):
            lib.ggml_backend_tensor_copy_async(a.handle, b.handle, mine, theirs)
        for backend in dict.fromkeys((*source.backends, *target.backends)):
            backend.synchronize()
        return source.nbytes


class Chunk(NamedTuple):
    """Milliseconds of a chunk of ``rows`` rows: as the ``host`` computes what it has, and with ``copies`` of it on the device."""

    rows: int
    host: float
    copies: float


def chunk_cost(engine: ModelRunner, rows: int, copies: bool) -> float:
    """Milliseconds of a chunk of ``rows`` rows, with copies or without: the median of RUNS. Forgets the sequence. Leaves the streams at that."""
    random, runs = np.random.default_rng(SEED), []
    for stream in engine.target.weights.streams:
        stream.rows = 1 if copies else NEVER
    for _ in range(1 + RUNS):
        ids = random.integers(0, engine.target.n_vocab, rows)
        engine.reset()
        began = time.perf_counter()
        engine.prefill(ids.tolist())
        runs.append(time.perf_counter() - began)
    engine.reset()
    return 1000 * statistics.median(runs[1:])


def chunk_costs(engine: ModelRunner) -> list[Chunk]:
    """Of ascending chunks, up to the first that copies make faster."""
    out: list[Chunk] = []
    for rows in engine.resources.chunks:
        if rows >= engine.options.n_ctx:
            break
        out.append(Chunk(rows, chunk_cost(engine, rows, False), chunk_cost(engine, rows, True)))
        if out[-1].copies < out[-1].host:
            break
    return out


def settle(engine: ModelRunner) -> Chunk | None:
    """Measures from which chunk on copies are faster, or reads the kept result, and has the streams take all chunks from it on; none if copies make
    none faster. Returns the last chunk that was measured, or None."""
    chunks = engine.resources.chunks
    names = {f"{rows} rows, {way}": (rows, way) for rows in chunks for way in ("host", "copies")}
    path = cache_folder() / f"chunks-{cost_key(engine, chunks)}.json"
    stored = kept(path, names) or {}
    ways = [(rows, stored.get((rows, "host")), stored.get((rows, "copies"))) for rows in chunks]
    found = [Chunk(rows, host, copies) for rows, host, copies in ways if host is not None and copies is not None]
    if not found:
        with Waiting(engine) as waiting:
            found = chunk_costs(engine)
        if found and not waiting.much:
            keep(path, {f"{chunk.rows} rows, {way}": getattr(chunk, way) for chunk in found for way in ("host", "copies")})
    rows = next((chunk.rows for chunk in found if chunk.copies < chunk.host), NEVER)
    for stream in engine.target.weights.streams:
        stream.rows = rows
    return found[-1] if found else None
