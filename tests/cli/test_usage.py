"""What is wrong in the options alone is said before a model is loaded, as usage (2), in the names of the options; nothing asked for is dropped in silence."""

import ast
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from cli.conftest import PROMPT
from cli.process import one_sentence, pyspec
from pairs import with_control_tokens
from random_gguf.archs import write_qwen3
from random_gguf.model import Shape, write_dflash

import pyggml_spec as ps
from pyggml_spec.cli.foreign import KNOWN, options_of, resolve
from pyggml_spec.cli.main import cli, main
from pyggml_spec.cli.options import _place_layers, in_options
from pyggml_spec.cli.run import check_place, write_stats
from pyggml_spec.cli.terminal import json_line
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import ContextError, PyspecError
from pyggml_spec.ggml.device import pick_device
from pyggml_spec.loading import DEMO_TARGET

CPU = ["--device", "CPU", "-t", "1"]


@pytest.fixture
def said(capsys):
    """What a command writes to stderr, and its exit code: in this process."""

    def run(*args) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.slow
@pytest.mark.parametrize("options, words", [
    (["--spec-type", "draft-dflash", "--no-spec", "draft-dflash"], "draft-dflash is both requested and excluded"),
    (["--spec-type", ","], "--spec-type ',' names no drafting method"),
    (["--mode", "plain", "--reference-shape"], "--mode plain contradicts it"),
    (["--mode", "speculative", "--spec-type", "none"], "--spec-type none takes them away"),
    (["--ignore-eos", "-j", "{}"], "--ignore-eos would go on"),
    (["--n-probs", "3"], "--n-probs 3 limits what --logprobs writes"),
    (["--temp", "nan"], "--temp is nan"),
    (["--top-p", "1.5"], "--top-p is 1.5"),
    (["--samplers", "top_k;drier"], "drier"),
    (["--dry-sequence-breaker", ""], "1 to 40 bytes"),
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
])  # fmt: skip
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
def test_notes_on_options(said, tmp_path):
    run = ["run", *CPU, "-n", "2", "-p", "def", "-q", "-c", "256", "--require-spec"]
    for options, words in (
        (["--no-spec", "draft-dflash"], "give a drafter with -md, or leave --no-spec out"),
        (["--spec-type", "none"], "--spec-type none takes all drafts away"),
    ):
        code, text = said(*run, *options)
        assert code == 3 and words in text and "there is no drafter" not in text, text
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


@pytest.mark.parametrize("error, words", [
    (OSError(28, "No space left on device"), "the output cannot be written: No space left on device"),
    (OSError(22, "Invalid argument"), "the system refused the operation: Invalid argument"),
    (OSError(2, "No such file or directory", "x.pem"), "x.pem: No such file or directory"),
    (OSError("odd"), "the system refused the operation: odd"),
])  # fmt: skip
def test_an_error_of_the_system_is_called_what_it_is(said, monkeypatch, error, words):
    """Whatever it was, it was said to be the output."""

    def failing(*args, **kwargs):
        raise error

    monkeypatch.setattr("pyggml_spec.cli.run.load", failing)
    monkeypatch.setattr(sys.modules["pyggml_spec.cli.main"], "_drop_stdout", lambda: None)  # of this process
    assert said("run", "-p", "a") == (1, f"pyspec: {words}\n")


def test_options_of_compare_and_prompts(said, pair):
    code, text = said("compare", "--logits", pair[0], "--tolerance", "nan")
    assert code == 2 and "--tolerance is nan" in text
    code, text = said("compare", "--logits", pair[1])
    assert code == 1 and "is a drafter" in text and "-m" not in text.split() and "-md" not in text.split(), text
    code, text = said("run", *CPU, "-q", "-c", "64", "-p", "x" * 65)
    assert code == 1 and "the context of 64; raise -c to 321 or more" in text, text
    from pyggml_spec.cli.sampling import take_sampling

    options = {"logit_bias": ("5+1", "5+2.5", "7-1"), "samplers": None, "seed": None}
    assert take_sampling(options).sampling()[0].logit_bias == {5: 3.5, 7: -1.0}


def test_no_nan_in_json(tmp_path):
    value = {"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": "NaN"}}
    assert json.loads(json_line(value), parse_constant=pytest.fail) == {"a": [1.5, None, [None]], "b": {"c": None, "d": "NaN"}}
    stats = Stats(seconds={"load": math.nan, "prefill": math.inf, "decode": 1.0})
    assert write_stats(str(tmp_path / "s.json"), stats) is None
    text = (tmp_path / "s.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["seconds"] == {"load": None, "prefill": None, "decode": 1.0}
    assert text.startswith('{\n "mode"')  # a line for each


def run(target, draft=None, *more):
    drafter = ["-md", draft] if draft is not None else []
    return pyspec("run", "-m", target, *drafter, "--device", "CPU", "-t", 1, "-p", "a", "-n", 2, *more)


@pytest.mark.slow
def test_files_and_options_that_do_not_fit(pair, tmp_path):
    one_sentence(run(tmp_path / "none.gguf"), "none.gguf does not exist")
    one_sentence(run(pair[0], tmp_path / "none.gguf"), "none.gguf does not exist")
    done = pyspec("run", "-m", pair[0], "-f", tmp_path / "none.txt")
    one_sentence(done, "none.txt", "No such file")
    (tmp_path / "x").write_bytes(b"PK\3\4 not a model")
    one_sentence(run(tmp_path / "x"), "not a GGUF")
    one_sentence(run(tmp_path), "not a file")
    one_sentence(run(pair[1]), "is a drafter", "-md")
    one_sentence(run(*pair, "--draft-width", 17), "17", "block of 16")
    one_sentence(run(pair[0], None, "--draft-width", 4), "4", "-md")
    one_sentence(pyspec("run", "-md", pair[1], "-p", "a"), "name it with -m")
    one_sentence(pyspec("run", "-m", pair[0], "--device", "TPU7", "-p", "a"), "'TPU7'", "CPU")
    done = pyspec("run", "-m", pair[0], "-t", 1, "-ngl", 0, "-p", PROMPT, "-n", 2)
    assert done.returncode == 0 and " on CPU " in done.stderr
    done = pyspec("run", "-m", pair[0], "-t", 1, "-ngl", 2, "-p", PROMPT, "-n", 2)
    assert done.returncode == 0 and " on CPU " in done.stderr


@pytest.mark.parametrize("part", [3, 20, 0.01, 0.5, -1])
def test_truncated_files(pair, tmp_path, part):
    data = pair[0].read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: part if isinstance(part, int) else int(part * len(data))])
    one_sentence(run(tmp_path / "cut.gguf"), "cut.gguf")


@pytest.mark.parametrize("shape, words", [
    ({"n_vocab": 300}, ["target.gguf has 320 tokens", "other.gguf has 300"]),
    ({"n_embd": 128}, ["128", "256"]),
    ({"target_layers": (1, 2, 99)}, ["layer 99", "layers 0 to 3"]),
])  # fmt: skip
def test_a_drafter_for_another_target(pair, tmp_path, shape, words):
    one_sentence(run(pair[0], write_dflash(tmp_path / "other.gguf", Shape(**shape))), "other.gguf cannot draft for target.gguf", *words)


LISTED = [line.split() for line in (Path(__file__).parent / "llama_cpp_options.txt").read_text().splitlines() if not line.startswith("#")]
OFFERED = {"cli": ("run", "chat"), "server": ("serve",)}
VALUES = {"--spec-type": "suffix", "--host": "127.0.0.1", "--logit-bias": "5+1", "-l": "5+1"}
COMMANDS = {name: cli.get_command(click.Context(cli), name) for name in cli.names}


@pytest.mark.parametrize("tools, count, names", [(tools, int(count), names) for tools, count, *names in LISTED], ids=lambda v: str(v)[:40])
def test_every_option_of_llama_cpp_is_taken_or_answered(capsys, tools, count, names):
    """Each with its values: none may read as another option, and none ends in `No such option` alone."""
    for command in {one for tool in tools.split(",") for one in OFFERED[tool]}:
        ctx = click.Context(COMMANDS[command], click.Context(cli), info_name=command, help_option_names=["-h", "--help"])
        for name in names:
            try:
                left = resolve(ctx, [name, *["1"] * count, "-m", "x.gguf"])
            except click.UsageError as error:
                assert re.search(r"llama\.cpp option: .{20}|`pyspec \w+` has it", error.message), error.message
                continue
            assert left[-2:] == ["-m", "x.gguf"]
            note = capsys.readouterr().err
            assert left[:-2] or name == "--slots" or (name in KNOWN and (not KNOWN[name].text or KNOWN[name].text in note)), (command, name)


def test_options_refused_hidden_and_like_values(tmp_path):
    for name, one in KNOWN.items():
        assert not one.refused or len(one.text) > 20, name
        for words in re.findall(r"pyspec (\w+)", one.text):
            assert words in cli.names or words == "pyspec", one.text
        own = {option for command in COMMANDS.values() for option in options_of(command)} | {"--help", "--version"}
        assert not set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", re.sub(r"`hf [^`]*`", "", one.text))) - own, one.text
    ctx = click.Context(COMMANDS["run"], click.Context(cli), info_name="run")
    for args in (["-p", "--mlock", "-n", "-1"], ["-n20"], ["--prompt=-b", "-t4"], ["--", "--mlock"], ["-fa", "on", "-p", "a"]):
        assert resolve(ctx, args) == args
    assert resolve(ctx, ["-fa", "-p", "a"]) == ["-fa", "on", "-p", "a"]
    assert resolve(click.Context(COMMANDS["serve"]), ["--slots", "--metrics"]) == ["--metrics"]
    assert "-ngl" not in pyspec("run", "--help").stdout.decode()
    run = ["run", "-m", write_qwen3(tmp_path / "t.gguf"), "-t", 1, "-p", PROMPT * 4, "-n", 24, "--ignore-eos"]
    plain, same = pyspec(*run), pyspec(*run, "--rope-scaling", "linear", "--rope-scale", 1)
    other = pyspec(*run, "--rope-scaling", "yarn", "--rope-scale", 16, "--yarn-orig-ctx", 64)
    assert plain.returncode == same.returncode == other.returncode == 0 and plain.stdout == same.stdout != other.stdout
    twice = pyspec("run", "-p", PROMPT, "--rope-scale", 2, "--rope-freq-scale", 0.5)
    assert twice.returncode == 2 and "say the same thing" in twice.stderr


@pytest.mark.parametrize("args, words", [
    (["run", "--temprature", "1"], "no such option: --temprature; did you mean --temp"),
    (["run", "-temp", "0.5"], "did you mean --temp"), (["run", "--promt", "a"], "did you mean --prompt"),
    (["chat", "--sytem-prompt", "a"], "did you mean --system-prompt"), (["serve", "--prot", "80"], "did you mean --port"),
    (["doctor", "--devise", "CPU"], "did you mean --device"), (["compare", "--logit", "x.gguf"], "did you mean --logits"),
    (["run", "--port", "80"], "`pyspec serve` has it"), (["run", "--qqqq"], "`pyspec run --help` lists the options"),
    (["rnu"], "there is no command 'rnu'; did you mean run?"), (["sever"], "did you mean serve?"),
    (["llama-server"], "use `pyspec serve`"), (["qqqq"], "`pyspec --help` lists them"), (["model.gguf"], "pyspec run -m model.gguf"),
    (["run", "--kernels", "gmml"], "did you mean ggml?"), (["run", "-ctk", "q8"], "did you mean q8_0?"),
    (["run", "--mode", "spekulative"], "did you mean speculative?"),
    (["run", "-p", "a", "--spec-type", "draft-dflahs"], "did you mean draft-dflash?"),
    (["run", "-p", "a", "--samplers", "topk"], "did you mean top_k?"), (["run", "-p", "a", "--device", "CPPU"], "did you mean CPU?"),
])  # fmt: skip
def test_what_was_perhaps_meant(said, args, words):
    code, text = said(*args)
    assert code in (1, 2) and words in text, text


MODEL = ["--device", "CPU", "-t", "1", "-c", "256", "-n", "4"]


@pytest.fixture
def instruct(tmp_path):
    """A model file with a chat template."""
    return with_control_tokens(write_qwen3(tmp_path / "plain.gguf"), tmp_path / "chat.gguf")


def test_run_on_a_model_that_chats_says_how(said, instruct):
    code, text = said("run", "-m", instruct, *MODEL, "-p", "hello")
    assert code == 0 and "continued as raw text" in text and "`pyspec chat`" in text and "-cnv" in text
    code, text = said("run", "-m", instruct, *MODEL, "-no-cnv", "-p", "hello")
    assert code == 0 and "raw text" not in text


@pytest.mark.slow
@pytest.mark.parametrize("how", [["-cnv", "-st"], ["-sys", "Be brief.", "-st"], ["-st"]])
def test_a_conversation_of_llama_cli_is_a_chat(said, instruct, how):
    code, text = said("run", "-m", instruct, *MODEL, *how, "--n-predict", 3, "-p", "hello", "--mlock", "--no-mmap", "-b", 512, "-e")
    assert code == 0 and "`pyspec chat` runs" in text and "chat: " in text and "prompt " in text and "--mlock has no effect here" in text, (
        text
    )


@pytest.mark.slow
def test_escapes_are_read_where_that_is_asked_for(said):
    from pyggml_spec.cli.options import unescaped

    assert unescaped(r"a\n\t\\n\x41\q\"") == 'a\n\t\\nA\\q"'
    code, text = said("run", *MODEL, "-e", "-p", r"def f():\n")
    assert code == 0 and r'prompt: "def f():\n"' in text


PASTED = ["-ngl", 99, "-ngld", "all", "-fa", "on", "--spec-type", "draft-dflash", "--spec-draft-n-max", 3]


def test_llama_cpps_lines_and_limits(pair, pinned):
    files = ["-m", pair[0], "--spec-draft-model", pair[1]]
    pasted = pyspec("run", *files, "-t", 1, "--device", "CPU", *PASTED, "-p", PROMPT, "-n", 20)
    ours = pyspec("run", *pinned, "-p", PROMPT, "-n", 20)
    assert pasted.returncode == 0 and pasted.stdout == ours.stdout and "width 4 " in pasted.stderr
    assert pasted.stderr.splitlines()[0] == ours.stderr.splitlines()[0]
    # llama.cpp's number is a limit, ours a width: the one is cut to the block, the other refused.
    run = ["run", "-m", pair[0], "-md", pair[1], "-t", 1, "--device", "CPU", "-p", PROMPT, "-n", 2]
    done, refused = pyspec(*run, "--spec-draft-n-max", 99), pyspec(*run, "--draft-width", 100)
    assert done.returncode == 0 and "drafts are made where 99 may be" in done.stderr
    assert refused.returncode == 1 and "wider than the block" in refused.stderr
    # A command line with the limit and without a drafter was told that a draft width needs one.
    run = ["run", "-m", pair[0], "-t", 1, "--device", "CPU", "-p", PROMPT, "-n", 4]
    for more in ([], ["--spec-type", "none"]):
        assert pyspec(*run, *more, "--draft-max", 8).returncode == 0


@pytest.mark.parametrize("asked, shares", [(5, None), (4, [1, 3]), (2, [3, 1])])
def test_fewer_layers_than_there_are_leave_the_first_to_the_cpu(pair, monkeypatch, asked, shares):
    gpu = replace(pick_device("CPU"), name="CUDA0", kind="gpu")
    monkeypatch.setattr("pyggml_spec.cli.options.pick_devices", lambda names: [gpu])
    values = {"device": None}
    _place_layers(asked, values, pair[0])
    assert values == ({"device": None} if shares is None else {"device": "CPU,CUDA0", "tensor_split": shares})
    with pytest.raises(PyspecError, match="-ngl 1 would leave 4 of 4 layers in host memory"):
        _place_layers(1, values, pair[0])


@pytest.mark.parametrize("options, words", [
    (["-fa", "off"], "always flash attention"), (["--spec-type", "ngram-cache"], "no lookup files"), (["-ngl", "some"], "'some'"),
    (["--spec-draft-n-max", 0], "x<=1023"), (["--spec-draft-n-max", 3, "--draft-width", 8], "contradict"), (["-ngl", 0, "--device", "CUDA0"], "contradict"),
    (["-ngld", 0], "another device"), (["-sm", "row"], "whole layers are on one device"), (["-sm", "none", "--device", "CPU,CPU"], "contradict"),
    (["-ts", "1,x"], "'1,x' is not a list of proportions"),
])  # fmt: skip
def test_what_they_cannot_have(options, words):
    done = pyspec("run", "-p", PROMPT, *options)
    assert done.returncode == 2 and words in done.stderr and not done.stdout


ROOT = DEMO_TARGET.parents[1]
COMMAND = re.compile(r"(pyspec|pip|llama-gguf-split|gguf-set-metadata|nvidia-smi) [^;`]*")  # a whole command line to type, options and all


def _commands(group=cli):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield from _commands(command) if isinstance(command, click.Group) else [command]


OPTIONS = {name for command in _commands() for param in command.params if isinstance(param, click.Option) for name in param.opts}


def _texts(path):
    """The string literals of a file, docstrings left out, with {} for what is filled in."""
    tree = ast.parse(path.read_text("utf-8"))
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
        if parts and id(node) not in described:
            yield "".join(str(part.value) if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}" for part in parts)


@pytest.mark.parametrize("path", [p for p in sorted(ROOT.rglob("*.py")) if p.parts[len(ROOT.parts)] != "cli"], ids=lambda p: p.name)
def test_no_sentence_of_the_library_names_an_option(path):
    words = {word for text in _texts(path) if " " in text for word in re.findall(r"(?<![\w-])--?[a-z][\w-]*", COMMAND.sub("", text))}
    assert not words & OPTIONS


@pytest.mark.slow
def test_arguments_as_options_and_limits_as_in_llama_cpp():
    run, convert = (next(c for c in _commands() if c.name == name) for name in ("run", "convert"))
    assert (
        in_options("raise `n_ctx`, or `draft_width`; `cache_type_k` and `nothing`", run) == "raise -c, or --draft-width; -ctk and `nothing`"
    )
    assert in_options("`replace` it; use `kind` bf16", convert) == "--force it; use --type bf16"
    assert in_options("give it with `draft`") == "give it with -md"  # no command runs
    with pytest.raises(ContextError, match="`n_ctx`"), ps.load(device="CPU", threads=1, n_ctx=64) as session:
        session.generate([1] * 65)
    one_sentence(pyspec("run", *CPU, "-q", "-c", 64, "-p", "x" * 65), "raise -c")
    for command, hint in (("run", "with -p"), ("chat", "piped in")):
        done = pyspec(command, "Write a poem")
        assert done.returncode == 2 and "unexpected argument 'Write a poem'" in done.stderr and hint in done.stderr
    # -n -1 and -2: until the end token or the end of the context. -c 0: the context that the model was trained with.
    counts = []
    for limit in ("-1", "-2", "300"):
        done = pyspec("run", *CPU, "--mode", "plain", "-c", 64, "--ignore-eos", "-p", "def f(", "-n", limit)
        counts.append(re.search(r"(\d+) tokens in .* steps", done.stderr)[1])
        assert "ended by: context" in done.stderr
    assert counts[0] == counts[1] == counts[2] and pyspec("run", *CPU, "-p", "a", "-n", "-3").returncode == 2
    with ps.load(device="CPU", threads=1, n_ctx=0) as session:
        trained = session.target.context_length
        assert session.runner.options.n_ctx == trained
    assert f"context {trained} " in pyspec("run", *CPU, "-p", "a", "-n", 1, "-c", 0).stderr
