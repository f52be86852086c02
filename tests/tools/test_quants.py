"""Quantising and back: what ggml would end the process on, or read beyond, is refused."""

import numpy as np
import pytest

from pyggml_spec.errors import ModelError
from pyggml_spec.ggml.library import lib
from pyggml_spec.tools.quants import TYPES, dequantise, quantise, type_id

Q8_0 = type_id("q8_0")


@pytest.mark.parametrize("name", TYPES)
def test_there_and_back(name):
    values = np.random.default_rng(0).standard_normal((3, 512), np.float32)
    data = quantise(values, type_id(name))
    assert data.shape == (3, lib.ggml_row_size(type_id(name), 512)) and data.dtype == np.uint8
    back = dequantise(data.tobytes(), type_id(name), values.size).reshape(values.shape)
    assert np.sqrt(((back - values) ** 2).mean()) < 0.4


NO_BLOCKS = [
    np.zeros((2, 33)),
    np.zeros((0, 32)),
    np.float32(1),
    np.zeros((2, 32), object),
    np.array([["a"] * 32]),
    np.zeros((2, 32), complex),
]
TOO_FEW = [(bytes(33), "q8_0", 32), (bytes(34), "q8_0", 31), (bytes(34), "q8_0", -32), (bytes(3), "f32", 1), (b"", "f16", 1 << 40)]


@pytest.mark.parametrize("values", NO_BLOCKS)
def test_values_that_are_no_blocks(values):
    with pytest.raises(ModelError):
        quantise(values, Q8_0)


@pytest.mark.parametrize("kind", [-1, 4, 5, 31, 99, 1 << 40, 1.5, None, "q8_0", True])
def test_types_that_there_are_not(kind):
    for call in (lambda: quantise(np.zeros((2, 256), np.float32), kind), lambda: dequantise(bytes(4096), kind, 256)):
        with pytest.raises(ModelError, match="tensor type"):
            call()


def test_types_that_need_an_importance_matrix():
    for name in ("iq2_xxs", "iq1_s", "i32"):
        with pytest.raises(ModelError, match="importance matrix"):
            quantise(np.zeros((2, 256), np.float32), type_id(name))


@pytest.mark.parametrize("data, kind, count", TOO_FEW)
def test_bytes_that_are_too_few(data, kind, count):
    with pytest.raises(ModelError):
        dequantise(data, type_id(kind), count)


def test_nan_and_huge_values_do_not_end_the_process():
    values = np.full((1, 256), np.nan, np.float32)
    values[0, :64] = 3e38
    for name in TYPES:
        assert dequantise(quantise(values, type_id(name)).tobytes(), type_id(name), 256).shape == (256,)
