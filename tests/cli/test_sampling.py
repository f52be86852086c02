"""The sampling options of `pyspec run`: llama.cpp's names, nothing ignored in silence, files whole or not at all."""

import json
import re

import pytest
from cli.conftest import PROMPT
from cli.process import one_sentence, pyspec
from gguf_io.build import F32, I32, Model

N = ["-p", PROMPT, "-n", 30]


def test_a_seed_gives_its_text_again_in_both_modes(pinned):
    options = ["--temp", 1.2, "--seed", 5, "--repeat-penalty", 1.1]
    first, again, plain = (pyspec("run", *pinned, *N, *options, *more) for more in ([], [], ["--reference-shape"]))
    assert first.returncode == 0 and first.stdout == again.stdout == plain.stdout
    assert "temperature 1.2" in first.stderr.splitlines()[0] and "--seed 5" in first.stderr
    assert pyspec("run", *pinned, *N, "--temp", 1.2, "-s", 6, "-q").stdout != first.stdout


def test_without_options_it_is_greedy_and_temperature_0_is_the_same(pinned, text):
    done = pyspec("run", *pinned, *N, "--temp", 0)
    assert text.startswith(done.stdout.decode()) and "| greedy |" in done.stderr and "--seed" not in done.stderr


def test_one_sampling_option_brings_llama_cpps_defaults_and_says_so(pinned, tmp_path):
    done = pyspec("run", *pinned, *N, "--top-k", 7, "--stats", tmp_path / "s.json")
    assert "top-k 7, top-p 0.95, min-p 0.05, temperature 0.8" in done.stderr.splitlines()[0]
    stats = json.loads((tmp_path / "s.json").read_text())
    assert f"--seed {stats['seed']}" in done.stderr and "top-k 7" in stats["sampling"]


def test_log_probabilities_of_every_token(pinned, tmp_path):
    done = pyspec("run", *pinned, *N, "--temp", 0, "--logprobs", tmp_path / "p.jsonl", "--n-probs", 2)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert done.returncode == 0 and len(lines) == 30
    assert all(line["top"][0]["token"] == line["token"] and len(line["top"]) == 2 and line["logprob"] <= 0 for line in lines)
    missing = pyspec("run", *pinned, *N, "-q", "--logprobs", "/dev/full")
    assert missing.returncode == 1 and missing.stdout and "log probabilities cannot be written" in missing.stderr


def test_bias_grammar_and_schema(tmp_path):
    demo = ["--device", "CPU", "-t", 1, "--draft-width", 4, "-c", 512, "-q", "-p", "x = "]
    (tmp_path / "g").write_text('root ::= "[" [0-9]{3,3} "]"')
    assert pyspec("run", *demo, "--grammar-file", tmp_path / "g").stdout.decode().strip("[]").isdigit()
    assert json.loads(pyspec("run", *demo, "-j", '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}').stdout)
    assert re.fullmatch(r"[a-c]{2}-\d", pyspec("run", *demo, "--regex", r"[a-c]{2}-\d").stdout.decode())
    (tmp_path / "l").write_text('start: "<" %json {"type": "integer", "minimum": 4, "maximum": 9} ">"')
    assert pyspec("run", *demo, "--lark-file", tmp_path / "l").stdout.decode().strip("<>") in set("456789")
    plain, biased = (pyspec("run", *demo, "-n", 8, *more).stdout for more in ([], ["-l", "319-inf", "--logit-bias", "15+20.5"]))
    assert plain != biased


def test_what_a_constraint_did_is_in_the_footer():
    demo = ["--device", "CPU", "-t", 1, "--draft-width", 4, "-c", 512, "-p", "x = ", "-j", '{"enum": [{"a_rather_long_name": 1}]}']
    whole, cut = pyspec("run", *demo, "-n", 40), pyspec("run", *demo, "-n", 4)
    assert json.loads(whole.stdout) == {"a_rather_long_name": 1}
    assert "ended by: end\n" in whole.stderr and "forced by the constraint: " in whole.stderr
    assert "ended by: length (cut: not complete)" in cut.stderr


def test_what_the_file_recommends_counts_where_nothing_was_asked_for(pair, pinned, tmp_path):
    model = Model(pair[0])
    model.keys |= {f"general.sampling.{key}": value for key, value in {"temp": (F32, 0.5), "top_k": (I32, 7), "mirostat": (I32, 2)}.items()}
    options = ["-m", model.write(tmp_path / "t.gguf"), *pinned[2:], *N[:2], "-n", 6]
    greedy, sampled, asked = (pyspec("run", *options, *more) for more in ([], ["-s", 1], ["-s", 1, "--temp", 0.5, "--top-k", 9, "-q"]))
    assert (
        "| greedy |" in greedy.stderr
        and "note: t.gguf recommends top-k 7, top-p 0.95, min-p 0.05, temperature 0.5; this is greedy" in greedy.stderr
    )
    assert (
        "| top-k 7, top-p 0.95, min-p 0.05, temperature 0.5 |" in sampled.stderr
        and "note: t.gguf recommends mirostat 2, which is not" in sampled.stderr
    )
    same = pyspec("run", *pinned, *N[:2], "-n", 6, "-q", "-s", 1, "--temp", 0.5, "--top-k", 9)
    assert asked.stdout == same.stdout and asked.stderr == ""


@pytest.mark.parametrize(
    "options, words",
    [
        (["--grammar", "root ::= ("], ["grammar is wrong"]), (["-j", "{"], ["no JSON"]), (["-l", "999999+1"], ["token 999999"]),
        (["--grammar-file", "/nowhere"], ["/nowhere"]), (["-j", '{"not": {}}'], ["'not'"]), (["--regex", "("], ["regular expression"]),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_is_one_sentence(pinned, options, words):
    one_sentence(pyspec("run", *pinned, *N, "-q", *options), *words)


def test_usage(pinned):
    for options, words in (
        (["-l", "5*2"], "5*2"),
        (["--grammar", "a", "--grammar-file", "b"], "not both"),
        (["--mirostat", 2], "--mirostat"),
        (["-s", -2], "-2"),
    ):
        done = pyspec("run", *pinned, *N, *options)
        assert done.returncode == 2 and words in done.stderr
