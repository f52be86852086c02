"""Is this engine right for this file? The same token ids through our engine and through llama.cpp, and how far the logits are apart."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..errors import ContextError
from ..ggml.device import Backend, pick_device
from ..gguf_io import GGUFFile
from ..memory.kv_types import KVTypes
from ..models.registry import open_target
from ..models.rope import RopeOptions
from ..models.weights import Weights
from ..text.tokenizer import Tokenizer
from .reference import LlamaReference

CHUNK = 512
# Words, code, numbers and letters outside ASCII: what logits of a trained model are sharp on, as they are not on random ids.
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
    """How our logits differ from llama.cpp's on the same tokens.

    Attributes:
        nmse: sum of squared differences over the sum of squared reference logits; 0.0 means bit-equal.
        max_abs: largest difference of any logit.
        argmax_agree: fraction of rows with the same greedy token.
        greedy_agree: equal tokens of 64 that each side then generates greedily, as a fraction, up to the first difference.
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
    """Feeds ``tokens`` random ids, or the first ``tokens`` of ``text``, to both engines, in graphs of exactly the same number of rows, then decodes ``greedy`` tokens greedily on both.

    ``kernels``, ``rope``: as for ``load``. ggml's give llama.cpp's logits bit for bit; our own sum in another order.

    Raises:
        ContextError: more tokens than the model's context.
        PyspecError: the file cannot be run here.
    """
    if tokens < 1:
        raise ContextError(f"{tokens} tokens cannot be compared; use `tokens` 1 or more")
    parts, kv = [], KVTypes(cache_type_k, cache_type_v)

    def own(part):
        parts.append(part)
        return part

    try:
        file = own(GGUFFile(path))
        file.rope = rope
        target = open_target(file)
        if tokens + greedy > target.context_length:
            raise ContextError(
                f"{tokens} tokens and {greedy} generated ones do not fit the context of {target.context_length}; use fewer `tokens`"
            )
        backend = own(Backend(pick_device(device), threads, kernels))
        target.weights = own(Weights(backend, file, target.specs(), target.groups(), target.fused_alike()))
        if text is not None:
            ids = own(Tokenizer(file)).encode(text)[:tokens]
            if not ids:
                raise ContextError("the text to compare on is empty; give some words")
        else:
            ids = np.random.default_rng(seed).integers(0, target.n_vocab, tokens).tolist()
        n_ctx = len(ids) + greedy
        engine = own(Engine(backend, target, None, EngineOptions(n_ctx=n_ctx, width=1, chunk=CHUNK, kv=kv)))
        reference = own(LlamaReference(file.path, backend.device, n_ctx, CHUNK, backend.threads, kv, rope))
        ours, theirs = engine.logits(ids), reference.logits(ids)
        agree = _greedy_agreement(engine, reference, int(ours[-1].argmax()), int(theirs[-1].argmax()), greedy)
        return Comparison(nmse(ours, theirs), float(np.abs(ours - theirs).max()), _argmax_agreement(ours, theirs), agree, len(ids))
    finally:
        for part in reversed(parts):
            part.close()


def nmse(ours: np.ndarray, reference: np.ndarray) -> float:
    """Squared error over squared reference, in double precision."""
    a, b = ours.astype(np.float64), reference.astype(np.float64)
    return float(((a - b) ** 2).sum() / max((b**2).sum(), 1e-300))


def _argmax_agreement(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean())


def _greedy_agreement(engine: Engine, reference: LlamaReference, ours: int, theirs: int, tokens: int) -> float:
    """Fraction of ``tokens`` that agree before the first difference; both sides decode one row at a time."""
    agreed = 0
    while ours == theirs and agreed < tokens:
        agreed += 1
        if agreed == tokens:
            break
        result = engine.plain_step()
        ours, theirs = int(result.ids[0]), int(reference.logits([theirs])[0].argmax())
        engine.accept(1, ours)
    return agreed / tokens
