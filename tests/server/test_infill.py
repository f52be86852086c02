"""/infill: what editors ask, laid out as llama.cpp's server lays it out."""

import struct
from types import SimpleNamespace

import pytest
from server.running import Running, events

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.sampling.sampler import Sampling
from pyggml_spec.server.bodies import Infill
from pyggml_spec.server.errors import ApiError
from pyggml_spec.server.infill import BATCH, SNIPPET, _read, lay_out
from pyggml_spec.server.output import Output
from pyggml_spec.server.served import ServeOptions
from pyggml_spec.server.tasks import TaskRequest
from pyggml_spec.text.stream import LENGTH, STOP, BlockText, LineLimits
from pyggml_spec.text.tokenizer import Fim, Tokenizer

FIM = {"pre": 4001, "suf": 4002, "mid": 4003, "rep": 4004, "sep": 4005}
AROUND = {"input_prefix": "def total(items):\n    ", "input_suffix": "\n    return result\n"}
EXTRA = [{"filename": "a.py", "text": "x = 1\n"}, {"filename": None, "text": "y = 2\n"}]
N_CTX = 512


def with_keys(source, out, keys):
    """A model file with further metadata: its data stays where it is modulo 32."""
    data = source.read_bytes()
    added = b"".join(struct.pack("<Q", len(key)) + key.encode() + struct.pack("<II", 4, value) for key, value in keys.items())
    name = b"test.padding"
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", 8)
    text = b" " * (-(len(added) + len(head) + 8) % 32)
    added += head + struct.pack("<Q", len(text)) + text
    (count,) = struct.unpack_from("<Q", data, 16)
    out.write_bytes(data[:16] + struct.pack("<Q", count + len(keys) + 1) + added + data[24:])
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return with_keys(
        DEMO_TARGET, tmp_path_factory.mktemp("fim") / "fim.gguf", {f"tokenizer.ggml.fim_{n}_token_id": i for n, i in FIM.items()}
    )


@pytest.fixture(scope="module")
def server(model):
    with Running("-m", model, "-md", DEMO_DRAFTER, "--slots", 2, "-c", N_CTX, "--draft-width", 4) as running:
        yield running


@pytest.fixture(scope="module")
def encode(model):
    tokenizer = Tokenizer(GGUFFile(model))
    assert tokenizer.fim() == Fim(4001, 4002, 4003, 4004, 4005)
    yield lambda text: tokenizer.encode(text, bos=False)
    tokenizer.close()


def asked(server, want, **body):
    """The answer, to a prompt that is these tokens."""
    said = server.ok("/infill", temperature=0, n_predict=8, **body)
    assert said["prompt"] == server.ok("/detokenize", tokens=want)["content"] and said["tokens_evaluated"] == len(want)
    return said


@pytest.mark.slow
def test_what_stands_around_the_cursor_comes_between_the_models_tokens(server, encode):
    first = [4004, *encode("myproject\n")]
    here = [
        4005,
        *encode("filename\n"),
        4001,
        *encode(AROUND["input_prefix"]),
        *encode("result"),
        4002,
        *encode(AROUND["input_suffix"]),
        4003,
    ]
    said = asked(server, [*first, *here], **AROUND, prompt="result")
    assert said["tokens_predicted"] == 8 and said["speculation"]["mode"] == "speculative"
    files = [4005, *encode("a.py\n"), *encode("x = 1\n"), 4005, *encode("tmp\n"), *encode("y = 2\n")]
    asked(server, [*first, *files, *here], **AROUND, prompt="result", input_extra=EXTRA)
    whole = said["content"]
    streamed = server.post("/infill", **AROUND, prompt="result", temperature=0, n_predict=8, stream=True)
    assert b"".join(events(streamed)).count(b'"stop":true') == 1
    assert server.ok("/infill", **AROUND, prompt="result", temperature=0, n_predict=8, response_fields=["content"]) == {"content": whole}
    mixed = {"input_prefix": [4006, "    "], "input_suffix": [4007]}
    asked(server, [*first, 4005, *encode("filename\n"), 4001, 4006, *encode("    "), 4002, 4007, 4003], **mixed)


def test_editors_are_answered(server):
    """What llama.vim sends: its order of samplers was refused, and so was every completion."""
    body = {
        **AROUND, "id_slot": 0, "input_extra": [{"text": "a", "time": 123, "filename": "x.py"}], "prompt": "    ", "n_predict": 16, "stop": [], "n_indent": 4,
        "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "truncated"], "stream": False,
    }  # fmt: skip
    answer = server.post("/infill", **body)
    assert answer.status_code == 200 and set(answer.json()) == {"content", "prompt_n", "truncated"}
    assert "x-pyspec-ignored" not in answer.headers
    assert server.ok("/infill", **body | {"n_predict": 0, "samplers": [], "response_fields": [""]}) == {}  # the prompt alone, ahead of use
    refused = server.post("/infill", **body | {"samplers": ["infill"]})
    assert refused.status_code == 400 and "top_k" in refused.json()["error"]["message"]


def test_of_what_is_too_long_stays_what_is_near_the_cursor(server, encode):
    line = "value = value + 1\n"
    prefix, suffix, extra = (encode(line * n) for n in (100, 101, 102))
    batch = min(BATCH, N_CTX // 2)
    before, behind = prefix[-3 * (batch // 4) :], suffix[: batch // 4 - 2]
    rest = [4001, *before, 4002, *behind, 4003]
    names = [4004, *encode("myproject\n"), 4005, *encode("tmp\n"), *extra, 4005, *encode("filename\n")]
    room = N_CTX - batch - 16
    asked(server, [*names[-room:], *rest], input_prefix=line * 100, input_suffix=line * 101, input_extra=[{"text": line * 102}])


@pytest.mark.parametrize("body", [
    {"input_prefix": "value = 1\n" * 900_000, "input_suffix": "value = 1\n" * 900_000, "input_extra": [{"text": "value = 1\n" * 900_000}]},
    {"input_prefix": ["value = 1\n"] * 9000, "input_suffix": ["value = 1\n"] * 9000, "input_extra": [{"text": "value = 1\n"}] * 9000},
])  # fmt: skip
def test_what_is_cut_off_is_not_encoded(model, encode, body):
    """4 MB of text took a thread of the server three seconds, and one after the other all of them."""
    tokenizer = Tokenizer(GGUFFile(model))
    encoded, served = [], SimpleNamespace(n_ctx=N_CTX, longest_piece=16, options=ServeOptions(), known=lambda ids, name: ids)
    served.tokenizer = SimpleNamespace(bos=None, encode=lambda text, **how: encoded.append(len(text)) or tokenizer.encode(text, **how))
    ids = lay_out(served, tokenizer.fim(), Infill(**body), encode("x"), 8)
    assert sum(encoded) < 60_000
    line, batch = encode("value = 1\n"), N_CTX // 2
    prefix, suffix = (line * batch)[-3 * (batch // 4) :], (line * batch)[: batch // 4 - 2 - 1]
    assert ids[-(len(prefix) + len(suffix) + 4) :] == [4001, *prefix, *encode("x"), 4002, *suffix, 4003]
    tokenizer.close()


def test_models_that_fill_in_backwards_and_those_that_do_not(model, encode, tmp_path):
    few = with_keys(DEMO_TARGET, tmp_path / "few.gguf", {f"tokenizer.ggml.fim_{n}_token_id": FIM[n] for n in ("pre", "suf", "mid")})
    backwards = Running("-m", few, "--slots", 1, "-c", 256, "--spm-infill")
    try:
        here = [4002, *encode(AROUND["input_suffix"]), 4001, *encode(AROUND["input_prefix"]), 4003]
        asked(backwards, [*encode(SNIPPET), *encode("x = 1\n"), *here], **AROUND, input_extra=EXTRA[:1])
    finally:
        backwards.end()
    none = SimpleNamespace(name="m.gguf", tokenizer=SimpleNamespace(fim=lambda: Fim(1, None, None, 2, 3)))
    with pytest.raises(ApiError, match="no token for suffix and middle") as refused:
        _read(SimpleNamespace(served=none), Infill(**AROUND), "")
    assert refused.value.status == 501


@pytest.mark.parametrize(
    "body, param",
    [
        ({"input_prefix": "x"}, "input_suffix"),
        ({"input_suffix": "x"}, "input_prefix"),
        ({**AROUND, "input_prefix": {}}, "input_prefix"),
        ({**AROUND, "input_prefix": [1.5]}, "input_prefix"),
        ({**AROUND, "input_prefix": [99999]}, "input_prefix"),
        ({**AROUND, "input_suffix": ["x", 99999]}, "input_suffix"),
        ({**AROUND, "prompt": ["x"]}, "prompt"),
        ({**AROUND, "prompt": "value = 1\n" * 300}, "prompt"),
        *(({**AROUND, "input_extra": extra}, "input_extra") for extra in ({}, ["x"], [{}], [{"filename": "ok"}], [{"filename": 1, "text": "x"}], [{"text": 1}])),
        ({**AROUND, "n_indent": -1}, "n_indent"),
        ({**AROUND, "t_max_predict_ms": "soon"}, "t_max_predict_ms"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server, body, param):
    answer = server.post("/infill", **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def run(text, lines, size):
    """What comes out of ``text`` in tokens of ``size`` characters, and why it ended."""
    pieces = [text[i : i + size].encode() for i in range(0, len(text), size)]
    block, out = BlockText(lambda i: pieces[i], ["never"], lines), ""
    for i in range(len(pieces)):
        why = block.completes(i)
        out += block.take([i])
        if why:
            return out, why
    return out + block.finish(), ""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_completion_ends_where_its_lines_go_further_out(size):
    text = "a(\n        b)\n\t   c\n    \n    d\n  e\nf"
    for indent, left, why in ((4, text[: text.index("e\nf")], LENGTH), (5, "a(\n        b)\n\t   ", LENGTH), (0, text, "")):  # fmt: skip
        assert run(text, LineLimits(indent), size) == (left, why)
    assert run("a\n\nb", LineLimits(1), size) == ("a\n", LENGTH)  # as llama.cpp means an empty line
    assert run("a never b", LineLimits(4), size)[1] == STOP
    assert run("a\n  ne", LineLimits(4), size)[0] == "a\n  "  # the stop text that seemed to begin is in a line that is too far out


def test_a_completion_that_takes_long_ends_with_its_line(monkeypatch, server):
    now = [10.0]
    monkeypatch.setattr("pyggml_spec.text.stream.time.monotonic", lambda: now.__setitem__(0, now[0] + 1) or now[0])
    assert run("a\nb\nc\nd\ne", LineLimits(seconds=4.5), 1) == ("a\nb\nc\n", LENGTH)
    monkeypatch.undo()
    body = {**AROUND, "prompt": "for", "n_predict": 120, "temperature": 0, "ignore_eos": True}
    said = server.ok("/infill", **body, n_indent=60)
    assert said["stop_type"] == "limit" and said["tokens_predicted"] < 120 and not said["content"].rpartition("\n")[2].strip(" \t")
    assert server.ok("/infill", **body, n_indent=60, n_probs=1)["content"] == said["content"]  # made of single tokens
    task = SimpleNamespace(request=TaskRequest([1], sampling=Sampling(logprobs=0), lines=LineLimits(0, 1.0)), stats=None)
    alone = Output(task, SimpleNamespace(piece_with=lambda shown: None))
    assert alone._stream._lines is None  # by its own clock it would end the text elsewhere than the engine
    assert server.ok("/infill", **body, t_max_predict_ms=1)["tokens_predicted"] < 120
    assert server.post("/infill", **body, t_max_prompt_ms=500).headers.get("x-pyspec-ignored") is None
