"""Embeddings and rankings of texts by libllama.

Models made for it have encoders, poolings and heads of their own, and nothing is generated with them: a graph here would have llama.cpp's nodes for llama.cpp's bits.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .checks import whole
from .errors import ContextError, DeviceError, ModelError
from .ggml.cores import default_threads
from .ggml.device import devices, pick_devices
from .ggml.library import ffi, lib, text
from .gguf_io import GGUFFile
from .models.decoder import ARCHITECTURES
from .models.registry import open_target
from .text.tokenizer import Tokenizer

POOLINGS = ("none", "mean", "cls", "last", "rank")  # by libllama's numbers
ENCODERS = (
    "bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert", "modern-bert", "gemma-embedding",
)  # fmt: skip
DEFAULT_CONTEXT, BATCH, MOST_TEXTS = 8192, 2048, 64  # tokens of a text and of a batch, at least; texts of a batch


class Embedder:
    """A model and a context of libllama. Owns both, and the tokenizer; to be used by one thread at a time.

    Attributes:
        n_ctx: tokens of a text at most.
        pooling: of ``POOLINGS``.
        n_embd: values of an embedding.
        nbytes: what it takes, where it is ``counted``.
    """

    def __init__(
        self, path: str | Path, device: str | None = None, n_ctx: int | None = None, threads: int | None = None, pooling: str | None = None,
        *, counted: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            device: as of ``LoadOptions``, one.
            n_ctx: tokens of a text at most; None for the trained context, or DEFAULT_CONTEXT if that is less.
            pooling: None takes the file's, or that of the last token.
            counted: reads no weights and allocates no buffers: it embeds nothing, and says what it would take.

        Raises:
            ModelError: an architecture without embeddings, or without the head that ``pooling`` needs.
            DeviceError: several devices, or no memory.
        """
        self.file = GGUFFile(path)
        self.arch = arch = self.file.get("general.architecture", str)
        if arch not in ENCODERS:
            if arch not in ARCHITECTURES:
                known = f"{', '.join(ENCODERS)}, and those that generate text"
                raise ModelError(f"{self.file.path} is of the architecture {arch!r}, which has no embeddings here; these have: {known}")
            open_target(self.file).specs()  # refuses what libllama might not survive
        if pooling not in (None, *POOLINGS):
            raise ModelError(f"the pooling is {pooling!r}; use one of {', '.join(POOLINGS)}")
        if pooling == "rank" and not any(name.startswith("cls") for name in self.file.tensors):
            raise ModelError(f"{self.file.path} has no head for rankings (cls.output.weight); use a reranker, or another pooling")
        self.tokenizer = Tokenizer(self.file)
        self._ctx = self._model = ffi.NULL
        self.nbytes = 0
        try:
            self._open(device, n_ctx, threads, pooling, counted)
        except BaseException:
            self.close()
            raise

    def _open(self, device: str | None, n_ctx: int | None, threads: int | None, pooling: str | None, counted: bool) -> None:
        where = pick_devices(device)
        if len(where) > 1 or where[0].kind == "rpc":
            raise DeviceError(f"embeddings take one device of this machine, not {device}; name one with `device`")
        (lib.count_buffers if counted else lib.keep_errors)()
        params = lib.llama_model_default_params()
        if counted:
            params.no_alloc, params.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
        params.n_gpu_layers = 0 if where[0].kind == "cpu" else -1
        if params.n_gpu_layers:
            params.split_mode = lib.LLAMA_SPLIT_MODE_NONE
            params.main_gpu = [d.name for d in devices() if d.kind in ("gpu", "igpu")].index(where[0].name)
        self._model = lib.llama_model_load_from_file(str(self.file.path).encode(), params)
        if not self._model:
            raise ModelError(
                f"llama.cpp cannot load {self.file.path}: {text(lib.kept_errors()).partition(chr(10))[0] or 'it does not say why'}"
            )
        trained = lib.llama_model_n_ctx_train(self._model)
        self.n_ctx = min(
            trained, whole(n_ctx, "the context (`n_ctx`)", 1, 1 << 31) if n_ctx else DEFAULT_CONTEXT
        )  # encoders have no further positions
        options = lib.llama_context_default_params()
        self._batch_tokens = options.n_ctx = options.n_batch = options.n_ubatch = max(self.n_ctx, BATCH)
        options.n_seq_max, options.embeddings, options.kv_unified = MOST_TEXTS, True, True
        options.n_threads = options.n_threads_batch = threads or default_threads()
        if pooling is not None:
            options.pooling_type = POOLINGS.index(pooling)
        self._ctx = lib.llama_init_from_model(self._model, options)
        if not self._ctx:
            raise DeviceError(f"llama.cpp has no memory for texts of {self.n_ctx} tokens with {self.file.path}; use a smaller `n_ctx`")
        if counted:
            self.nbytes = self.file.nbytes + math.ceil(lib.counted_mib() * (1 << 20))
        self.pooling = POOLINGS[lib.llama_pooling_type(self._ctx)]
        self.n_embd = lib.llama_model_n_cls_out(self._model) if self.pooling == "rank" else lib.llama_model_n_embd_out(self._model)
        self._batch = lib.llama_batch_init(self._batch_tokens, 0, 1)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text as its model reads them, control tokens included."""
        return self.tokenizer.encode(text, special=True)

    def encode_pair(self, query: str, document: str) -> list[int]:
        """The tokens that a reranker reads, laid out by the file's template "rerank" or as in llama.cpp's server."""
        template, vocab, encode = lib.llama_model_chat_template(self._model, b"rerank"), self.tokenizer.vocab, self.tokenizer.encode
        if template != ffi.NULL:
            return encode(text(template).replace("{query}", query).replace("{document}", document), special=True, bos=False)
        end = (
            [i for i in (lib.llama_vocab_eos(vocab), lib.llama_vocab_sep(vocab)) if i >= 0][:1]
            if lib.llama_vocab_get_add_eos(vocab)
            else []
        )
        begin = [lib.llama_vocab_bos(vocab)] if lib.llama_vocab_get_add_bos(vocab) else []
        between = end + ([lib.llama_vocab_sep(vocab)] if lib.llama_vocab_get_add_sep(vocab) else [])
        return [*begin, *encode(query, bos=False), *between, *encode(document, bos=False), *end]

    def batches(self, sizes: Sequence[int]) -> Iterator[int]:
        """How many of the next texts, of ``sizes`` tokens, share each step."""
        count = tokens = 0
        for size in sizes:
            if count == MOST_TEXTS or tokens + size > self._batch_tokens:
                yield count
                count = tokens = 0
            count, tokens = count + 1, tokens + size
        if count:
            yield count

    def embed(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """F32 [n_embd] of each of these tokens, not normalised; F32 [T, n_embd] without pooling; texts share steps.

        Raises:
            ContextError: a text that is empty, or longer than ``n_ctx``, or has ids outside the vocabulary.
        """
        for ids in texts:
            if not 0 < len(ids) <= self.n_ctx:
                raise ContextError(f"a text has {len(ids)} tokens, and embeddings take 1 to {self.n_ctx}; shorten it")
            if not all(0 <= i < self.tokenizer.n_vocab for i in ids):
                raise ContextError(f"a text has ids outside of the vocabulary of {self.tokenizer.n_vocab} tokens")
        out: list[np.ndarray] = []
        for count in self.batches([len(ids) for ids in texts]):
            out += self._step(texts[len(out) : len(out) + count])
        return out

    def _step(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        batch, at = self._batch, 0
        for sequence, ids in enumerate(texts):
            for position, token in enumerate(ids):
                batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = token, position, 1, sequence, 1
                at += 1
        batch.n_tokens = at
        if (memory := lib.llama_get_memory(self._ctx)) != ffi.NULL:
            lib.llama_memory_clear(memory, True)
        if lib.llama_decode(self._ctx, batch) != 0:
            raise DeviceError(f"llama.cpp failed to compute the embeddings of {len(texts)} texts")
        if self.pooling != "none":
            return [self._row(lib.llama_get_embeddings_seq(self._ctx, sequence)) for sequence in range(len(texts))]
        rows = np.array([self._row(lib.llama_get_embeddings_ith(self._ctx, i)) for i in range(at)])
        return np.split(rows, np.cumsum([len(ids) for ids in texts])[:-1])

    def _row(self, values: Any) -> np.ndarray:
        return np.frombuffer(ffi.buffer(values, 4 * self.n_embd), np.float32).copy()

    def close(self) -> None:
        """Closing twice is fine."""
        if self._ctx != ffi.NULL:
            lib.llama_batch_free(self._batch)
            lib.llama_free(self._ctx)
        if self._model != ffi.NULL:
            lib.llama_model_free(self._model)
        self._ctx = self._model = ffi.NULL
        self.tokenizer.close()
        self.file.close()


def normalised(values: np.ndarray, norm: int = 2) -> np.ndarray:
    """F32 values divided by their norm, as llama.cpp does: -1 not at all, 0 to 32,760 at most, 2 euclidean, p the p-norm."""
    if norm < 0:
        return values
    sizes = np.abs(values)
    if norm == 0:
        total = float(sizes.max()) / 32760.0
    elif norm == 2:
        total = float(np.cumsum((values * values).astype(np.float64))[-1]) ** 0.5  # in llama.cpp's order
    else:
        total = float(np.cumsum(sizes.astype(np.float64) ** norm)[-1]) ** (1.0 / norm)
    return values * np.float32(1.0 / total if total > 0 else 0.0)
