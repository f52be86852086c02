"""llama.cpp's tokenizer for the vocabulary of a GGUF, by libllama; no weights are loaded."""

import os
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import ContextError, EngineError, GGUFError, ModelError
from ..ggml.library import Vocab, ffi, lib
from ..ggml.library import text as text_of
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray, brief
from ..large_stack import on_large_stack

_MODELS = ("gpt2", "llama", "gemma4", "bert", "t5")  # llama.cpp has more types, which assert more
_ID_KEYS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
_CONTROL = 3  # in tokenizer.ggml.token_type
_SHORT_TEXT, _STACK_PER_BYTE = 4096, 512


lib.keep_errors()  # llama.cpp's loader logs every key


def check_vocabulary(file: GGUFFile) -> int:
    """Number of tokens, after checking all that llama.cpp asserts about a vocabulary. Raises GGUFError: a key is missing, has another type,
    or contradicts the token list."""
    meta, damaged = file.metadata, "the file is damaged"
    model = file.get("tokenizer.ggml.model", str)
    if model not in _MODELS:
        raise GGUFError(f"{file.path} has a tokenizer of the type {brief(model)}; {', '.join(_MODELS)} are supported")
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or len(tokens) == 0:
        raise GGUFError(f"{file.path} has no token list; use a complete model file")
    for key, kinds in (("scores", "f"), ("token_type", "i")):
        values = meta.get(f"tokenizer.ggml.{key}")
        if values is not None and (not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or len(values) != len(tokens)):
            raise GGUFError(f"{file.path}: tokenizer.ggml.{key} does not hold one value per token ({len(tokens)}); {damaged}")
    merges = meta.get("tokenizer.ggml.merges")
    if merges is not None and not isinstance(merges, StringArray):
        raise GGUFError(f"{file.path}: tokenizer.ggml.merges is not a list of strings; {damaged}")
    for name in _ID_KEYS:
        key = f"tokenizer.ggml.{name}_token_id"
        if key in meta and (not isinstance(meta[key], int) or not 0 <= meta[key] < len(tokens)):
            raise GGUFError(f"{file.path}: {key} is {brief(meta[key])}, but the vocabulary has {len(tokens)} tokens")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[-1] != len(tokens):
        raise GGUFError(f"{file.path} has {len(tokens)} tokens, but token_embd.weight has {embedding.shape[-1]} rows; {damaged}")
    if model != "llama" and tokens.distinct():
        return len(tokens)
    seen: dict[bytes, int] = {}
    for i, raw in enumerate(tokens.raws()):
        text = raw.split(b"\0", 1)[0] or b"[EMPTY_%d]" % i  # llama.cpp reads C strings and renames empty ones
        if (first := seen.setdefault(text, i)) != i:
            raise GGUFError(f"{file.path}: the tokens {first} and {i} are both {brief(tokens[i])}; the file is damaged")
    if model == "llama":
        missing = next((b for b in range(256) if b"<0x%02X>" % b not in seen and bytes([b]) not in seen), None)
        if missing is not None:
            raise GGUFError(f"{file.path} has no token for the byte {missing:#04x}, without which text cannot be encoded; convert it again")
    return len(tokens)


def vocabulary_note(file: GGUFFile) -> str | None:
    """A warning about a usable vocabulary, or None."""
    if file.metadata.get("tokenizer.ggml.model") == "gpt2" and not file.metadata.get("tokenizer.ggml.pre"):
        what = "llama.cpp's default is used, which may differ from training and degrade answers"
        return f"{file.path.name} names no pre-tokenizer (tokenizer.ggml.pre): {what}; convert it again"
    return None


class Fim(NamedTuple):
    """Control tokens for fill-in-the-middle, where the vocabulary has them: around the text before the gap, the text after it, and the
    middle; before the names of the repository and of each file."""

    prefix: int | None
    suffix: int | None
    middle: int | None
    repository: int | None
    file: int | None


def _filled(kind: str, size: int, fill: Callable[[Any, int], int]) -> Any:
    """The values that ``fill`` writes; it returns their number, negative where ``size`` is not enough."""
    out = ffi.new(kind, size)
    if (n := fill(out, size)) < 0:
        out = ffi.new(kind, -n)
        n = fill(out, -n)
    return ffi.unpack(out, n)


class Tokenizer:
    """Encodes and decodes with the vocabulary of one file. Owns a vocabulary-only llama.cpp model."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.n_vocab = check_vocabulary(file)
        params = lib.llama_model_default_params()
        params.vocab_only, params.devices = True, (none := ffi.new("ggml_backend_dev_t[1]"))  # or else libllama opens all GPUs
        lib.keep_errors()  # importing llama_cpp replaces the log callback
        self._model = lib.llama_model_load_from_file(os.fsencode(file.path), params)
        del none  # which lived until here
        if not self._model:
            why = text_of(lib.kept_errors()).partition("\n")[0] or "it does not say why"
            raise ModelError(f"llama.cpp cannot load the vocabulary of {file.path}: {why}")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._control: dict[str, int] | None = None
        types = file.metadata.get("tokenizer.ggml.token_type")
        self._file_control = np.flatnonzero(types == _CONTROL).tolist() if isinstance(types, np.ndarray) else []
        self._pieces = lru_cache(1 << 14)(self._piece)  # 0.2 us instead of 1.7
        for name in ("bos", "eos"):  # llama.cpp asserts that tokens added to every text exist
            adds, token = (getattr(lib, f"llama_vocab_{part}{name}")(self.vocab) for part in ("get_add_", ""))
            if adds and not 0 <= token < self.n_vocab:
                self.close()
                raise GGUFError(f"{self.path} adds a {name} token to every text, but tokenizer.ggml.{name}_token_id is invalid")

    @property
    def vocab(self) -> Vocab:
        """libllama's vocabulary; valid until ``close``."""
        if not self._model:
            raise EngineError("the session is closed: load the model again")
        return self._vocab

    def encode(self, text: str | bytes, special: bool = False, bos: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: str (lone surrogates become "?") or bytes (invalid UTF-8 becomes U+FFFD, as in llama.cpp).
            special: text like ``<|end|>`` becomes control tokens; off for user text.
            bos: add the tokens that the vocabulary adds at the start.

        Raises:
            ContextError: not a text, or too long to encode in this process.
        """
        if not isinstance(text, (str, bytes)):
            raise ContextError(f"a text of the type {type(text).__name__} cannot be encoded; give str or bytes")
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")  # llama.cpp aborts on code points above U+10FFFF
        data = text.encode("utf-8", "replace")
        if len(data) <= _SHORT_TEXT:
            return self._encode(data, special, bos)
        try:  # llama.cpp's pre-tokenizers use std::regex, with up to 335 bytes of stack per character
            return on_large_stack((1 << 20) + _STACK_PER_BYTE * len(data), lambda: self._encode(data, special, bos))
        except RuntimeError:
            raise ContextError(f"a text of {len(data)} bytes cannot be encoded: there is no memory for it; shorten the prompt") from None

    def _encode(self, data: bytes, special: bool, bos: bool) -> list[int]:
        return _filled(
            "llama_token[]", len(data) + 8, lambda out, size: lib.llama_tokenize(self.vocab, data, len(data), out, size, bos, special)
        )

    def piece(self, token: int, special: bool = False) -> bytes:
        """Bytes of one token; control tokens are empty unless ``special``. A character may span several tokens."""
        return self._pieces(token, special)

    def piece_with(self, shown: Iterable[str]) -> Callable[[int], bytes]:
        """``piece`` that has the text of the control tokens ``shown``, where the vocabulary has them."""
        control = self.control_tokens()
        kept = {control[text] for text in shown if text in control}
        return lambda token: self._pieces(token, token in kept)

    def _piece(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.n_vocab:
            return b""  # llama.cpp would abort
        return _filled("char[]", 256, lambda out, size: lib.llama_token_to_piece(self.vocab, token, out, size, 0, special))

    def pieces(self) -> list[bytes]:
        """``piece`` of every token, control tokens by name; one shared buffer halves the time."""
        size = 1 << 16
        out, call, vocab = ffi.new("char[]", size), lib.llama_token_to_piece, self.vocab
        return [ffi.unpack(out, max(0, call(vocab, i, out, size, 0, True))) for i in range(self.n_vocab)]

    @cached_property
    def _scan(self) -> tuple[np.ndarray, int]:
        """What each token is, and the bytes of the longest piece."""
        kinds = np.zeros(self.n_vocab, np.uint8)
        return kinds, lib.scan_vocabulary(self.vocab, self.n_vocab, ffi.from_buffer("uint8_t[]", kinds))

    @property
    def longest_piece(self) -> int:
        """Bytes of the longest piece."""
        return self._scan[1]

    def ends(self) -> list[int]:
        """The tokens that end a text."""
        return np.flatnonzero(self._scan[0] & lib.IS_END).tolist()

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """Their text; rows of pictures, which are below 0, have none."""
        return b"".join(self.piece(t, special) for t in tokens if t >= 0).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """Whether ``token`` ends the text."""
        return lib.llama_vocab_is_eog(self.vocab, token)

    def control_tokens(self) -> dict[str, int]:
        """Texts that ``encode`` recognises only with ``special``, and their tokens."""
        if self._control is None:
            ids = np.flatnonzero(self._scan[0] & lib.IS_CONTROL).tolist()
            texts = {text_of(lib.llama_vocab_get_text(self.vocab, i)): i for i in ids}
            self._control = {text: i for text, i in texts.items() if text}
        return self._control

    @cached_property
    def exposed_tokens(self) -> dict[str, int]:
        """Control tokens of the file that libllama treats as text, so ``encode`` always recognises them: gpt-oss's markers."""
        left = set(self._file_control) - set(self.control_tokens().values())
        return {text: i for i in left if i < self.n_vocab and (text := text_of(lib.llama_vocab_get_text(self.vocab, i)))}

    def fim(self) -> "Fim":
        """The fill-in-the-middle tokens of the vocabulary."""
        names = ("pre", "suf", "mid", "rep", "sep")
        ids = [getattr(lib, f"llama_vocab_fim_{name}")(self.vocab) for name in names]
        return Fim(*(i if 0 <= i < self.n_vocab else None for i in ids))

    @property
    def bos(self) -> int | None:
        """The token added at the start of a text, or None."""
        return lib.llama_vocab_bos(self.vocab) if lib.llama_vocab_get_add_bos(self.vocab) else None

    def close(self) -> None:
        if self._model:
            lib.llama_model_free(self._model)
            self._model = ffi.NULL
            self._pieces.cache_clear()


def first_difference(a: GGUFFile, b: GGUFFile) -> str | None:
    """None if both files have the same token list, else a phrase with the difference."""
    left, right = a.metadata.get("tokenizer.ggml.tokens"), b.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(left, StringArray) or not isinstance(right, StringArray):
        return None  # a drafter without vocabulary uses the target's
    if len(left) != len(right):
        return f"{a.path.name} has {len(left)} tokens, {b.path.name} has {len(right)}"
    if left.same(right):  # compares 250,000 tokens in 14 ms
        return None
    for i in range(len(left)):
        if left.raw(i) != right.raw(i):
            return f"token {i} is {brief(left[i])} in {a.path.name} and {brief(right[i])} in {b.path.name}"
    return None
