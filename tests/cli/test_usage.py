"""What is wrong in the options alone is said before a model is loaded, as usage (2), in the names of the options; nothing asked for is dropped in silence."""

import json
import math
import sys
from pathlib import Path

import pytest
from random_gguf.archs import write_qwen3

from pyggml_spec.cli.main import main
from pyggml_spec.cli.run import check_place, write_stats
from pyggml_spec.cli.tables import json_line
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import PyspecError

CPU = ["--device", "CPU", "-t", "1"]


@pytest.fixture
def said(capsys, monkeypatch):
    """What a command writes to stderr, and its exit code: in this process."""

    def run(*args) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, words",
    [
        (["--spec-type", "draft-dflash", "--no-spec", "draft-dflash"], "draft-dflash is asked for as a way of drafting and ruled out"),
        (["--spec-type", ","], "--spec-type ',' names no drafting method"),
        (["--mode", "plain", "--reference-shape"], "--mode plain contradicts it"),
        (["--mode", "speculative", "--spec-type", "none"], "--spec-type none takes them away"),
        (["--ignore-eos", "-j", "{}"], "--ignore-eos would go on"),
        (["--n-probs", "3"], "--n-probs 3 limits what --logprobs writes"),
        (["--temp", "nan"], "--temp is nan"),
        (["--top-p", "1.5"], "--top-p is 1.5"),
        (["--samplers", "top_k;dry"], "dry"),
        (["--json-schema", "{}", "--grammar", "root ::= [a]"], "give one of them"),
        (["--grammar", "root ::= [a]", "--ignore-eos"], "--ignore-eos would go on"),
        (["--typical", "nan"], "--typical is nan"),
        (["--repeat-penalty", "0"], "--repeat-penalty is 0.0"),
        (["-l", "5+inf"], "the logit bias inf for token 5"),
        (["--rope-scale", "nan"], "--rope-scale is nan"),
        (["--rope-scale", "inf"], "--rope-scale is inf"),
        (["--rope-freq-base", "nan"], "--rope-freq-base is nan"),
        (["--rope-scaling", "none", "--rope-scale", "4"], "stretches nothing, so --rope-scale"),
        (["--stop", ""], "--stop is empty"),
        (["--stats", "x.json", "--logprobs", "./x.json"], "--stats and --logprobs both name x.json"),
        (["-n", "-3"], "-3 is not in the range -1 or x>=0"),
        (["-m", ""], "the name that -m gives is empty"),
        (["-m", "a.gguf", "-md", ""], "the name that -md gives is empty"),
    ],
)  # fmt: skip
def test_what_options_alone_say_is_wrong_is_usage(said, monkeypatch, options, words):
    monkeypatch.setattr("pyggml_spec.cli.run.load", lambda *a, **k: pytest.fail("a model was loaded"))
    code, text = said("run", "-p", "a", "-n", "1", *options)
    assert code == 2 and words in text and "`" not in text, text


def test_a_place_where_no_file_can_be_is_said_before_a_model_is_loaded(said, monkeypatch, tmp_path):
    """It was said after the text, which may have taken an hour."""
    monkeypatch.setattr("pyggml_spec.cli.run.load", lambda *a, **k: pytest.fail("a model was loaded"))
    monkeypatch.setattr("pyggml_spec.cli.experts.load", lambda *a, **k: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    for place, words in (("missing/s.json", "there is no folder missing"), (".", "that is a folder"), ("", "that is a folder")):
        for option, what in (("--stats", "statistics"), ("--logprobs", "log probabilities")):
            code, text = said("run", "-p", "a", option, place)
            assert code == 1 and text.startswith(f"pyspec: the {what} cannot be written to {place}") and words in text, text
        code, text = said("experts", "profile", "-m", "t.gguf", "-f", __file__, "-o", place or ".")
        assert code == 1 and "the profile cannot be written to" in text and words in text, text
    assert not list(tmp_path.iterdir())
    (tmp_path / "t.gguf").write_bytes(b"GGUF and hours of fetching")
    code, text = said("run", "-p", "a", "-m", "t.gguf", "--stats", "t.gguf")
    assert code == 1 and "cannot be written to t.gguf: that is a GGUF file" in text, text
    (tmp_path / "s.json").write_text("old")
    check_place(tmp_path / "s.json", "statistics")


def test_a_folder_that_cannot_be_written_is_said_before_a_model_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(PyspecError, match=r"s.json: the folder \S+ cannot be written; name another file"):
        check_place(tmp_path / "s.json", "statistics")
    (tmp_path / "s.json").write_text("old")  # a new file takes its place: the folder has to take that one
    with pytest.raises(PyspecError, match=r"s.json: the folder \S+ cannot be written; name another file"):
        check_place(tmp_path / "s.json", "statistics")
    for place in ("/dev/null", "/dev/stdout", "/dev/fd/1"):  # the latter may be a file, which is written as it is
        check_place(Path(place), "statistics")


@pytest.mark.slow
def test_require_spec_names_what_took_the_drafter_away(said):
    run = ["run", *CPU, "-n", "2", "-p", "def", "-q", "-c", "256", "--require-spec"]
    for options, words in (
        (["--no-spec", "draft-dflash"], "give a drafter with -md, or leave --no-spec out"),
        (["--spec-type", "none"], "--spec-type none takes all drafts away"),
    ):
        code, text = said(*run, *options)
        assert code == 3 and words in text and "there is no drafter" not in text, text


@pytest.mark.slow
def test_stretched_positions_and_options_without_effect_are_said(said, tmp_path):
    run = ["run", *CPU, "-m", write_qwen3(tmp_path / "t.gguf"), "-n", "1", "-p", "a", "-c", "256"]
    for options, words in (
        (["--rope-scale", "2"], "note: positions are stretched 2 times"),
        (["--rope-scaling", "linear"], "the rope options change nothing"),
        (["--yarn-orig-ctx", "100"], "the rope options change nothing"),
        (["--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "100"], "stretched 4 times with yarn (1) from 100 tokens"),
    ):
        code, text = said(*run, *options)
        assert code == 0 and words in text, text
    assert "positions are" not in said(*run)[1]


@pytest.mark.slow
def test_a_vocabulary_of_drafts_beyond_the_vocabulary_is_said(said):
    code, text = said("run", *CPU, "-n", "1", "-p", "a", "-c", "256", "--draft-vocab", "99999999")
    assert code == 0 and "--draft-vocab 99999999 changes nothing: the vocabulary has" in text, text


@pytest.mark.parametrize("option", ["--drain", "--queue-timeout", "--expert-residency"])
def test_not_a_number_is_within_no_range(said, option):
    """`--drain nan` was taken: a server that ends would have waited for ever."""
    for value in ("nan", "inf"):
        code, text = said("serve", option, value)
        assert code == 2 and (f"{value} is not a finite number" in text or "inf is not in the range" in text), text


@pytest.mark.parametrize("share", ["nan", "-1", "0", "inf"])
def test_a_share_of_one_device_is_a_number(said, share):
    code, text = said("run", *CPU, "-p", "a", "-n", "1", "-ts", share)
    assert code == 1 and f"there is one for {share}: name them with --device" in text, text


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(28, "No space left on device"), "the output cannot be written: No space left on device"),
        (OSError(22, "Invalid argument"), "the system refused the operation: Invalid argument"),
        (OSError(2, "No such file or directory", "x.pem"), "x.pem: No such file or directory"),
        (OSError("odd"), "the system refused the operation: odd"),
    ],
)
def test_an_error_of_the_system_is_called_what_it_is(said, monkeypatch, error, words):
    """Whatever it was, it was said to be the output."""

    def failing(*args, **kwargs):
        raise error

    monkeypatch.setattr("pyggml_spec.cli.run.load", failing)
    monkeypatch.setattr(sys.modules["pyggml_spec.cli.main"], "_drop_stdout", lambda: None)  # of this process
    assert said("run", "-p", "a") == (1, f"pyspec: {words}\n")


def test_compare_names_its_own_options(said, pair):
    code, text = said("compare", "--logits", pair[0], "--tolerance", "nan")
    assert code == 2 and "--tolerance is nan" in text
    code, text = said("compare", "--logits", pair[1])
    assert code == 1 and "is a drafter" in text and "-m" not in text.split() and "-md" not in text.split(), text


def test_a_prompt_that_does_not_fit_is_told_of_a_context_not_of_slots(said):
    code, text = said("run", *CPU, "-q", "-c", "64", "-p", "x" * 65)
    assert code == 1 and "the context of 64; raise -c to 321 or more" in text, text


def test_biases_of_one_token_add_up():
    from pyggml_spec.cli.sampling import take_sampling

    options = {"logit_bias": ("5+1", "5+2.5", "7-1"), "samplers": None, "seed": None}
    assert take_sampling(options).sampling()[0].logit_bias == {5: 3.5, 7: -1.0}


def test_json_has_no_nan():
    value = {"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": "NaN"}}
    assert json.loads(json_line(value), parse_constant=pytest.fail) == {"a": [1.5, None, [None]], "b": {"c": None, "d": "NaN"}}


def test_statistics_in_a_file_have_no_nan(tmp_path):
    stats = Stats(seconds={"load": math.nan, "prefill": math.inf, "decode": 1.0})
    assert write_stats(str(tmp_path / "s.json"), stats) is None
    text = (tmp_path / "s.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["seconds"] == {"load": None, "prefill": None, "decode": 1.0}
    assert text.startswith('{\n "mode"')  # a line for each
