"""What a well-formed GGUF reads as."""

import json
import os
import shutil
import struct

import gguf
import numpy as np
import pytest
from cli.process import one_sentence, pyspec
from gguf_io.build import ARR, BOOL, F32, F64, I8, I16, I32, I64, STR, U8, U16, U32, U64, Model, info, key, split_gguf
from gguf_io.build import gguf as build
from sessions import fails_with
from tools.checkpoint import safetensors

import pyggml_spec as ps
from pyggml_spec.errors import ConvertError, GGUFError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.gguf_io.reader import StringArray, brief
from pyggml_spec.gguf_io.safetensors import SafetensorsFile

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


def test_strings_bools_and_alignments(opened):
    strings = opened(build([key("k", ARR, (STR, ["a", "", "Ġé", b"\xff"]))])).metadata["k"]
    assert len(strings) == 4 and list(strings) == ["a", "", "Ġé", "\ufffd"]
    assert strings.raw(3) == b"\xff" and strings[-1] == "\ufffd"
    with pytest.raises(IndexError):
        strings.raw(4)
    # Some converters embed a whole tokenizer.json of 30 MB.
    long = opened(build([key("k", STR, "x" * ((1 << 20) + 1)), key("after", U8, 7)]))
    assert isinstance(long.metadata["k"], StringArray) and len(long.metadata["k"].raw(0)) == (1 << 20) + 1
    assert long.metadata["after"] == 7
    fails_with(ps.GGUFError, "'k' holds", long.get, "k", str)
    # numpy would keep the 2, and `== True` would be False.
    content = build([key("k", ARR, (U8, [0, 1, 2]))])
    at = content.index(b"k") + 1 + 4
    assert opened(content[:at] + bytes([BOOL]) + content[at + 1 :]).metadata["k"].tolist() == [False, True, True]
    data = np.arange(8, dtype=np.float32).tobytes()
    for alignment in (1, 8, 64, 4096):
        content = build([key("general.alignment", U32, alignment)], [info("t", (8,))], data, alignment)
        for version in (2, 3):
            file = opened(content[:4] + bytes([version]) + content[5:])
            assert (file.version, bytes(file.read("t"))) == (version, data)
    file = opened(build([], [info("b", (8,), 0, 64), info("a", (8,), 0, 0)], bytes(64) + b"\1" * 32))
    assert bytes(file.read("b")) == b"\1" * 32 and bytes(file.read("a")) == bytes(32)


def test_contents_as_the_gguf_package_has_them(pair):
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
    # The hostile files are changes of valid ones; a builder that damages more than it says would hide what is tested.
    for path in pair:
        assert Model(path).bytes() == path.read_bytes()


def test_types_names_and_closing(opened, tmp_path, pair):
    nan = key("f", F32, float("nan"))
    file = opened(build([key("n", U32, 3), key("b", BOOL, True), key("s", STR, "3"), nan, key("a", ARR, (U32, [1]))]))
    assert file.get("n", int) == 3 and file.get("n", float) == 3.0 and file.get("none", int, 9) == 9
    for name, kind in (("b", int), ("s", int), ("f", float), ("a", int), ("n", str), ("none", int)):
        fails_with(ps.GGUFError, f"'{name}'", file.get, name, kind)
    assert file.array("a").tolist() == [1] and file.array("none") is None
    for name in ("n", "s"):
        fails_with(ps.GGUFError, f"'{name}'", file.array, name)
    for value in ("a\nb\x1b[2J" * 50, np.arange(10_000), 1.5, -3, True):
        assert brief(value).isprintable() and len(brief(value)) <= 72
    path = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    path.write_bytes(pair[0].read_bytes())
    with ps.load(path, device="CPU", threads=1, n_ctx=32) as session:
        assert session.generate("a", max_tokens=2)[1].emitted == 2
    file = opened(build([], [info("t", (8,))], b"\7" * 32))
    data = file.read("t")
    file.close()
    file.close()
    assert bytes(data) == b"\7" * 32
    data.release()


PROMPT = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def parts(pair, tmp_path_factory):
    return split_gguf(pair[0], tmp_path_factory.mktemp("parts"), 3)


@pytest.fixture
def copied(parts, tmp_path):
    """Parts to spoil."""
    return [shutil.copy(part, tmp_path / part.name) for part in parts]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_part_opens_the_model(pair, parts, which):
    with GGUFFile(pair[0]) as whole, GGUFFile(parts[which]) as split:
        assert split.path == parts[0] and list(split.tensors) == list(whole.tensors)
        assert split.nbytes == sum(part.stat().st_size for part in parts)
        assert {k: str(v) for k, v in split.metadata.items() if not k.startswith("split.")}.keys() == whole.metadata.keys()
        assert {t.part for t in split.tensors.values()} == {0, 1, 2}
        for name in whole.tensors:
            assert bytes(split.read(name)) == bytes(whole.read(name))


def test_its_identity_is_that_of_all_parts(parts, copied):
    with GGUFFile(parts[0]) as a, GGUFFile(parts[2]) as b:
        seen = []
        name = a.identity(lambda done, total: seen.append((done, total)))
        assert name == b.identity() and seen[-1] == (a.nbytes, a.nbytes) and seen == sorted(seen)
    with open(copied[2], "r+b") as file:  # one bit of the last part's last tensor
        file.seek(-40, 2)
        byte = file.read(1)[0]
        file.seek(-40, 2)
        file.write(bytes([byte ^ 1]))
    with GGUFFile(copied[0]) as changed:
        assert changed.identity() != name


def test_a_pair_in_parts_gives_the_tokens_of_the_pair(pair, parts, tmp_path):
    drafts, texts = split_gguf(pair[1], tmp_path, 2, "drafter"), []
    for target, draft in ((pair[0], pair[1]), (parts[1], drafts[1])):
        with ps.load(target, draft=draft, device="CPU", threads=1, n_ctx=64, draft_width=4) as session:
            texts.append([tuple(event.tokens) for event in session.steps(PROMPT, 12, ignore_end=True)])
    assert texts[0] == texts[1] and sum(map(len, texts[0])) == 12


@pytest.mark.slow
def test_llama_cpp_reads_the_same_parts(parts):
    done = pyspec("compare", "--logits", parts[2], "--tokens", 9, "--device", "CPU", "-t", 1, "--kernels", "ggml")
    assert done.returncode == 0 and b"NMSE" in done.stdout, done.stderr


def spoil(path, change):
    model = Model(path)
    change(model)
    model.write(path)


def missing(parts):
    parts[1].unlink()


def renamed(parts):
    parts[0].rename(parts[0].with_name("whole.gguf"))


def misnumbered(parts):
    other = parts[0].with_name("swap")
    parts[1].rename(other)
    parts[2].rename(parts[1])
    other.rename(parts[2])


def another_quantisation(parts):
    """Whose parts end at other tensors."""

    def change(model):
        model.tensors.update({name: Model(parts[1]).tensors[name] for name in list(Model(parts[1]).tensors)[:1]})

    spoil(parts[2], change)


def fewer_tensors(parts):
    spoil(parts[2], lambda model: model.tensors.pop(list(model.tensors)[-1]))


def another_model(parts):
    spoil(parts[1], lambda model: model.keys.update({"split.tensors.count": (I32, 7)}))


def another_models_keys(parts):
    spoil(parts[1], lambda model: model.keys.update({"qwen35.block_count": (U32, 77)}))


def no_number(parts):
    spoil(parts[0], lambda model: model.keys.pop("split.no"))


def many(parts):
    spoil(parts[0], lambda model: model.keys.update({"split.count": (U16, 60000)}))


def cut(parts):
    parts[2].write_bytes(parts[2].read_bytes()[:-64])


@pytest.mark.parametrize("harm, named, words", [
    (missing, 0, ["model-00002-of-00003.gguf is not in its folder", "one folder"]),
    (missing, 2, ["part 3 of 3", "model-00002-of-00003.gguf"]), (renamed, "whole.gguf", ["part 1 of 3", "-00001-of-00003.gguf"]),
    (misnumbered, 0, ["another model", "split.no"]), (misnumbered, 1, ["part 3 of 3", "-00003-of-00003.gguf"]),
    (another_quantisation, 0, ["in a part before it"]), (fewer_tensors, 1, ["tensors, but they hold"]),
    (another_model, 0, ["another model", "split.tensors.count"]), (another_models_keys, 0, ["another model", "qwen35.block_count"]),
    (no_number, 0, ["split.no"]), (many, 0, ["60000 parts", "512"]), (cut, 0, ["00003-of-00003.gguf", "cut short"]),
])  # fmt: skip
def test_what_is_wrong_with_parts_is_said(copied, harm, named, words):
    copied = [type(part)(part) for part in copied]
    harm(copied)
    path = copied[named] if isinstance(named, int) else copied[0].with_name(named)
    with pytest.raises(GGUFError) as caught:
        GGUFFile(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_parts_in_commands_and_views(parts):
    whole = pyspec("inspect", parts[1])
    assert whole.returncode == 0 and parts[0].name.encode() in whole.stdout, whole.stderr
    run = ["-t", 1, "--device", "CPU", "-c", 64, "-p", "ab", "-n", 4]
    assert pyspec("run", "-m", parts[2], *run).returncode == 0
    one_sentence(pyspec("run", "-m", parts[0].with_name("none-00001-of-00002.gguf"), *run), "does not exist")
    import os

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        GGUFFile(parts[1]).close()
    assert len(os.listdir("/proc/self/fd")) == before
    with GGUFFile(parts[0]) as file:
        last = list(file.tensors)[-1]
        view = file.under_other_names(file.metadata, {"x": file.tensors[last]})
        assert np.array_equal(np.frombuffer(view.read("x"), np.uint8), np.frombuffer(file.read(last), np.uint8))


def _file(tmp_path, data: bytes):
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    return path


def _header(text: bytes, data: bytes = bytes(64)) -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def _entry(**change) -> bytes:
    return _header(json.dumps({"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **change}}).encode())


def test_rows_and_overlaps_of_checkpoints(tmp_path):
    values = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 4
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {"f32": values, "f16": values.astype(np.float16), "f64": values.astype(np.float64), "bf16": halves, "vector": values[0]}
    with SafetensorsFile(_file(tmp_path, safetensors(tensors))) as file:
        for name in ("f32", "f16", "f64", "bf16"):
            assert np.array_equal(file.rows(name, 1, 2), values[1:]), name
        assert np.array_equal(file.rows("vector", 0, 1), values[:1])
    with SafetensorsFile(_file(tmp_path, safetensors({"a": np.zeros((2, 2), np.int8)}))) as file:
        fails_with(ConvertError, "stored as I8", file.rows, "a", 0, 1)
    entries = {name: {"dtype": "F32", "shape": [8], "data_offsets": [at, at + 32]} for name, at in (("a", 0), ("b", 16))}
    fails_with(ConvertError, "overlap", lambda: SafetensorsFile(_file(tmp_path, _header(json.dumps(entries).encode()))))
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConvertError):
            SafetensorsFile(path)


@pytest.mark.parametrize("data, names", [
    (b"", "cannot be read"), (b"abc", "3 bytes"), (struct.pack("<Q", 1 << 62), "claims 4611686018427387904"),
    (_header(b"{"), "no valid JSON"), (_header(b"[" * 200000), "no valid JSON"), (_header(b"[]"), "no JSON object"),
    (_header(b'{"a": 1, "a": 2}'), "twice"), (_header(b"\xff\xfe"), "no valid JSON"),
    (_header(b'{"a": 1' + b"1" * 5000 + b"}"), "no valid JSON"), (_header(b'{"a": 1}'), "no dtype"),
    (_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [1]}}'), "no dtype"), (_entry(dtype="Q4"), "unknown type 'Q4'"),
    (_entry(dtype=[]), "unknown type"), (_entry(shape=[4, -4]), "impossible shape"), (_entry(shape=[1 << 50]), "impossible shape"),
    (_entry(shape=[4.0, 4]), "impossible shape"), (_entry(shape=[True, 16]), "impossible shape"),
    (_entry(shape=[4, 5]), "has 64 bytes instead of 80"), (_entry(data_offsets=[0, 65]), "outside"),
    (_entry(data_offsets=[-64, 0]), "outside"), (_entry(data_offsets=[64, 0]), "outside"),
    (_entry(data_offsets=["0", 64]), "outside"),
])  # fmt: skip
def test_lies_are_sentences(tmp_path, data, names):
    with pytest.raises(ConvertError, match=names) as error:
        SafetensorsFile(_file(tmp_path, data))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.slow
def test_random_damage_is_read_or_refused(tmp_path):
    """2,000 flipped bytes and cuts of a small file."""
    good, rng = safetensors({"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float16)}), np.random.default_rng(5)
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


@pytest.mark.parametrize(
    "strings, distinct",
    [
        ([b"%d" % i for i in range(3000)], True),
        ([*(b"%d" % i for i in range(3000)), b"7"], False),
        ([b"ab", b"a", b"b", b"abcdefgh", b"abcdefghi", b"\xff"], True),
        ([b"ab", b"a\0b", b"a"], False),
        ([b"ab", b"a\0b", b"a\0"], False),
        ([b"a", b""], False),
        ([b"a", b"\0a"], False),
        ([b"a\0b", b"b", b"c\0b"], True),
    ],
)
def test_strings_that_differ_up_to_a_zero(opened, strings, distinct):
    """As llama.cpp reads a vocabulary, which asserts that; empty ones get other names there."""
    assert opened(build([key("k", ARR, (STR, strings))])).metadata["k"].distinct() is distinct
