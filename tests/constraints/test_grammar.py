"""Grammars under speculation: the output matches, its state moves by accepted tokens only, and no text ends the process."""

import ctypes
import gc
import json
import random
import re
import subprocess
import sys
import time
import weakref

import jsonschema
import llama_cpp
import numpy as np
import pytest
import scripted
from sessions import fails_with, loaded

import pyggml_spec as ps
from pyggml_spec.constraints import grammar as grammars
from pyggml_spec.constraints.gbnf import MAX_DEPTH, MAX_TEXT, Characters, parse
from pyggml_spec.constraints.grammar import Grammar, Vocabulary
from pyggml_spec.constraints.jump_forward import JumpForward
from pyggml_spec.constraints.lazy import KEPT, LazyGrammar
from pyggml_spec.constraints.pattern import Pattern
from pyggml_spec.constraints.productive import productive
from pyggml_spec.errors import ConstraintError, EngineError, SamplingError
from pyggml_spec.ggml.library import ffi
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.sampling.sampler import TOKEN_DATA, Sampling
from pyggml_spec.text.tokenizer import Tokenizer

CALL = 'root ::= "def " name "(" (name ("," name)*)? "):" "\\n" "    return " name\nname ::= [a-z] [a-z_]{0,8}'
TALKER = """
import os, threading
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.text.tokenizer import Tokenizer

said, over = 0, threading.Event()

def talk():
    global said
    while not over.is_set():
        os.write(2, f"{said}\\n".encode())
        said += 1

tokenizer = Tokenizer(GGUFFile(DEMO_TARGET))
talker = threading.Thread(target=talk)
talker.start()
for n in range(3):
    Grammar("grammar", "root ::= " + " | ".join(f'"{n} {i}"' for i in range(5000)), tokenizer)
over.set()
talker.join()
print(said)
"""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["list", "dict"]}, "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "required": ["name", "kind", "sizes"],
}  # fmt: skip
demo = loaded(n_ctx=512, draft_width=4)


@pytest.mark.parametrize("values", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 1.5, "top_k": 0, "repeat_penalty": 1.2}])
def test_the_output_matches_and_equals_plain_decoding(demo, values):
    sampling = Sampling(grammar=CALL, **values)
    text, stats = demo.generate("import os\n\n", 120, sampling=sampling)
    assert re.fullmatch(r"def [a-z][a-z_]{0,8}\(([a-z][a-z_]{0,8}(,[a-z][a-z_]{0,8})*)?\):\n    return [a-z][a-z_]{0,8}", text), text
    assert stats.stop_reason == "end" and 0 < stats.matched < stats.drafted
    assert text == demo.generate("import os\n\n", 120, sampling=sampling, mode="reference")[0]


def test_schemas_dead_ends_and_contradictions(demo):
    text, stats = demo.generate("config = ", 200, sampling=Sampling(json_schema=json.dumps(SCHEMA), temperature=0.6, seed=4))
    value = json.loads(text)
    assert set(value) == {"name", "kind", "sizes"} and value["kind"] in ("list", "dict") and all(type(n) is int for n in value["sizes"])
    assert stats.stop_reason == "end" and stats.drafted > 0
    # Nothing is left after the bias; llama.cpp would end the process when it is told to accept a token that does not fit.
    nothing = {i: float("-inf") for i in range(4090)}
    with pytest.raises(ps.EngineError, match="no token"):
        demo.generate("a", 5, sampling=Sampling(temperature=0, grammar="root ::= [a-z]+", logit_bias=nothing))
    assert demo.generate("a", 3)[1].emitted == 3
    fails_with(SamplingError, "end token", lambda: demo.generate("a", 5, sampling=Sampling(grammar=CALL), ignore_end=True))
    Grammar("grammar", r'root ::= "{5,2}" [{5,2}(] "\"((((" # {5,2}', demo.tokenizer)
    Grammar("grammar", "root ::= " + "(" * MAX_DEPTH + "[a]" + ")" * MAX_DEPTH, demo.tokenizer)
    Grammar("grammar", "".join(f"r{i} ::= r{i + 1}\n" for i in range(8000)) + "r8000 ::= [a]\nroot ::= r0", demo.tokenizer)


def test_what_a_constraint_has_seen_is_not_kept_for_ever(demo, monkeypatch):
    """64 of them are kept, each with the states of its lexer: 4 MB in 3,000 tokens of one that has many."""
    monkeypatch.setattr("pyggml_spec.constraints.grammar.MASKS", 20)
    kept, one = Vocabulary.of(demo.tokenizer).compiled, ("regex", "[ab]{50}")
    first = Grammar(*one, demo.tokenizer)
    assert all(first.bits().any() for _ in range(10)) and one in kept and len(first.copy().some(12)[1]) == 13 and one not in kept
    assert (first.bits() == Grammar(*one, demo.tokenizer).bits()).all() and one in kept


@pytest.mark.parametrize("text, words", [
    ("", "empty"), ("root ::= [a-z", "end of input"), ('root ::= "a" (', "expecting '\\)'"), ("start ::= [a-z]", "root"),
    ("root ::= root", "derives no finite text"), ("root ::= other", "no rule named 'other'"), ("root ::= [a-z]{5,2}", "smaller"),
    ("root ::= [a-z]{0000000000000000000000000005,2}", "smaller"), ("root ::= [a-z]{99999999}", "repetitions"),
    ("root ::= [a-z]{99999999999999999999999999}", "repetitions"), ("root ::= [a]\0", "NUL"),
    ("root ::= " + "(" * (MAX_DEPTH + 1) + "[a]" + ")" * (MAX_DEPTH + 1), "parentheses"),
    ("root ::= [a]" + " " * MAX_TEXT, "characters"),
])  # fmt: skip
def test_wrong_grammars_are_one_sentence(demo, text, words, capfd):
    fails_with(SamplingError, words, Grammar, "grammar", text, demo.tokenizer)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_grammar_that_is_compiled_takes_nothing_that_other_threads_say():
    """libllama says on descriptor 2 what is wrong with a grammar; to read it there, the whole process's was redirected."""
    done = subprocess.run([sys.executable, "-c", TALKER], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-500:]
    said = int(done.stdout)
    assert said > 100 and done.stderr == "".join(f"{i}\n" for i in range(said))


def test_what_may_come_does_not_depend_on_what_masks_take(tmp_path, monkeypatch):
    """Masks by threads name the tokenizer's own tokens where text is forced; other spellings of it may come all the same, as by the quick way."""
    scripted.write(tmp_path / "t.gguf", ['{"name": "get_weather", "city": "Paris"}'], None)
    keys = {"name": {"const": "get_weather"}, "city": {"type": "string"}}
    schema = json.dumps({"type": "object", "properties": keys, "required": [*keys]})
    with ps.load(tmp_path / "t.gguf", device="CPU", threads=1) as session:
        tokens, quick = range(session.tokenizer.n_vocab), Grammar("json_schema", schema, session.tokenizer)
        monkeypatch.setattr(grammars, "SLOW_S", -1.0)
        monkeypatch.setattr(grammars, "HEAVY_S", -1.0)
        slow = Grammar("json_schema", schema, session.tokenizer)
        slow.slow = True
        unlike = 0
        for _ in range(8):
            bits, allowed = slow.bits(), [token for token in tokens if quick.allows(token)]
            assert allowed == [token for token in tokens if slow.allows(token)]
            unlike += any(not grammars.allows(bits, token) for token in allowed)
            for grammar in (quick, slow):
                grammar.accept(allowed[-1])
        assert unlike  # or else this shows nothing


VALUES = r"""
root   ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair   ::= text ":" ws value
value  ::= root | "[" ws (value ("," ws value)*)? "]" ws | text | number | ("true" | "false" | "null") ws
text   ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws     ::= | " " | "\n" [ \t]{0,20}   # at most once
"""
SUMS = 'root ::= (sum "=" ws leaf "\\n")+\nsum ::= leaf ([-+*/] leaf)*\nleaf ::= [a-z] [a-z0-9_]* ws | [0-9]+ ws | "(" ws sum ")" ws\nws ::= [ \\t]*'
PROGRAM = r"""
root ::= (kind name "(" (kind name)? ")" "{" line* "}")*
kind ::= "int" ws | "float" ws | "char" ws
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
line ::= ( kind name ws "=" ws sum ";" ) | ( name "(" sum? ")" ";" ) | ( "if" "(" sum ("<=" | "<" | "==") sum ")" "{" line* "}" ("else" "{" line* "}")? ) |
  "//" [^\n]* "\n" | "/*" ([^*] | ("*" [^/]))* "*/"
sum  ::= part (("+" | "-") part)*
part ::= name | [0-9]+ | "-" part | "(" ws sum ws ")"
ws   ::= ([ \t\n]+)
"""
GRAMMARS = {
    "values": VALUES, "sums": SUMS, "program": PROGRAM,
    "moves": 'root ::= "1. " move " " move "\\n" ([1-9] [0-9]? ". " move "\\n")+\nmove ::= ([NBKQR] [a-h]? "x"? [a-h] [1-8] | "O-O" "-O"?) [+#]?',
    "scripts": "root ::= jp+ ([ \\t\\n] jp+)*\njp ::= [ぁ-ゟ] | [ァ-ヿ] | [、-〾] | [一-鿿]", "lines": 'root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\x0c]+ "\\n"',
    "a prefix of another": 'root ::= x\nx ::= "a" "bc" | "ab" "d" | "(" x ")"', "literals that overlap": 'root ::= s*\ns ::= "if" " " s | "i" [^f] | "{" s* "}"',
    "at its end": 'root ::= l\nl ::= "i" ("," l)? | "[" l "]" | "." l', "nothing": 'root ::= [] "a" ""\n', "empty rules": 'root ::= a b a\na ::= "x"?\nb ::= "y" b | ',
    "counts": 'root ::= "é" [^a-z]{2,5} [0-9]{3} ("ab"){2,} .*', "ambiguous": 'root ::= (("a"|"b")* "a"){3} "x"?', "the later rule": 'root ::= [a]\nroot ::= [b] [c]',
    "new lines": 'root ::= ( "a"\n | # or\n "b" )\n\n\n  # end', "escapes": r'root ::= [\]\[\-\\"\x41-\u0043\U0001F600] "\"\\\t\n" [a-] [^\]]',
}  # fmt: skip


class Libllama:
    """llama.cpp's own grammar over the same vocabulary."""

    def __init__(self, text, tokenizer):
        vocab = int(ffi.cast("uintptr_t", tokenizer.vocab))
        self.n, self.sampler = tokenizer.n_vocab, llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        assert self.sampler

    def mask(self):
        tokens, array = np.zeros(self.n, TOKEN_DATA), llama_cpp.llama_token_data_array()
        tokens["id"] = np.arange(self.n)
        array.data, array.size, array.selected = ctypes.cast(tokens.ctypes.data, llama_cpp.llama_token_data_p), self.n, -1
        llama_cpp.llama_sampler_apply(self.sampler, ctypes.byref(array))
        return tokens["logit"] != -np.inf

    def accept(self, token):
        llama_cpp.llama_sampler_accept(self.sampler, token)


@pytest.fixture(scope="module")
def ends(tokenizer):
    return np.array([tokenizer.is_end(token) for token in range(tokenizer.n_vocab)])


@pytest.fixture(scope="module")
def compared(tokenizer, ends):
    """Ends, and tokens of whole characters."""
    pieces = [tokenizer.piece(token).decode("utf-8", "replace") for token in range(tokenizer.n_vocab)]
    return ends | [whole != "" and not {"\ufffd", "\0"} & set(whole) for whole in pieces]


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens_are_allowed_as_by_libllama(tokenizer, ends, compared, name, seed):
    text, rng, length = GRAMMARS[name], random.Random(seed), 0
    ours, theirs = Grammar("grammar", text, tokenizer), Libllama(text, tokenizer)
    while length < 40:
        mine, other = ours.mask(), theirs.mask()
        assert (mine == other)[compared].all(), [tokenizer.piece(int(i)) for i in (compared & (mine != other)).nonzero()[0][:9]]
        on = (mine & other & ~ends).nonzero()[0].tolist()
        if not on:
            break
        token = rng.choice(on)
        ours.accept(token)
        theirs.accept(token)
        length += 1
    assert length > 0


@pytest.mark.parametrize("grammar, good, bad", [
    ('root ::= "a"*', ["", "a", "aaaaa"], ["b", "ab", "aab", "ba"]), ('root ::= "a"+', ["a", "aaa"], ["", "b", "ab"]), ('root ::= "a"?', ["", "a"], ["b", "aa"]),
    ('root ::= "a"{4}', ["aaaa"], ["", "aaa", "aaaaa", "b"]), ('root ::= "a"{2,}', ["aa", "aaaaa"], ["", "a", "b"]), ('root ::= "a"{,3}', [], [""]),
    ('root ::= "a"{0,3}', ["", "a", "aaa"], ["aaaa", "b"]), ('root ::= ("0" | "1"){2,4}', ["00", "0101", "110"], ["0", "01010", "2"]),
    ("root ::= .{3}", ["abc", "é\n\x00", "😀b "], ["ab", "abcd"]), (r'root ::= ... "abc" ...', ["aaaabcccc", "☀☂☃abc❤☕✨"], ["abcabc", "aaabcccc"]),
    ('root ::= n\nn ::= "(" n ")" | ""', ["", "()", "((((()))))"], ["(", "())", ")("]), (VALUES, ['{"a": [1, -0.5e+3, null], "é": {}}', "{}"], ["{a: 1}", '{"a":}', "[]"]),
])  # fmt: skip
def test_texts_of_a_grammar(tokenizer, grammar, good, bad):
    if not good:
        fails_with(Exception, "repetitions", parse, grammar)
        return
    for text, fits in [(text, True) for text in good] + [(text, False) for text in bad]:
        tokens, state = tokenizer.encode(text, bos=False) if text else [], Grammar("grammar", grammar, tokenizer)
        whole = state.fits(tokens) == len(tokens)
        for token in tokens if whole else ():
            state.accept(token)
        assert (whole and state.complete) is fits, text


def test_tokens_classes_triggers_and_errors(tokenizer):
    name, token = next((name, token) for name, token in tokenizer.control_tokens().items() if not tokenizer.is_end(token))
    assert (name[0], name[-1]) == ("<", ">")
    for grammar in (f'root ::= {name} "a"', f'root ::= <[{token}]> "a"'):
        assert Grammar("grammar", grammar, tokenizer).fits([token, *tokenizer.encode("a", bos=False)]) == 2
    assert not Grammar("grammar", f'root ::= !{name} "a"', tokenizer).allows(token)
    assert not Grammar("grammar", "root ::= .*", tokenizer).allows(token), "the name of a control token is no text"
    (part,) = parse(r"root ::= [^b-y\U00000061-\u0063]").values()
    assert part == Characters(((0, 0x60), (0x7A, 0xD7FF), (0xE000, 0x10FFFF)))
    assert issubclass(ps.ConstraintError, ps.SamplingError) and issubclass(ps.ConstraintError, ps.EngineError)
    fails_with(SamplingError, "does not begin with its trigger", LazyGrammar, "grammar", 'root ::= "x"', [WORD], tokenizer)


def keys(**more):
    return {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False, **more}


def around(node, **more):
    return {"$ref": "#/$defs/n", "$defs": {"n": node}, **more}


N = {"$ref": "#/$defs/n"}
HOLDS = {"type": "object", "properties": {"n": N}, "required": ["n"], "additionalProperties": False}
FULL = {"type": "array", "items": N, "minItems": 1}
ENDS = {
    "a pattern for the named key": keys(patternProperties={"^a$": {}}),
    "a pattern for the named key, and more about it": keys(patternProperties={"^a$": {"type": "integer"}}),
    "a pattern that matches nothing": keys(patternProperties={"^x[^\\s\\S]": {"type": "integer"}}),
    "a pattern for the required key": {"type": "object", "required": ["b"], "patternProperties": {"^b$": {"const": 2}}, "additionalProperties": False},
    "in items": {"type": "array", "items": keys(patternProperties={"^a$": {}}), "minItems": 1, "maxItems": 2},
    "an endless member that may be left out": {"type": "object", "properties": {"ok": {"const": 1}, "n": N}, "required": ["ok"], "additionalProperties": False, "$defs": {"n": HOLDS}},
    "an endless alternative": {"anyOf": [{"const": 1}, N], "$defs": {"n": FULL}},
    "endless items": {"type": "array", "items": N, "$defs": {"n": FULL}},
    "an optional list of itself": around({"type": "array", "items": N, "maxItems": 2}),
    "none or itself": around({"anyOf": [{"type": "null"}, HOLDS]}),
}  # fmt: skip
ENDLESS = {
    "itself": around(N), "each other": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}, "required": around(HOLDS), "items": around(FULL),
    "prefix": around({"type": "array", "prefixItems": [N], "minItems": 1}), "more keys": around({"type": "object", "required": ["x"], "additionalProperties": N}),
    "keys by patterns": around({"type": "object", "required": ["x"], "patternProperties": {"^x": N}, "additionalProperties": False}), "alternatives": {"anyOf": [{"$ref": "#"}, FULL], "$defs": {"n": FULL}},
    "a contradiction as the way out": around({"anyOf": [{"type": "string", "const": 1}, FULL]}), "an anchor": {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "array", "items": {"$ref": "#n"}, "minItems": 2}}},
    "all of": around({"allOf": [HOLDS, {"type": "object"}]}),
}  # fmt: skip
CONTRADICTIONS = [
    {"enum": []}, {"anyOf": []}, {"type": []}, {"type": "string", "enum": [1, 2]}, {"type": "string", "const": 1}, {"type": "string", "pattern": "^a{5}$", "maxLength": 3},
    {"type": "string", "pattern": "^a{5}$", "minLength": 7}, {"type": "string", "format": "uuid", "maxLength": 5}, {"type": "string", "format": "date", "pattern": "^x"}, {"type": "string", "minLength": 5, "maxLength": 3},
    {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, {"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7}, {"allOf": [{"const": 1}, {"const": 2}]}, {"oneOf": [False, False]},
    {"type": "array", "items": False, "minItems": 1}, {"type": "array", "minItems": 3, "maxItems": 2}, {"type": "array", "prefixItems": [False], "minItems": 1}, {"not": {}}, keys(minProperties=2), keys(maxProperties=0),
    keys(required=["b"]), keys(patternProperties={"^a$": {"const": 2}}), keys(patternProperties={"^a$": {}}, minProperties=2), {"type": "object", "minProperties": 1, "additionalProperties": False},
    {"type": "object", "patternProperties": {"[^\\s\\S]": {}}, "additionalProperties": False, "minProperties": 1}, {"type": "object", "properties": {"a": False}, "required": ["a"]},
]  # fmt: skip


def walk(kind, text, tokenizer, seed, most=200):
    """A text of short random tokens that ends as soon as it may; None if it does not within so many."""
    rng, grammar, out = random.Random(seed), Grammar(kind, text, tokenizer), b""
    for _ in range(most):
        if grammar.complete:
            return out.decode()
        allowed = sorted(grammar.mask().nonzero()[0].tolist(), key=lambda token: len(tokenizer.piece(token)))[:40]
        grammar.accept(token := rng.choice(allowed))
        out += tokenizer.piece(token)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_what_can_end_is_led_to_no_dead_end(tokenizer, name):
    texts = [walk("json_schema", json.dumps(ENDS[name]), tokenizer, seed) for seed in range(8)]
    assert None not in texts
    for text in texts:
        jsonschema.Draft202012Validator(ENDS[name]).validate(json.loads(text))


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_a_document_that_ends_is_refused(tokenizer, name):
    fails_with(SamplingError, "no finite document.*anyOf", lambda: Grammar("json_schema", json.dumps(ENDLESS[name]), tokenizer))


@pytest.mark.parametrize("schema", CONTRADICTIONS, ids=json.dumps)
def test_a_contradiction_is_refused_at_the_start(tokenizer, schema):
    fails_with(SamplingError, "Unsatisfiable|'not'|minProperties", lambda: Grammar("json_schema", json.dumps(schema), tokenizer))


@pytest.mark.parametrize("schema", [
    {"allOf": [{"patternProperties": {"^a$": {}}, "additionalProperties": False}]}, {"anyOf": [{"patternProperties": {"^a$": {}}, "additionalProperties": False}]},
    {"$ref": "#/$defs/p", "$defs": {"p": {"patternProperties": {"^a$": {}}, "additionalProperties": False}}},
], ids=json.dumps)  # fmt: skip
def test_keys_that_are_put_together_lead_nowhere_or_are_refused(tokenizer, schema):
    with pytest.raises(SamplingError, match="dead end after.*one object"):
        Grammar("json_schema", json.dumps({**keys(), "additionalProperties": True, **schema}), tokenizer)


@pytest.mark.parametrize("kind, text, words", [
    ("grammar", 'root ::= "a" root', "derives no finite text"), ("grammar", 'root ::= "a" x\nx ::= "b" y\ny ::= "c" x', "derives no finite text"), ("grammar", 'root ::= ("a" root)+', "derives no finite text"),
    ("lark", 'start: "a" start', "'start'"), ("lark", 'start: "a" | "b" loop\nloop: "c" loop', "'loop'"), ("lark", 'start: "z" item{2}\nitem: ("b" item)', "'start'"),
    ("lark", 'start: "x" A | "y"\nA: /a+/ & /b+/', "'A' matches nothing"), ("lark", 'start: "x" A\nA: /a/ & ~/(?s:.*)/', "'A' matches nothing"),
    ("lark", 'start: "x" %json {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}}', "no document matches"),
    ("regex", "a[^\\s\\S]", "no token continues"),
])  # fmt: skip
def test_grammars_without_an_end_are_refused(tokenizer, kind, text, words):
    fails_with(SamplingError, words, Grammar, kind, text, tokenizer)


@pytest.mark.parametrize("kind, text", [
    ("grammar", 'root ::= "a" | "b" loop\nloop ::= "c" loop'), ("grammar", 'root ::= ("a" loop)? "z"\nloop ::= "c" loop'), ("grammar", 'root ::= (loop | "a")* "z" | x\nx ::= x x | "y"\nloop ::= loop'),
    ("regex", "a|b[^\\s\\S]c"), ("lark", 'start: "x" y?\ny: "a" y | "b"\nunused: unused "a"'), ("lark", 'start: A\nA: /[ab]{1,3}/ & ~/a.*/'),
])  # fmt: skip
def test_what_does_not_end_is_not_begun(tokenizer, kind, text):
    assert None not in [walk(kind, text, tokenizer, seed) for seed in range(8)]


def test_parts_end_where_enough_of_what_they_need_does():
    parts = {"leaf": (0, ()), "all": (2, ("leaf", "one")), "one": (1, ("loop", "leaf")), "loop": (1, ("loop",))}
    assert productive({**parts, "both": (2, ("leaf", "loop")), "twice": (2, ("leaf", "leaf"))}) == {"leaf", "all", "one", "twice"}


def test_a_dead_end_while_generating_is_one_sentence(tokenizer, monkeypatch):
    monkeypatch.setattr(grammars.lark_rules, "check", lambda text: None)
    grammar = Grammar("lark", 'start: "x" A\nA: /a+/ & /b+/', tokenizer)
    grammar.accept(tokenizer.encode("x", bos=False)[0])
    fails_with(ConstraintError, "cannot continue", grammar.bits)


TOOL_CALL = 'root ::= "<tool_call>" [ \\n]? "{" [a-z]+ "}" "</tool_call>"'
WORD = "<tool_call>"


def cut(tokenizer, text, rng):
    """The text in tokens, cut at random places first: words are in one token or in many."""
    out, at = [], 0
    while at < len(text):
        end = min(len(text), at + rng.randint(1, 6))
        out += tokenizer.encode(text[at:end], bos=False)
        at = end
    return out


def end(tokenizer):
    return next(i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i))


def test_every_cut_of_a_text_is_held_to_the_same(tokenizer):
    """Free before the word, matched after it: the same verdict whether tokens come one by one, in blocks, or as a mask."""
    rng = random.Random(1)
    for _ in range(40):
        right, lead = rng.random() < 0.5, rng.choice(["", "so: ", "<tool", "<<tool_cal ", "a < b\n"])
        text = f"{lead}{WORD}{{{'abc' if right else '12'}}}</tool_call>"
        tokens = cut(tokenizer, text, rng)
        one, block = LazyGrammar("grammar", TOOL_CALL, [WORD], tokenizer), LazyGrammar("grammar", TOOL_CALL, [WORD], tokenizer)
        taken = 0
        for token in tokens:
            assert one.allows(token) == bool(one.mask()[token])
            if not one.allows(token):
                break
            one.accept(token)
            taken += 1
        assert block.fits(tokens) == taken and (taken == len(tokens)) == right and len(block.ahead(tokens)) == taken + 1
        assert np.array_equal(block.ahead(tokens)[-1], one.bits())
        if right:
            assert one.complete and one.allows(end(tokenizer)) and not one.allows(tokens[0])
        else:
            assert not one.complete and not one.allows(end(tokenizer))
            with pytest.raises(EngineError):
                one.accept(tokens[taken])


def test_triggers_of_text_and_tokens(tokenizer):
    lazy = LazyGrammar("grammar", TOOL_CALL, [WORD], tokenizer)
    assert lazy.complete and lazy.forced(8) == [] and not lazy.ended
    for token in tokenizer.encode("def f(x):\n    return <tool", bos=False):
        assert lazy.mask().sum() > 0.99 * tokenizer.n_vocab
        lazy.accept(token)
    path, bits = lazy.some(5)
    assert len(path) == 5 and len(bits) == 6
    lazy.accept(end(tokenizer))
    assert lazy.ended and lazy.complete
    brace = tokenizer.encode("{", bos=False)[-1]
    lazy = LazyGrammar("grammar", 'root ::= "{" [0-9]+ "}"', [brace], tokenizer)
    lazy.accept(tokenizer.encode("a", bos=False)[-1])
    lazy.accept(brace)
    assert not lazy.complete and not lazy.allows(tokenizer.encode("a", bos=False)[-1])
    assert lazy.fits(tokenizer.encode("12}", bos=False)) >= 1


@pytest.mark.parametrize("fields, why", [
    ({"triggers": (WORD,)}, "no constraint"), ({"triggers": ("",), "grammar": TOOL_CALL}, "words of 1 to"),
    ({"triggers": (-1,), "grammar": TOOL_CALL}, "words of 1 to"), ({"triggers": (True,), "grammar": TOOL_CALL}, "words of 1 to"),
])  # fmt: skip
def test_triggers_that_mean_nothing_are_refused(fields, why):
    fails_with(SamplingError, why, Sampling, **fields)


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_speculative_text_is_plain_text_and_matches_after_the_trigger(temperature):
    """The embedded pair writes "return" soon; from there on only digits may come. Greedy and sampled, drafts on both sides of the trigger."""
    grammar = 'root ::= "return" " " [0-9]{3,40} "\\n"'
    sampling = Sampling(temperature=temperature, seed=1, grammar=grammar, triggers=("return",))
    with ps.load(device="CPU", threads=1, draft_width=8, n_ctx=256) as session:
        texts = {}
        for mode in ("speculative", "plain"):
            text, stats = session.generate("def square(x):\n    ", 80, sampling=sampling, mode=mode)
            texts[mode] = text
        assert texts["speculative"] == texts["plain"]
        _, word, behind = texts["plain"].partition("return")
        assert word and behind[1:].strip().isdigit() and stats.stop_reason in ("end", "length")
        with session.concurrent(2) as server:
            assert server.submit("def square(x):\n    ", 80, sampling=sampling).result()[0] == texts["plain"]


def test_what_a_trigger_forbids_is_found_once(tokenizer, monkeypatch):
    """A word of one character ends in thousands of tokens of a large vocabulary: asking about each of them in every step held all streams up."""
    texts = [f'root ::= "{{" [a-z]+ "}}" "{i}"' for i in range(KEPT + 4)]
    first = LazyGrammar("grammar", texts[0], ["{", "{x"], tokenizer)
    asked, fits = [], Grammar.fits
    monkeypatch.setattr(Grammar, "fits", lambda self, tokens: asked.append(tokens) or fits(self, tokens))
    for lazy in (first, LazyGrammar("grammar", texts[0], ["{", "{x"], tokenizer)):
        asked.clear()
        assert len(lazy.ahead(tokenizer.encode("def f(x):\n", bos=False))) > 3 and not asked
    brute = np.array([first.allows(i) for i in range(tokenizer.n_vocab)])
    assert np.array_equal(first.mask(), brute) and not brute.all()
    for text in texts:
        LazyGrammar("grammar", text, ["{"], tokenizer)
    assert len(Vocabulary.of(tokenizer).lazy) == KEPT


def test_long_triggers(tokenizer):
    """64 words of 256 characters have 16,000 ends; each token was compared with all of them, minutes for a large vocabulary."""
    words = [f"{i:02}" + "ab" * 127 for i in range(64)]
    grammar, began = "root ::= (" + " | ".join(f'"{word}"' for word in words) + ") [0-9]+", time.process_time()
    lazy = LazyGrammar("grammar", grammar, words, tokenizer)
    assert time.process_time() - began < 10
    for token in tokenizer.encode("x" + words[7][:-1], bos=False):
        lazy.accept(token)
    assert lazy.fits(tokenizer.encode("b7", bos=False)) == 2 and lazy.fits(tokenizer.encode("bx", bos=False)) < 2
    # All that a pattern has found is given to the constraint at once: of an ambiguous one that would take seconds.
    words = " | ".join(" ".join("s" * n) for n in range(2, 7))
    lazy = LazyGrammar("grammar", f"root ::= s\ns ::= {words} | [a-z]", [Pattern("(a[a-z]*)!")], tokenizer)
    began = time.thread_time()
    with pytest.raises(ConstraintError, match="trigger.*ambiguous"):
        follow(lazy, tokenizer.encode("abcdefghijklmnopqrstuvwxyz" * 5 + "!", bos=False))
    assert time.thread_time() - began < 2


def follow(grammar, tokens):
    for token in tokens:
        grammar.accept(token)


KEYS = {
    "the_name_of_the_function": {"enum": ["list", "dict"]},
    "number_of_arguments": {"type": "integer", "maximum": 9, "minimum": 0},
    "is_it_a_method": {"type": "boolean"},
}
OBJECT = json.dumps({"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False})
CONSTRAINTS = {
    "schema": {"json_schema": OBJECT}, "regex": {"regex": r"def [a-z]{3,9}\(self, (name|number)\):\n    return None\n"},
    "lark": {"lark": 'start: "import " NAME ("\\nimport " NAME){2}\nNAME: /[a-z]{1,8}/'}, "gbnf": {"grammar": 'root ::= "x = [" d (", " d){0,3} "]" \nd ::= [0-9] | "(" d ")"'},
}  # fmt: skip
SAMPLERS = [{"temperature": 0.0}, {"seed": 1, "temperature": 1.0}]


@pytest.fixture(scope="module", params=[None, DEMO_DRAFTER], ids=["no drafter", "drafter"])
def session(request):
    more = {"spec": ["none"]} if request.param is None else {"draft_width": 4}
    with ps.load(DEMO_TARGET, draft=request.param, device="CPU", threads=1, n_ctx=512, **more) as session:
        yield session


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("values", SAMPLERS, ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_drafts_and_without_in_slots_and_alone(session, kind, values):
    sampling = Sampling(**CONSTRAINTS[kind], **values)
    text, stats = session.generate("import os\n\n", 90, sampling=sampling)
    plain, alone = session.generate("import os\n\n", 90, sampling=sampling, mode="plain")
    assert text == plain and alone.drafted == alone.forced == 0
    assert (stats.stop_reason, stats.cut) == ("end", False)
    with session.concurrent(slots=2) as server:
        handles = [server.submit("import os\n\n", 90, sampling=sampling), server.submit("def f(", 20)]
        assert handles[0].result()[0] == text
        handles[1].result()
        assert handles[0].stats.forced == stats.forced or session.drafter is not None


def test_forced_tokens_and_cut_texts(session):
    _, stats = session.generate("config = ", 90, sampling=Sampling(json_schema=OBJECT, seed=3))
    _, plain = session.generate("config = ", 90, sampling=Sampling(json_schema=OBJECT, seed=3), mode="plain")
    assert stats.forced >= 10 and stats.forced_matched == stats.forced
    assert stats.steps < 0.6 * plain.steps and stats.emitted == plain.emitted == 1 + stats.steps + stats.matched
    for options, cut in [({"max_tokens": 5}, True), ({"max_tokens": 90}, False), ({"max_tokens": 90, "stop": ["arguments"]}, True)]:
        _, stats = session.generate("config = ", sampling=Sampling(json_schema=OBJECT, temperature=0), **options)
        assert stats.cut is cut and stats.stop_reason == ("stop" if "stop" in options else "length" if cut else "end")
    _, stats = session.generate(
        "config = ", 5, sampling=Sampling(regex="[a-z]*", temperature=0, logit_bias={session.tokenizer.encode("a")[0]: 20.0})
    )
    assert (stats.stop_reason, stats.cut) == ("length", False), "what is there is a whole text"


def test_logits_are_read_only_where_the_likeliest_token_is_forbidden(session, monkeypatch):
    """On a GPU each read of a row is a megabyte; greedy decoding needs one where the constraint changes something."""
    read, step_of = [], type(session.runner)
    real = step_of.candidates
    monkeypatch.setattr(step_of, "candidates", lambda self, row, slot=0: read.append(row) or real(self, row, slot))
    text, _ = session.generate("x = 1\n", 12, sampling=Sampling(temperature=0))
    assert not read
    free = "".join(f"\\x{{{ord(c):x}}}" for c in text)
    again, stats = session.generate("x = 1\n", 12, sampling=Sampling(temperature=0, regex=f"({free}|zz)(.|\\n)*"))
    assert again == text and stats.emitted == 12
    assert not read, "everything was allowed"
    session.generate("x = 1\n", 12, sampling=Sampling(temperature=0, regex="[A-Z]{30}"))
    assert read


def test_the_drafter_is_preferred_while_it_gives_more():
    class Three:
        def forced(self, most):
            return [1, 2, 3][:most]

    drafts = JumpForward(Three(), (1, 2, 4, 8))
    assert drafts.next() == [1, 2, 3]
    for _ in range(50):
        drafts.observe_drafter(5)
    assert drafts.next() == []
    for _ in range(50):
        drafts.observe_drafter(1)
    assert drafts.next() == [1, 2, 3]


def test_a_constraint_is_compiled_once_per_text(session, monkeypatch):
    compiled, real = [], Vocabulary.source_of
    monkeypatch.setattr(Vocabulary, "source_of", lambda self, kind, text: compiled.append(text) or real(self, kind, text))
    schema = '{"enum": ["once"]}'
    first, second = (Grammar("json_schema", schema, session.tokenizer) for _ in range(2))
    assert compiled == [schema]
    first.accept(first.forced(1)[0])
    assert second.forced(1) == Grammar("json_schema", schema, session.tokenizer).forced(1), "one position is not the other's"


def test_a_vocabulary_goes_with_its_tokenizer():
    """For 250,000 tokens it is more than 100 MB; llguidance holds what it was made of, and Python does not see that."""
    tokenizer = Tokenizer(GGUFFile(DEMO_TARGET))
    grammar, vocabulary = Grammar("regex", "abc+", tokenizer), weakref.ref(Vocabulary.of(tokenizer))
    del tokenizer, grammar
    gc.collect()
    assert vocabulary() is None
