"""What a well-formed GGUF reads as."""

import os

import gguf
import numpy as np
import pytest
from gguf_io.build import ARR, BOOL, F32, F64, I8, I16, I32, I64, STR, U8, U16, U32, U64, Model, info, key
from gguf_io.build import gguf as build

import pyggml_spec as ps
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.gguf_io.reader import StringArray, brief

SCALARS = {
    U8: 255, I8: -128, U16: 65535, I16: -32768, U32: (1 << 32) - 1, I32: -(1 << 31), F32: 0.5, BOOL: True, STR: "Grüße 😀",
    U64: (1 << 64) - 1, I64: -(1 << 63), F64: 1e300,
}  # fmt: skip


@pytest.fixture
def opened(tmp_path):
    """Opens bytes as a GGUF."""
    files = []

    def open_bytes(content: bytes) -> GGUFFile:
        path = tmp_path / f"{len(files)}.gguf"
        path.write_bytes(content)
        files.append(GGUFFile(path))
        return files[-1]

    yield open_bytes
    for file in files:
        file.close()


@pytest.mark.parametrize("kind", SCALARS)
def test_scalars_keep_their_value_and_type(opened, kind):
    value = opened(build([key("k", kind, SCALARS[kind])])).metadata["k"]
    assert value == SCALARS[kind] and type(value) is type(SCALARS[kind])


@pytest.mark.parametrize("kind", [k for k in SCALARS if k != STR])
def test_arrays_become_numpy_arrays_that_outlive_the_file(opened, kind):
    file = opened(build([key("k", ARR, (kind, [SCALARS[kind], 0])), key("empty", ARR, (kind, []))]))
    file.close()
    assert file.metadata["k"].tolist() == [SCALARS[kind], 0] and len(file.metadata["empty"]) == 0


def test_string_arrays_are_read_on_demand(opened):
    strings = opened(build([key("k", ARR, (STR, ["a", "", "Ġé", b"\xff"]))])).metadata["k"]
    assert len(strings) == 4 and list(strings) == ["a", "", "Ġé", "\ufffd"]
    assert strings.raw(3) == b"\xff" and strings[-1] == "\ufffd"
    with pytest.raises(IndexError):
        strings.raw(4)


def test_a_string_longer_than_a_mebibyte_stays_in_the_file(opened):
    """Some converters embed a whole tokenizer.json of 30 MB."""
    long = opened(build([key("k", STR, "x" * ((1 << 20) + 1)), key("after", U8, 7)]))
    assert isinstance(long.metadata["k"], StringArray) and len(long.metadata["k"].raw(0)) == (1 << 20) + 1
    assert long.metadata["after"] == 7
    with pytest.raises(ps.GGUFError, match="'k' holds"):
        long.get("k", str)


def test_a_bool_byte_other_than_0_and_1_is_true(opened):
    """numpy would keep the 2, and `== True` would be False."""
    content = build([key("k", ARR, (U8, [0, 1, 2]))])
    at = content.index(b"k") + 1 + 4
    assert opened(content[:at] + bytes([BOOL]) + content[at + 1 :]).metadata["k"].tolist() == [False, True, True]


def test_version_2_and_other_alignments_are_read(opened):
    data = np.arange(8, dtype=np.float32).tobytes()
    for alignment in (1, 8, 64, 4096):
        content = build([key("general.alignment", U32, alignment)], [info("t", (8,))], data, alignment)
        for version in (2, 3):
            file = opened(content[:4] + bytes([version]) + content[5:])
            assert (file.version, bytes(file.read("t"))) == (version, data)


def test_gaps_between_tensors_and_any_order_are_allowed(opened):
    file = opened(build([], [info("b", (8,), 0, 64), info("a", (8,), 0, 0)], bytes(64) + b"\1" * 32))
    assert bytes(file.read("b")) == b"\1" * 32 and bytes(file.read("a")) == bytes(32)


def test_reads_what_the_gguf_package_reads(pair):
    for path in pair:
        other = gguf.GGUFReader(path)
        with GGUFFile(path) as file:
            assert list(file.tensors) == [t.name for t in other.tensors]
            for t in other.tensors:
                mine = file.tensors[t.name]
                assert mine.shape == tuple(int(n) for n in t.shape) and mine.type == int(t.tensor_type) and mine.nbytes == int(t.n_bytes)
                with file.read(t.name) as data:
                    assert bytes(data) == t.data.tobytes()
            for name, field in other.fields.items():
                if not name.startswith("GGUF."):
                    value, expected = file.metadata[name], field.contents()
                    assert (list(value) if isinstance(value, StringArray | np.ndarray) else value) == expected


def test_the_test_builder_rebuilds_a_model_byte_by_byte(pair):
    """The hostile files are changes of valid ones; a builder that damages more than it says would hide what is tested."""
    for path in pair:
        assert Model(path).bytes() == path.read_bytes()


def test_get_refuses_another_type_by_name_and_value(opened):
    nan = key("f", F32, float("nan"))
    file = opened(build([key("n", U32, 3), key("b", BOOL, True), key("s", STR, "3"), nan, key("a", ARR, (U32, [1]))]))
    assert file.get("n", int) == 3 and file.get("n", float) == 3.0 and file.get("none", int, 9) == 9
    for name, kind in (("b", int), ("s", int), ("f", float), ("a", int), ("n", str), ("none", int)):
        with pytest.raises(ps.GGUFError, match=f"'{name}'"):
            file.get(name, kind)
    assert file.array("a").tolist() == [1] and file.array("none") is None
    for name in ("n", "s"):
        with pytest.raises(ps.GGUFError, match=f"'{name}'"):
            file.array(name)


def test_brief_is_one_printable_line():
    for value in ("a\nb\x1b[2J" * 50, np.arange(10_000), 1.5, -3, True):
        assert brief(value).isprintable() and len(brief(value)) <= 72


def test_names_that_are_not_utf8_open(tmp_path, pair):
    path = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    path.write_bytes(pair[0].read_bytes())
    with ps.load(path, device="CPU", threads=1, n_ctx=32) as session:
        assert session.generate("a", max_tokens=2)[1].emitted == 2


def test_close_twice_and_with_a_reader_left_over(opened):
    file = opened(build([], [info("t", (8,))], b"\7" * 32))
    data = file.read("t")
    file.close()
    file.close()
    assert bytes(data) == b"\7" * 32
    data.release()
