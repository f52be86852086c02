"""Files, pairs and devices that cannot be used: one sentence that names the value, exit code 1."""

import pytest
from cli.process import one_sentence, pyspec
from random_gguf.model import Shape, write_dflash


def run(target, draft=None, *more):
    drafter = ["-md", draft] if draft is not None else []
    return pyspec("run", "-m", target, *drafter, "--device", "CPU", "-t", 1, "-p", "a", "-n", 2, *more)


def test_missing_files(pair, tmp_path):
    one_sentence(run(tmp_path / "none.gguf"), "none.gguf does not exist")
    one_sentence(run(pair[0], tmp_path / "none.gguf"), "none.gguf does not exist")
    done = pyspec("run", "-m", pair[0], "-f", tmp_path / "none.txt")
    one_sentence(done, "none.txt", "No such file")


def test_files_that_are_no_gguf(tmp_path):
    (tmp_path / "x").write_bytes(b"PK\3\4 not a model")
    one_sentence(run(tmp_path / "x"), "not a GGUF")
    one_sentence(run(tmp_path), "not a file")


@pytest.mark.parametrize("part", [3, 20, 0.01, 0.5, -1])
def test_truncated_files(pair, tmp_path, part):
    data = pair[0].read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: part if isinstance(part, int) else int(part * len(data))])
    one_sentence(run(tmp_path / "cut.gguf"), "cut.gguf")


def test_drafter_and_target_exchanged(pair):
    one_sentence(run(pair[1]), "is a drafter", "-md")
    one_sentence(run(pair[0], pair[0]), "is a target model")


OTHERS = [
    ({"n_vocab": 300}, ["target.gguf has 320 tokens", "other.gguf has 300"]),
    ({"n_embd": 128}, ["128", "256"]),
    ({"target_layers": (1, 2, 99)}, ["layer 99", "layers 0 to 3"]),
]


@pytest.mark.parametrize("shape, words", OTHERS)
def test_a_drafter_for_another_target(pair, tmp_path, shape, words):
    one_sentence(run(pair[0], write_dflash(tmp_path / "other.gguf", Shape(**shape))), "other.gguf cannot draft for target.gguf", *words)


def test_options_that_do_not_fit_the_files(pair):
    one_sentence(run(*pair, "--draft-width", 17), "17", "block of 16")
    one_sentence(run(pair[0], None, "--draft-width", 4), "4", "-md")
    one_sentence(pyspec("run", "-md", pair[1], "-p", "a"), "name it with -m")
    one_sentence(pyspec("run", "-m", pair[0], "--device", "TPU7", "-p", "a"), "'TPU7'", "CPU")
