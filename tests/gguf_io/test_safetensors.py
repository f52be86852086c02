"""safetensors files that lie, each of which is one sentence and no allocation."""

import json
import struct

import numpy as np
import pytest
from tools.checkpoint import safetensors

from pyggml_spec.errors import ConvertError
from pyggml_spec.gguf_io.safetensors import SafetensorsFile


def _file(tmp_path, data: bytes):
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    return path


def _header(text: bytes, data: bytes = bytes(64)) -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def _entry(**change) -> bytes:
    return _header(json.dumps({"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **change}}).encode())


def test_reads_rows_of_every_float_type(tmp_path):
    values = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 4
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {"f32": values, "f16": values.astype(np.float16), "f64": values.astype(np.float64), "bf16": halves, "vector": values[0]}
    with SafetensorsFile(_file(tmp_path, safetensors(tensors))) as file:
        for name in ("f32", "f16", "f64", "bf16"):
            assert np.array_equal(file.rows(name, 1, 2), values[1:]), name
        assert np.array_equal(file.rows("vector", 0, 1), values[:1])


def test_integers_are_no_weights(tmp_path):
    with SafetensorsFile(_file(tmp_path, safetensors({"a": np.zeros((2, 2), np.int8)}))) as file:
        with pytest.raises(ConvertError, match="stored as I8"):
            file.rows("a", 0, 1)


@pytest.mark.parametrize(
    "data, names",
    [
        (b"", "cannot be read"),
        (b"abc", "3 bytes"),
        (struct.pack("<Q", 1 << 62), "claims 4611686018427387904"),
        (_header(b"{"), "no valid JSON"),
        (_header(b"[" * 200000), "no valid JSON"),
        (_header(b"[]"), "no JSON object"),
        (_header(b'{"a": 1, "a": 2}'), "twice"),
        (_header(b"\xff\xfe"), "no valid JSON"),
        (_header(b'{"a": 1' + b"1" * 5000 + b"}"), "no valid JSON"),
        (_header(b'{"a": 1}'), "no dtype"),
        (_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [1]}}'), "no dtype"),
        (_entry(dtype="Q4"), "unknown type 'Q4'"),
        (_entry(dtype=[]), "unknown type"),
        (_entry(shape=[4, -4]), "impossible shape"),
        (_entry(shape=[1 << 50]), "impossible shape"),
        (_entry(shape=[4.0, 4]), "impossible shape"),
        (_entry(shape=[True, 16]), "impossible shape"),
        (_entry(shape=[4, 5]), "has 64 bytes instead of 80"),
        (_entry(data_offsets=[0, 65]), "outside"),
        (_entry(data_offsets=[-64, 0]), "outside"),
        (_entry(data_offsets=[64, 0]), "outside"),
        (_entry(data_offsets=["0", 64]), "outside"),
    ],
)
def test_lies_are_sentences(tmp_path, data, names):
    with pytest.raises(ConvertError, match=names) as error:
        SafetensorsFile(_file(tmp_path, data))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_overlap(tmp_path):
    entries = {name: {"dtype": "F32", "shape": [8], "data_offsets": [at, at + 32]} for name, at in (("a", 0), ("b", 16))}
    with pytest.raises(ConvertError, match="overlap"):
        SafetensorsFile(_file(tmp_path, _header(json.dumps(entries).encode())))


def test_a_folder_and_a_missing_file(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConvertError):
            SafetensorsFile(path)


@pytest.mark.slow
def test_random_damage_is_read_or_refused(tmp_path):
    """2,000 flipped bytes and cuts of a small file."""
    good = safetensors({"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float16)})
    rng = np.random.default_rng(5)
    for _ in range(2000):
        data = bytearray(good[: rng.integers(1, len(good) + 1)] if rng.random() < 0.3 else good)
        data[rng.integers(len(data))] = rng.integers(256)
        try:
            with SafetensorsFile(_file(tmp_path, bytes(data))) as file:
                for name in file.tensors:
                    if file.tensors[name].dtype in ("F32", "F16"):
                        file.rows(name, 0, 1)
        except ConvertError as error:
            assert "\n" not in str(error)
