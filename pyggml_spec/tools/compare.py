"""Parity check: the same token ids through this engine and llama.cpp."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.kv import KVTypes
from ..engine.options import EngineOptions
from ..engine.runner import ModelRunner
from ..errors import ContextError
from ..ggml.device import Backend, pick_device
from ..ggml.graph import Graph
from ..ggml.library import ffi, lib, read_tensor
from ..gguf_io import GGUFFile
from ..models.registry import open_target
from ..models.rope import RopeOptions
from ..models.weights import VECTOR, Weights
from ..text.tokenizer import Tokenizer
from .reference import LlamaReference

CHUNK = 512
CHANGES = 2.0**-22, 2.0**-20, 2.0**-17  # of a norm, relative: as much as another order of sums changes them
# Words, code, numbers and non-ASCII letters: a trained model is sharper on them than on random ids.
TEXT = """The lighthouse at the end of the harbour was built in 1862. Every evening, when the boats came home, its keeper counted them and wrote the number
into a book: 14 on the 3rd of May, 12 on the 4th, and none on the night of the storm. "They will be here tomorrow," she said - and they were.

def primes(limit):
    sieve = [True] * (limit + 1)
    for n in range(2, int(limit ** 0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    return [n for n in range(2, limit + 1) if sieve[n]]

| city | population | founded |
|---|---|---|
| Zürich | 447 082 | 15 BC |
| 東京 | 14 094 034 | 1457 |
"""


@dataclass(frozen=True)
class Comparison:
    """Differences of the logits on the same tokens.

    Attributes:
        nmse: squared error over squared reference; 0.0 means bit-equal.
        max_abs: largest difference.
        argmax_agree: share of rows with the same argmax.
        greedy_agree: common prefix of 64 greedy tokens, as a share.
        tokens: tokens compared.
    """

    nmse: float
    max_abs: float
    argmax_agree: float
    greedy_agree: float
    tokens: int

    def as_dict(self) -> dict:
        return asdict(self)


def compare_logits(
    path: str | Path,
    tokens: int = 64,
    seed: int = 0,
    device: str | None = None,
    threads: int | None = None,
    kernels: str | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    rope: RopeOptions | None = None,
    greedy: int = 64,
    text: str | None = None,
) -> Comparison:
    """Feeds ``tokens`` random ids, or the first ones of ``text``, to both engines with the same batch shapes, then decodes ``greedy``
    tokens on both. ``kernels``, ``rope``: as for ``load``. ggml's kernels give llama.cpp's logits bit for bit; native kernels sum in
    another order. Raises ContextError: more tokens than the context; PyspecError: the file cannot run here."""
    kv = KVTypes(cache_type_k, cache_type_v)
    (found,) = compare_each(path, {tokens: seed}, greedy, text, device=device, threads=threads, kernels=kernels, kv=kv, rope=rope)
    return found


def compare_each(path: str | Path, seeds: Mapping[int, int], greedy: int = 64, text: str | None = None, **options: Any) -> list[Comparison]:
    """As ``compare_logits`` of each number of tokens in ``seeds``, one after the other in one context. ``options``: device,
    threads, kernels, rope as there, and ``kv``, the types of both caches."""
    if min(seeds) < 1:
        raise ContextError(f"{min(seeds)} tokens cannot be compared; use `tokens` 1 or more")
    out = []
    with _both(path, max(seeds), greedy, **options) as (engine, reference):
        for tokens, seed in seeds.items():
            engine.reset()
            reference.reset()
            ids = _ids(engine, tokens, seed, text)
            ours, theirs = engine.logits(ids), reference.logits(ids)
            agree = _greedy_agreement(engine, reference, int(ours[-1].argmax()), int(theirs[-1].argmax()), greedy)
            argmax_agree = float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean())
            out.append(Comparison(nmse(ours, theirs), float(np.abs(ours - theirs).max()), argmax_agree, agree, len(ids)))
    return out


def rounding_of_logits(
    path: str | Path,
    tokens: int = 64,
    seed: int = 0,
    device: str | None = None,
    threads: int | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    rope: RopeOptions | None = None,
    text: str | None = None,
) -> float:
    """The largest NMSE by which llama.cpp's own logits (those of ggml's kernels) of these tokens change where a norm of the first layers changes by a few
    millionths: what another order of sums does to a model whose activations are rounded to 8 bits. Arguments as of ``compare_logits``; 0 without a norm."""
    with _engine(path, tokens, 0, device, threads, "ggml", KVTypes(cache_type_k, cache_type_v), rope) as engine:
        ids, weights = _ids(engine, tokens, seed, text), engine.target.weights
        logits, largest = engine.logits(ids), 0.0
        norms = [spec.name for spec in engine.target.specs() if spec.use == VECTOR and spec.name.endswith("norm.weight")]
        norm = next((name for name in norms if name.startswith("blk.")), None)
        if norm is None:
            return 0.0
        tensor = weights[norm]
        values = np.empty(tensor.ne[0], np.float32)
        read_tensor(tensor, values, 0, ())
        for change in CHANGES:
            changed = values * np.float32(1 + change)
            lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(changed), 0, changed.nbytes)
            engine.reset()
            largest = max(largest, nmse(engine.logits(ids), logits))
        return largest


def _ids(engine: ModelRunner, tokens: int, seed: int, text: str | None) -> list[int]:
    """Random ids, or the first ones of ``text``."""
    if text is None:
        return np.random.default_rng(seed).integers(0, engine.target.n_vocab, tokens).tolist()
    with closing(Tokenizer(engine.target.file)) as tokenizer:
        ids = tokenizer.encode(text)[:tokens]
    if not ids:
        raise ContextError("the text to compare on is empty; give some words")
    return ids


@dataclass(frozen=True)
class NodeDifference:
    """A node by llama.cpp's name, with its layer number. ``nmse`` 0.0 means bit-equal, NaN another shape."""

    name: str
    nmse: float
    max_abs: float


def compare_nodes(
    path: str | Path, tokens: int = 16, seed: int = 0, device: str | None = None, threads: int | None = None, kernels: str | None = "ggml"
) -> list[NodeDifference]:
    """Compares the nodes named in both graphs, in graph order, after one batch of random ``tokens``. Raises ContextError: more tokens than
    the context or one graph takes; PyspecError: the file cannot run here."""
    if not 0 < tokens <= CHUNK:
        raise ContextError(f"{tokens} tokens cannot be compared node by node; use `tokens` from 1 to {CHUNK}")
    Graph.debug = True
    try:
        with _both(path, tokens, 0, device, threads, kernels, watch=True) as (engine, reference):
            ids = _ids(engine, tokens, seed, None)
            ours = engine.nodes(ids)
            reference.watched = ours.keys()
            reference.logits(ids)
            out = []
            for name in filter(reference.nodes.__contains__, ours):
                a, b = ours[name], reference.nodes[name]
                same = a.size == b.size
                out.append(NodeDifference(name, nmse(a, b) if same else np.nan, float(np.abs(a - b).max()) if same else np.nan))
            return out
    finally:
        Graph.debug = False


@contextmanager
def _both(path: str | Path, tokens: int, greedy: int, device: str | None, threads: int | None, kernels: str | None, kv: KVTypes = KVTypes(),
          rope: RopeOptions | None = None, watch: bool = False) -> Iterator[tuple[ModelRunner, LlamaReference]]:  # fmt: skip
    """The file in both engines."""
    with _engine(path, tokens, greedy, device, threads, kernels, kv, rope) as engine:
        backend, n_ctx = engine.backend, engine.options.n_ctx
        with closing(LlamaReference(engine.target.file.path, backend.device, n_ctx, CHUNK, backend.threads, kv, rope, watch)) as reference:
            yield engine, reference


@contextmanager
def _engine(
    path: str | Path, tokens: int, greedy: int, device: str | None, threads: int | None, kernels: str | None, kv: KVTypes, rope: RopeOptions | None
) -> Iterator[ModelRunner]:  # fmt: skip
    with ExitStack() as stack:
        file = stack.enter_context(closing(GGUFFile(path)))
        file.rope = rope
        target = open_target(file)
        n_ctx = tokens + greedy
        if n_ctx > target.context_length:
            there = f"the context of {target.context_length}; use fewer `tokens`"
            raise ContextError(f"{tokens} tokens and {greedy} generated ones do not fit {there}")
        backend = stack.enter_context(closing(Backend(pick_device(device), threads, kernels)))
        target.weights = stack.enter_context(closing(Weights(backend, file, target.specs(), target.groups(), target.fused_alike())))
        yield stack.enter_context(closing(ModelRunner(backend, target, None, EngineOptions(n_ctx=n_ctx, width=1, chunk=CHUNK, kv=kv))))


def nmse(ours: np.ndarray, reference: np.ndarray) -> float:
    """Squared error over squared reference, in double precision."""
    a, b = ours.astype(np.float64), reference.astype(np.float64)
    return float(((a - b) ** 2).sum() / max((b**2).sum(), 1e-300))


def _greedy_agreement(engine: ModelRunner, reference: LlamaReference, ours: int, theirs: int, tokens: int) -> float:
    """Common prefix of greedy decoding on both sides, as a share of ``tokens``."""
    agreed = 0
    while ours == theirs and agreed < tokens:
        agreed += 1
        if agreed == tokens:
            break
        result = engine.plain_step()
        ours, theirs = int(result.ids[0]), int(reference.logits([theirs])[0].argmax())
        engine.accept(1, ours)
    return agreed / tokens
