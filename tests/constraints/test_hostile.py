"""Hostile constraints: each is followed or refused in one sentence, within two seconds of processor time and 256 MiB, compiling and 40 tokens
together. A process of its own that forks for each of them: none can hang, end or fill the one that generates."""

import json
import subprocess
import sys

import pytest

SECONDS, MIB = 2.0, 256
REFUSED, FOLLOWED, EITHER = "refused", "followed", "refused or followed"


def schema(value) -> tuple[str, str]:
    return "json_schema", json.dumps(value)


def chain(last, link, n: int) -> str:
    """Definitions d0 to dn, each of which names the next one twice."""
    names = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(n)]
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**{f"d{i}": link(name) for i, name in enumerate(names)}, f"d{n}": last}})


SET = {
    # deep nesting
    "items in items": (*("json_schema", '{"items":' * 100 + "{}" + "}" * 100), EITHER),
    "items in items, deeper than any parser": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, REFUSED),
    "anyOf in anyOf": ("json_schema", '{"anyOf":[' * 400 + "{}" + "]}" * 400, REFUSED),
    "parentheses, regex": ("regex", "(" * 20000 + "a" + ")" * 20000, REFUSED),
    "parentheses, Lark": ("lark", "start: " + "(" * 5000 + "/a/" + ")" * 5000, REFUSED),
    "8,000 rules, each the next one": ("grammar", "".join(f"r{i} ::= r{i + 1}\n" for i in range(8000)) + "r8000 ::= [a]\nroot ::= r0", FOLLOWED),
    "itself": ("json_schema", '{"allOf": [{"$ref": "#"}]}', REFUSED),
    # huge enums and many names
    "7,000 values": (*schema({"enum": [f"value {i}" for i in range(7000)]}), FOLLOWED),
    "12,000 numbers": (*schema({"enum": list(range(12000))}), FOLLOWED),
    "3,000 properties": (*schema({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}, "required": [f"p{i}" for i in range(3000)], "additionalProperties": False}), EITHER),
    "2,000 required": (*schema({"required": [f"p{i}" for i in range(2000)]}), EITHER),
    "300 patterns of names": (*schema({"patternProperties": {f"^x{i}[a-z]*$": {} for i in range(300)}}), REFUSED),
    "9,000 words": ("regex", "|".join(f"word{i}" for i in range(9000)), FOLLOWED),
    # exponential anyOf
    "4^8 combinations": (*schema({"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(4)]} for i in range(8)]}), REFUSED),
    "8^12 combinations": (*schema({"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(8)]} for i in range(12)]}), REFUSED),
    "2^30 choices by reference": ("json_schema", chain({"type": "null"}, lambda name: {"anyOf": [name, name]}, 30), EITHER),
    "2^30 items by reference": ("json_schema", chain({"type": "null"}, lambda name: {"type": "array", "prefixItems": [name, name]}, 30), EITHER),
    "2^40 letters by rules": ("grammar", "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= [a] | "b" root\nroot ::= r0', EITHER),
    "ambiguous, Lark": ("lark", 'start: a\na: a a | "x"', EITHER),
    "ambiguous, GBNF": ("grammar", 'root ::= root root | "a" | ""', EITHER),
    # large counts
    "a million letters in a pattern": (*schema({"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"}), EITHER),
    "states of a pattern": (*schema({"type": "string", "pattern": "^(.*[ab].{30}){20}$"}), EITHER),
    "a hundred million letters": (*schema({"type": "string", "minLength": 100_000_000}), EITHER),
    "at most a million letters": (*schema({"type": "string", "maxLength": 1_000_000}), EITHER),
    "a million items": (*schema({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}), EITHER),
    "a large prime": (*schema({"type": "integer", "multipleOf": 999983}), REFUSED),
    "the classic": ("regex", "(a?){500}a{500}", EITHER), "2^25 states": ("regex", "(a|b)*a(a|b){25}", EITHER), "2^60 states": ("regex", "(.*a.{20}){3}", EITHER),
    "counts of counts": ("regex", "(((a{1,1000}){1,1000}){1,1000}){1,1000}", EITHER), "two counts of a count": ("regex", "(x{0,300}y{0,300}){0,300}", EITHER),
    "50,000 letters": ("regex", "[a-z]{50000}", EITHER), "counts, Lark": ("lark", 'start: (a{1000}){1000}\na: "x" | "y"', EITHER),
    "counts, GBNF": ("grammar", 'root ::= (([a-z]{1,1000}){1,1000}){1,1000} x\nx ::= "y" x | ""', REFUSED),
    # 10 MB of text
    "10 MB, enum": (*schema({"enum": ["x" * 10**7]}), REFUSED), "10 MB, spaces": ("json_schema", " " * 10**7 + "{}", REFUSED), "10 MB, brackets": ("json_schema", "[" * 10**7, REFUSED),
    "10 MB, regex": ("regex", "a" * 10**7, REFUSED), "10 MB, Lark": ("lark", "start: /a/\n" + "x" * 10**7, REFUSED), "10 MB, GBNF": ("grammar", 'root ::= "a"' + " " * 10**7, REFUSED),
}  # fmt: skip
CHILD = """
import json, os, resource, sys, time
from pathlib import Path
from pyggml_spec.errors import EngineError, SamplingError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.constraints.grammar import Grammar, Vocabulary
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.text.tokenizer import Tokenizer

tokenizer = Tokenizer(GGUFFile(DEMO_TARGET))
Vocabulary.of(tokenizer)

def kib(key):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))

def follow(kind, text):
    try:
        grammar = Grammar(kind, text, tokenizer)
    except SamplingError as error:
        return "refused", str(error)
    try:
        for _ in range(40):
            tokens = grammar.forced(1) or grammar.mask().nonzero()[0].tolist()
            if tokenizer.is_end(tokens[-1]):
                break
            grammar.accept(tokens[-1])
    except EngineError as error:
        return "followed", str(error)
    return "followed", ""

out = {}
for name, (kind, text, _) in json.load(sys.stdin).items():
    reader, writer = os.pipe()
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        Path("/proc/self/clear_refs").write_text("5")
        began, before = time.process_time(), kib("VmRSS")
        what, said = follow(kind, text)
        os.write(writer, json.dumps([what, said[:2000], time.process_time() - began, (kib("VmHWM") - before) / 1024]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        out[name] = answer.read().decode()
    out[name] = json.loads(out[name]) if out[name] else ["died", str(os.wait()), 0, 0]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def ended():
    done = subprocess.run([sys.executable, "-c", CHILD], input=json.dumps(SET), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
@pytest.mark.parametrize("name", SET)
def test_hostile_constraints_end_soon_and_stay_small(ended, name):
    what, said, seconds, mib = ended[name]
    assert what in SET[name][2]
    assert bool(said) is (what == REFUSED) or what == FOLLOWED
    assert "\n" not in said and seconds < SECONDS
    assert mib < MIB
