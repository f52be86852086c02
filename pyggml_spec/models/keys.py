"""Checked reading of single hyper-parameters: ggml aborts on bad shapes."""

from typing import Any

import numpy as np

from ..errors import ModelError
from ..gguf_io import GGUFFile
from .weights import MATMUL, ROWS, VECTOR, Spec


def positive(file: GGUFFile, key: str, default: int | None = None, limit: int = 1 << 24) -> int:
    """An integer in [1, limit]. Raises ModelError outside."""
    value = file.get(key, int, default)
    if not 0 < value <= limit:
        raise ModelError(f"{file.path}: {key} is {value}, but it has to be between 1 and {limit}")
    return value


def per_layer(file: GGUFFile, key: str, n_layer: int, default: int | None = None, limit: int = 1 << 24, least: int = 1) -> tuple[int, ...]:
    """An integer in [least, limit] per layer: one number for all, or a list. Raises ModelError outside, or for a short list."""
    if not isinstance(file.metadata.get(key), np.ndarray):
        return (positive(file, key, default, limit),) * n_layer  # 0 of all layers makes no model
    numbers = file.array(key, "iu")
    assert numbers is not None
    values = [int(v) for v in numbers[:n_layer]]
    bad = [v for v in values if not least <= v <= limit]
    if bad or len(values) < n_layer:
        raise ModelError(f"{file.path}: {key} is {values}, but it has to be {n_layer} numbers between {least} and {limit}")
    return tuple(values)


def layer_heads(file: GGUFFile, arch: str, n_layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query heads and K/V heads of each layer. Raises ModelError where query heads are no multiple of K/V heads."""
    heads = per_layer(file, f"{arch}.attention.head_count", n_layer)
    heads_kv = per_layer(file, f"{arch}.attention.head_count_kv", n_layer, heads[0])
    for i, (n, kv) in enumerate(zip(heads, heads_kv, strict=True)):
        if n % kv:
            raise ModelError(f"{file.path}: the {n} query heads of layer {i} cannot share {kv} K/V heads (attention.head_count_kv)")
    return heads, heads_kv


def sliding_layers(file: GGUFFile, arch: str, n_layer: int, period: int = 4, full_last: bool = False) -> tuple[int, tuple[bool, ...]]:
    """The sliding window (0 for none), and which layers have it: a list, or all but the first of every ``period`` layers (``full_last``: the last).

    Raises:
        ModelError: a window out of range, or a pattern that is too short.
    """
    window, key = file.get(f"{arch}.attention.sliding_window", int, 0), f"{arch}.attention.sliding_window_pattern"
    if not 0 <= window < 1 << 31:
        raise ModelError(f"{file.path}: attention.sliding_window is {window}, but it has to be between 0 and {(1 << 31) - 1}")
    if not window:
        return 0, (False,) * n_layer
    if not isinstance(file.metadata.get(key), np.ndarray):
        period = positive(file, key, period)
        return window, tuple(i % period != (period - 1 if full_last else 0) for i in range(n_layer))
    flags = file.array(key)
    assert flags is not None
    pattern = tuple(bool(v) for v in flags[:n_layer])
    if len(pattern) < n_layer:
        raise ModelError(f"{file.path}: attention.sliding_window_pattern names {len(pattern)} of {n_layer} layers")
    return window, pattern


def windowed_layers(file: GGUFFile, arch: str, n_layer: int, **more: Any) -> tuple[int, tuple[bool, ...]]:
    """``sliding_layers`` that raises ModelError for a file without a window."""
    window, sliding = sliding_layers(file, arch, n_layer, **more)
    if not window:
        raise ModelError(f"{file.path} has no attention.sliding_window, which every {arch} model has; convert it again")
    return window, sliding


OF_SLIDING = ("attention.key_length_swa", "attention.value_length_swa")  # head sizes of sliding layers


def size_of_heads(file: GGUFFile, arch: str, default: int, *alike: str) -> int:
    """`attention.key_length`, or ``default``; raises ModelError if `attention.value_length` or a key in ``alike`` is present and differs."""
    size = positive(file, f"{arch}.attention.key_length", default, 4096)
    for name in ("attention.value_length", *alike):
        if file.get(f"{arch}.{name}", int, size) != size:
            raise ModelError(f"{file.path}: {name} differs from key_length {size}, which {arch} does not have")
    return size


def epsilon(file: GGUFFile, arch: str) -> float:
    """Epsilon of the RMS norms; ggml asserts that it is not negative."""
    eps = file.get(f"{arch}.attention.layer_norm_rms_epsilon", float)
    if eps < 0:
        raise ModelError(f"{file.path}: attention.layer_norm_rms_epsilon is {eps}, but it cannot be negative")
    return eps


def kv_heads(file: GGUFFile, arch: str, n_head: int) -> int:
    """K/V heads, a divisor of ``n_head``."""
    n = positive(file, f"{arch}.attention.head_count_kv", n_head)
    if n_head % n:
        raise ModelError(f"{file.path}: {n_head} query heads cannot share {n} K/V heads")
    return n


def inverse_root(n: int) -> float:
    """1 / sqrt(n) in single precision, as llama.cpp rounds it."""
    return float(np.float32(1) / np.sqrt(np.float32(n)))


def vocabulary(file: GGUFFile) -> int:
    """Tokens of the embedding; 0 without one, which ``specs`` then reports."""
    embedding = file.tensors.get("token_embd.weight")
    return embedding.shape[-1] if embedding else 0


def embedding_and_head(file: GGUFFile, n_embd: int, n_vocab: int, norm: str = "output_norm") -> list[Spec]:
    """Specs of embedding, last norm (``norm`` in the file) and head; the head is the embedding if the file has none."""
    source = None if "output.weight" in file.tensors else "token_embd.weight"
    return [
        Spec("token_embd.weight", (n_embd, n_vocab), ROWS),
        Spec("output_norm.weight", (n_embd,), VECTOR, None if norm == "output_norm" else f"{norm}.weight"),
        Spec("output.weight", (n_embd, n_vocab), MATMUL, source),
    ]
