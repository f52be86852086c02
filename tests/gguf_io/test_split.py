"""Models in several files: one model, by any of its parts; a part that is missing or of another model is named."""

import shutil

import numpy as np
import pytest
from cli.process import one_sentence, pyspec
from gguf_io.build import I32, U16, U32, Model, split_gguf

import pyggml_spec as ps
from pyggml_spec.errors import GGUFError
from pyggml_spec.gguf_io import GGUFFile

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
    drafts = split_gguf(pair[1], tmp_path, 2, "drafter")
    texts = []
    for target, draft in ((pair[0], pair[1]), (parts[1], drafts[1])):
        with ps.load(target, draft=draft, device="CPU", threads=1, n_ctx=64, draft_width=4) as session:
            texts.append([tuple(event.tokens) for event in session.steps(PROMPT, 12, ignore_end=True)])
    assert texts[0] == texts[1] and sum(map(len, texts[0])) == 12


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


@pytest.mark.parametrize(
    "harm, named, words",
    [
        (missing, 0, ["model-00002-of-00003.gguf is not in its folder", "one folder"]),
        (missing, 2, ["part 3 of 3", "model-00002-of-00003.gguf"]),
        (renamed, "whole.gguf", ["part 1 of 3", "-00001-of-00003.gguf"]),
        (misnumbered, 0, ["another model", "split.no"]),
        (misnumbered, 1, ["part 3 of 3", "-00003-of-00003.gguf"]),
        (another_quantisation, 0, ["in a part before it"]),
        (fewer_tensors, 1, ["tensors, but they hold"]),
        (another_model, 0, ["another model", "split.tensors.count"]),
        (another_models_keys, 0, ["another model", "qwen35.block_count"]),
        (no_number, 0, ["split.no"]),
        (many, 0, ["60000 parts", "512"]),
        (cut, 0, ["00003-of-00003.gguf", "cut short"]),
    ],
)
def test_what_is_wrong_with_parts_is_said(copied, harm, named, words):
    copied = [type(part)(part) for part in copied]
    harm(copied)
    path = copied[named] if isinstance(named, int) else copied[0].with_name(named)
    with pytest.raises(GGUFError) as caught:
        GGUFFile(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_commands_take_any_part(parts):
    whole = pyspec("inspect", parts[1])
    assert whole.returncode == 0 and parts[0].name.encode() in whole.stdout, whole.stderr
    run = ["-t", 1, "--device", "CPU", "-c", 64, "-p", "ab", "-n", 4]
    assert pyspec("run", "-m", parts[2], *run).returncode == 0
    one_sentence(pyspec("run", "-m", parts[0].with_name("none-00001-of-00002.gguf"), *run), "does not exist")


def test_files_of_closed_models_are_closed(parts):
    import os

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        GGUFFile(parts[1]).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_view_reads_the_parts(parts):
    with GGUFFile(parts[0]) as file:
        last = list(file.tensors)[-1]
        view = file.under_other_names(file.metadata, {"x": file.tensors[last]})
        assert np.array_equal(np.frombuffer(view.read("x"), np.uint8), np.frombuffer(file.read(last), np.uint8))
