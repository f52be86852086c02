"""llama.cpp's tokenizer over the vocabulary of a GGUF, through llama_cpp (no weights are loaded)."""

import ctypes

import llama_cpp
import numpy as np

from ..errors import GGUFError, ModelError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray

_ID_KEYS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")


@llama_cpp.llama_log_callback
def _drop_log(level, text, user_data):
    """llama.cpp's loader logs every key; what goes wrong is reported by return values."""


llama_cpp.llama_log_set(_drop_log, ctypes.c_void_p(0))


def check_vocabulary(file: GGUFFile) -> int:
    """Number of tokens, after checking every tokenizer key whose type llama.cpp would assert.

    Raises:
        GGUFError: a key is missing, has another type, or another length than the token list.
    """
    meta = file.metadata
    model = file.get("tokenizer.ggml.model", str)
    if model == "none":
        raise GGUFError(f"{file.path} carries no vocabulary (tokenizer.ggml.model is 'none'); use a complete model file")
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or len(tokens) == 0:
        raise GGUFError(f"{file.path} has no token list; use a complete model file")
    for key, kinds in (("scores", "f"), ("token_type", "i")):
        values = meta.get(f"tokenizer.ggml.{key}")
        if values is not None and (not isinstance(values, np.ndarray) or values.dtype.kind != kinds or len(values) != len(tokens)):
            raise GGUFError(f"{file.path}: tokenizer.ggml.{key} does not hold one value per token ({len(tokens)}); the file is damaged")
    merges = meta.get("tokenizer.ggml.merges")
    if merges is not None and not isinstance(merges, StringArray):
        raise GGUFError(f"{file.path}: tokenizer.ggml.merges is not a list of strings; the file is damaged")
    for name in _ID_KEYS:
        key = f"tokenizer.ggml.{name}_token_id"
        if key in meta and (not isinstance(meta[key], int) or not 0 <= meta[key] < len(tokens)):
            raise GGUFError(f"{file.path}: {key} is {meta[key]!r}, but the vocabulary has {len(tokens)} tokens")
    return len(tokens)


class Tokenizer:
    """Encodes and decodes with the vocabulary of one file. Owns a vocabulary-only llama.cpp model."""

    def __init__(self, file: GGUFFile):
        self.path = file.path
        self.n_vocab = check_vocabulary(file)
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(file.path).encode(), params)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load the vocabulary of {file.path} (tokenizer {file.metadata.get('tokenizer.ggml.pre')!r})")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._piece = ctypes.create_string_buffer(256)

    def encode(self, text: str | bytes, special: bool = False, bos: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: str (encoded as UTF-8, lone surrogates replaced) or bytes.
            special: whether text like ``<|end|>`` becomes control tokens; off, so that a user's text never does.
            bos: whether the tokens that the vocabulary adds at the start are added.
        """
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        capacity = len(data) + 8
        out = (llama_cpp.llama_token * capacity)()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), out, capacity, bos, special)
        if n < 0:
            out = (llama_cpp.llama_token * -n)()
            n = llama_cpp.llama_tokenize(self._vocab, data, len(data), out, -n, bos, special)
        return list(out[:n])

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless ``special``. Bytes of one character may span several tokens."""
        n = llama_cpp.llama_token_to_piece(self._vocab, token, self._piece, len(self._piece), 0, special)
        if n < 0:
            self._piece = ctypes.create_string_buffer(-n)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, self._piece, len(self._piece), 0, special)
        return self._piece.raw[:n]

    def decode(self, tokens, special: bool = False) -> str:
        return b"".join(self.piece(t, special) for t in tokens).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """Whether the model ends its text with this token."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def token_bytes(self, file: GGUFFile) -> list[bytes]:
        """The token list as stored (pairs are compared by it)."""
        tokens = file.metadata["tokenizer.ggml.tokens"]
        return [tokens.raw(i) for i in range(len(tokens))]

    def close(self) -> None:
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None


def first_difference(a: GGUFFile, b: GGUFFile) -> str | None:
    """None if both files have the same token list; otherwise what differs, as a phrase."""
    left, right = a.metadata.get("tokenizer.ggml.tokens"), b.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(left, StringArray) or not isinstance(right, StringArray):
        return None  # a drafter without a vocabulary of its own uses the target's
    if len(left) != len(right):
        return f"{a.path.name} has {len(left)} tokens, {b.path.name} has {len(right)}"
    for i in range(len(left)):
        if left.raw(i) != right.raw(i):
            return f"token {i} is {left[i]!r} in {a.path.name} and {right[i]!r} in {b.path.name}"
    return None
