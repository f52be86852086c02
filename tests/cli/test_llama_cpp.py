"""Command lines of llama.cpp's tools can be pasted; what they ask for and cannot have is refused by name."""

from dataclasses import replace

import pytest
from cli.conftest import PROMPT
from cli.process import pyspec
from random_gguf.archs import write_qwen3

from pyggml_spec.cli.llama_cpp import _place_layers
from pyggml_spec.errors import PyspecError
from pyggml_spec.ggml.device import pick_device

PASTED = ["-ngl", 99, "-ngld", "all", "-fa", "on", "--spec-type", "draft-dflash", "--spec-draft-n-max", 3]


def test_a_pasted_line_is_the_same_run(pair, pinned):
    files = ["-m", pair[0], "--spec-draft-model", pair[1]]
    pasted = pyspec("run", *files, "-t", 1, "--device", "CPU", *PASTED, "-p", PROMPT, "-n", 20)
    ours = pyspec("run", *pinned, "-p", PROMPT, "-n", 20)
    assert pasted.returncode == 0 and pasted.stdout == ours.stdout and "width 4 " in pasted.stderr
    assert pasted.stderr.splitlines()[0] == ours.stderr.splitlines()[0]


def test_a_limit_of_drafts_that_no_block_reaches(pair):
    """llama.cpp's number is a limit, ours a width: the one is cut to the block, the other refused."""
    run = ["run", "-m", pair[0], "-md", pair[1], "-t", 1, "--device", "CPU", "-p", PROMPT, "-n", 2]
    done, refused = pyspec(*run, "--spec-draft-n-max", 99), pyspec(*run, "--draft-width", 100)
    assert done.returncode == 0 and "drafts are made where 99 may be" in done.stderr
    assert refused.returncode == 1 and "wider than the block" in refused.stderr


def test_a_limit_of_drafts_where_nothing_drafts(pair):
    """A command line with the limit and without a drafter was told that a draft width needs one."""
    run = ["run", "-m", pair[0], "-t", 1, "--device", "CPU", "-p", PROMPT, "-n", 4]
    for more in ([], ["--spec-type", "none"]):
        assert pyspec(*run, *more, "--draft-max", 8).returncode == 0


def test_no_layers_on_the_device_is_the_cpu(pair):
    done = pyspec("run", "-m", pair[0], "-t", 1, "-ngl", 0, "-p", PROMPT, "-n", 2)
    assert done.returncode == 0 and " on CPU " in done.stderr


def test_some_layers_only_where_everything_is_on_the_cpu_anyway(pair):
    done = pyspec("run", "-m", pair[0], "-t", 1, "-ngl", 2, "-p", PROMPT, "-n", 2)
    assert done.returncode == 0 and " on CPU " in done.stderr


@pytest.mark.parametrize("asked, shares", [(5, None), (4, [1, 3]), (2, [3, 1])])
def test_fewer_layers_than_there_are_leave_the_first_to_the_cpu(pair, monkeypatch, asked, shares):
    """The head counts as a layer, as in llama.cpp: 4 of 4 layers leave one to the CPU."""
    gpu = replace(pick_device("CPU"), name="CUDA0", kind="gpu")
    monkeypatch.setattr("pyggml_spec.cli.llama_cpp.pick_devices", lambda names: [gpu])
    values = {"device": None}
    _place_layers(asked, values, pair[0])
    assert values == ({"device": None} if shares is None else {"device": "CPU,CUDA0", "tensor_split": shares})
    with pytest.raises(PyspecError, match="-ngl 1 would leave 4 of 4 layers in host memory"):
        _place_layers(1, values, pair[0])


@pytest.mark.parametrize(
    "options, words",
    [
        (["-fa", "off"], "always flash attention"), (["--spec-type", "draft-simple"], "would be a second engine"), (["-ngl", "some"], "'some'"),
        (["--spec-draft-n-max", 0], "x<=1023"), (["--spec-draft-n-max", 3, "--draft-width", 8], "contradict"), (["-ngl", 0, "--device", "CUDA0"], "contradict"),
        (["-ngld", 0], "another device"), (["-sm", "row"], "whole layers are on one device"), (["-sm", "none", "--device", "CPU,CPU"], "contradict"),
        (["-ts", "1,x"], "'1,x' is not a list of proportions"),
    ],
)  # fmt: skip
def test_what_they_cannot_have(options, words):
    done = pyspec("run", "-p", PROMPT, *options)
    assert done.returncode == 2 and words in done.stderr and not done.stdout


def test_they_are_not_in_the_help():
    assert "-ngl" not in pyspec("run", "--help").stdout.decode()


def test_positions_can_be_stretched(tmp_path):
    run = ["run", "-m", write_qwen3(tmp_path / "t.gguf"), "-t", 1, "-p", PROMPT * 4, "-n", 24, "--ignore-eos"]
    plain, same = pyspec(*run), pyspec(*run, "--rope-scaling", "linear", "--rope-scale", 1)
    other = pyspec(*run, "--rope-scaling", "yarn", "--rope-scale", 16, "--yarn-orig-ctx", 64)
    assert plain.returncode == same.returncode == other.returncode == 0
    assert plain.stdout == same.stdout != other.stdout
    twice = pyspec("run", "-p", PROMPT, "--rope-scale", 2, "--rope-freq-scale", 0.5)
    assert twice.returncode == 2 and "say the same thing" in twice.stderr
