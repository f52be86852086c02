"""Experts in host memory from the command line: profile, then run with it; contradictions are usage errors."""

import json

import click
import pytest
from cli.process import one_sentence, pyspec
from random_gguf.archs import write_qwen35moe

from pyggml_spec.cli.options import OffloadRows

CPU = ("--device", "CPU", "-t", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_qwen35moe(tmp_path_factory.mktemp("experts") / "t.gguf", quant="Q8_0")


def test_profile_then_run_with_it(model, tmp_path):
    text, stats = tmp_path / "text.txt", tmp_path / "stats.json"
    text.write_text("Which experts does this text need? " * 40)
    done = pyspec("experts", "profile", "-m", model, "-f", text, *CPU)
    assert done.returncode == 0 and "| 0.5 | " in done.stdout.decode() and f"{model}.experts.json" in done.stderr
    run = ("run", "-m", model, "-p", "Which experts", "-n", 12, "--ignore-eos", "-c", 128, *CPU)
    plain = pyspec(*run)
    for more in (("--expert-residency", 0.5), ("--cpu-moe",), ("--n-cpu-moe", 1, "--expert-residency", 0.5)):
        done = pyspec(*run, *more, "--stats", stats)
        assert done.returncode == 0 and done.stdout == plain.stdout
        assert "in host memory" in done.stderr and "% of" in done.stderr
        seen = json.loads(stats.read_text())
        assert seen["expert_hit_rate"] == seen["experts"]["hits"] / seen["experts"]["chosen"]
        assert (seen["expert_hit_rate"] == 0) == (more == ("--cpu-moe",))


def test_residency_without_a_profile_says_how_to_make_one(tmp_path):
    model = write_qwen35moe(tmp_path / "t.gguf")
    one_sentence(pyspec("run", "-m", model, "-p", "x", "--expert-residency", 0.5, *CPU), "no routing profile", "pyspec experts profile")


def test_prompts_with_copies_are_off_measured_or_from_a_number_of_rows_on():
    asked = OffloadRows()
    assert [asked.convert(text, None, None) for text in ("off", "auto", "128")] == [None, "auto", 128]
    for text, words in (("maybe", "neither auto nor off, nor a number of rows"), ("0", "not in the range"), ("-1", "neither auto nor off")):
        with pytest.raises(click.BadParameter, match=words):
            asked.convert(text, None, None)


@pytest.mark.parametrize("options", [("--expert-profile", "x.json"), ("--cpu-moe", "--n-cpu-moe", 1), ("--expert-residency", 2)])
def test_contradictions_are_usage_errors(model, options):
    assert pyspec("run", "-m", model, "-p", "x", *options, *CPU).returncode == 2


def test_experts_of_a_dense_model_and_texts_that_are_too_short(model, pair, tmp_path):
    one_sentence(pyspec("run", "-m", pair[0], "-p", "x", "--cpu-moe", *CPU), "no routed experts")
    (tmp_path / "t.txt").write_text("short")
    one_sentence(pyspec("experts", "profile", "-m", model, "-f", tmp_path / "t.txt", "-o", tmp_path / "p.json", *CPU), "too few")
    assert not (tmp_path / "p.json").exists()
    one_sentence(pyspec("experts", "profile", "-m", model, "-f", tmp_path / "none.txt", *CPU), "none.txt")
