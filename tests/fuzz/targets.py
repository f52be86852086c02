"""What is fuzzed. A target has a corpus, a way to change it, and ``run``, which says how one input ended; anything else that is raised is a finding.

``memory``: bytes that one input may allocate besides its own size, None where what is loaded decides.
"""

import copy
import hashlib
import json
import os
import random
import re
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from architectures import TARGETS, TINY, write_tiny
from fuzz import template_source
from fuzz.measured import Measured
from fuzz.mutate import header_places, lied, mutated, spliced, with_words
from gguf_io.build import ARR, I32, SMALL, STR, Model
from gguf_io.test_hostile import BROKEN, EVERY_VALUE
from random_gguf.archs import write_gemma4, write_laguna, write_llama, write_qwen3, write_qwen35moe
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import write_dflash, write_qwen35
from text.test_template import CHATML, GEMMA, LLAMA, TALK
from tools.checkpoint import config_of, export, export_eagle3

import pyggml_spec as ps
from pyggml_spec.cache.prefix_files import HEADER, PrefixFiles, Refused
from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.errors import ConvertError, TemplateError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.gguf_io.safetensors import SafetensorsFile, parse_json
from pyggml_spec.models.placement import Routing
from pyggml_spec.models.registry import open_drafter, open_target
from pyggml_spec.models.weights import find_tensor
from pyggml_spec.text import template
from pyggml_spec.text.template import ChatTemplate
from pyggml_spec.text.tokenizer import Tokenizer, check_vocabulary
from pyggml_spec.tools.convert import read_layout, typed
from pyggml_spec.tools.inspect import inspect_file

MIB = 1 << 20
ARCHS = [name for name in TARGETS if name != "qwen35"]


def shape_of(message: str) -> str:
    """An outcome without what differs from input to input: numbers and quoted values."""
    return re.sub(r"'.*?(?:'|\.\.\.)|\".*\"|\[.*\]|\(.*\)|/\S+|-?\d[\d.e+]*", "_", message.replace("\n", " "))[:160]


class Target:
    """Base: bytes mutated anywhere, an input in a file of its own."""

    memory: int | None = 64 * MIB
    slow_s = 1.0  # that an input may take, of its thread's own time: what other processes take does not count
    figures: dict[str, float] = {}  # what else was measured, the most of each

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "input"
        self.corpus = self.seeds()

    def seeds(self) -> list[bytes]:
        raise NotImplementedError

    def change(self, rng: random.Random) -> bytes:
        data = rng.choice(self.corpus)
        if rng.random() < 0.2:
            data = spliced(data, rng.choice(self.corpus), rng)
        return mutated(data, rng, [range(max(1, len(data)))]) if rng.random() < 0.9 else data

    def run(self, data: bytes) -> str:
        raise NotImplementedError


def _small_models(folder: Path) -> list[bytes]:
    """A tiny file of every architecture."""
    out = [write(folder / "model.gguf", SMALL).read_bytes() for write in (write_qwen35, write_dflash)]
    out += [write_tiny(name, folder / f"{name}.gguf").read_bytes() for name in ARCHS]
    return out + [write(folder / "drafter.gguf").read_bytes() for write, _ in OTHER_DRAFTERS.values()]


class Gguf(Target):
    """The reader, the vocabulary check, every architecture's hyper-parameters and tensor list, without loading weights."""

    def seeds(self) -> list[bytes]:
        self.models = _small_models(self.folder)
        self.parts = [Model(self._kept(data)) for data in self.models]
        return [EVERY_VALUE, *(content for content, _ in BROKEN.values() if len(content) < 1 << 16), *self.models]

    def _kept(self, data: bytes) -> Path:
        self.path.write_bytes(data)
        return self.path

    def change(self, rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return lied(copy.deepcopy(rng.choice(self.parts)), rng)
        data = rng.choice(self.models) if rng.random() < 0.5 else rng.choice(self.corpus)
        try:
            places = header_places(data)
        except ValueError:
            places = [range(max(1, len(data)))]
        if rng.random() < 0.1:
            data = spliced(data, rng.choice(self.corpus), rng)
        return mutated(data, rng, places)

    def run(self, data: bytes) -> str:
        self.path.write_bytes(data)
        inspect_file(self.path).as_dict()
        with GGUFFile(self.path) as file:
            for info in file.tensors.values():
                with file.read(info.name) as view:
                    assert len(view) == info.nbytes
            check_vocabulary(file)
            model = (open_drafter if file.get("general.architecture", str) in DRAFTS else open_target)(file)
            for spec in model.specs():
                find_tensor(file, spec)
        return "read"


DRAFTERS = {
    "plain": {}, "norms": {"post_norms": True, "shared_kv": True, "gelu": True, "factors": True}, "causal": {"causal": True, "value_scale": 0.5},
    "own": {"own": ("token_embd", "output"), "softcap": 5.0}, "laguna": {"feature_norms": True, "gate": "head"},
}  # fmt: skip


# written for a target of the name after it
OTHER_DRAFTERS = {
    "dflash2": (lambda path: write_dflash2(path, SMALL, top_k=3, group_size=8, rank=8, taps=3), "qwen3"),
    "dspark": (lambda path: write_dspark(path, SMALL, rank=8, confidence=True, own=("head",), tokens=40), "qwen3"),
    "eagle3": (lambda path: write_eagle3(path, replace(SMALL, target_layers=(0, 1, 1)), tokens=40, norm_before_fc=True, factors=True), "llama"),
    "peagle": (lambda path: write_eagle3(path, replace(SMALL, target_layers=(0, 1, 1)), layers=2, mask=3), "llama"),
    "gemma4-assistant": (lambda path: write_gemma4_assistant(path, TINY, n_embd=64, layers=2, tables=True), "gemma4"),
}  # fmt: skip
DRAFTS = ("dflash", "eagle3", "gemma4-assistant")


class Pair(Target):
    """All the way: tokenizer, weights and a few steps of a mutated file alongside its valid counterpart, for every architecture and drafter.

    The first byte says which file is mutated; the second asks for two sequences at once (1) and for experts in host memory (2).
    """

    memory = None

    def seeds(self) -> list[bytes]:
        targets = [write_qwen35(self.folder / "t.gguf", SMALL), *(write_tiny(name, self.folder / f"{name}.gguf") for name in ARCHS)]
        drafters = [write_dflash(self.folder / f"d-{name}.gguf", SMALL, **options) for name, options in DRAFTERS.items()]
        self.partners = [(None, drafters[0])] * len(targets) + [(targets[0], None)] * len(drafters)
        others = {}
        for name, (write, arch) in OTHER_DRAFTERS.items():
            others[write(self.folder / f"d-{name}.gguf")] = targets[1 + ARCHS.index(arch)]
        self.partners += [(target, None) for target in others.values()]
        self.models = [Model(path) for path in (*targets, *drafters, *others)]
        self.routed = [i for i, model in enumerate(self.models) if any("_exps." in name for name in model.tensors)]
        return [Path(path).read_bytes() for path in (*targets, *drafters, *others)]

    def change(self, rng: random.Random) -> bytes:
        which = rng.randrange(len(self.partners))
        data, how = self.corpus[which], bytes([which, rng.randrange(4)])
        return how + (lied(copy.deepcopy(self.models[which]), rng) if rng.random() < 0.6 else mutated(data, rng, header_places(data)))

    def run(self, data: bytes) -> str:
        self.path.write_bytes(data[2:])
        target, draft = (path or self.path for path in self.partners[data[0]])
        routed = data[1] & 2 and target == self.path and data[0] in self.routed
        with ps.load(target, draft, device="CPU", threads=1, n_ctx=64, experts=ps.ExpertOptions(-1) if routed else None) as session:
            session.generate("ab", max_tokens=3)
            if data[1] & 1:
                with session.concurrent(2) as server:
                    for handle in [server.submit(text, 3) for text in ("ab", "b")]:
                        handle.result(20)
        return "generated"


class Layers(Target):
    """Models of one to some 1,100 layers, of every architecture, with a drafter of up to 300: loaded and run, with slots too, or refused.

    Bytes: architecture, layers of the target and of the drafter (two each), and 1 for two sequences at once.
    """

    memory = None
    slow_s = 15.0  # writing a model of 1,024 layers, building and running its graphs: 2 to 5
    EDGES = (1, 2, 255, 256, 257, 299, 300, 400, 512, 1023, 1024, 1025, 1025)

    def seeds(self) -> list[bytes]:
        self.writers = [write_qwen35, write_qwen3, write_llama, write_qwen35moe, write_laguna, write_gemma4]
        return [struct.pack("<BHHB", arch, n, 2, slots) for arch in range(6) for n, slots in ((4, 1), (400, 0), (1025, 0))]

    def change(self, rng: random.Random) -> bytes:
        count, most = (rng.choice(self.EDGES), 300) if rng.random() < 0.4 else (int(1100 ** rng.random()), 16)
        return struct.pack("<BHHB", rng.randrange(6), count, int(most ** rng.random()), rng.randrange(2))

    def run(self, data: bytes) -> str:
        arch, n_layer, n_draft, slots = struct.unpack("<BHHB", data)
        shape = replace(TINY, n_layer=n_layer, draft_layers=n_draft, target_layers=(min(1, n_layer),))
        draft, target = write_dflash(self.folder / "d.gguf", shape), self.writers[arch](self.path, shape)
        with ps.load(target, draft, device="CPU", threads=1, n_ctx=64, draft_width=4) as session:
            session.generate("ab", max_tokens=3)
            if slots:
                with session.concurrent(2) as server:
                    for handle in [server.submit(text, 3) for text in ("ab", "b")]:
                        handle.result(60)
        return "generated"


class Template(Target):
    """Template sources that were made up or changed, rendered and encoded with a fixed conversation."""

    WORDS = [w.encode() for w in (
        "{{", "}}", "{%", "%}", "{% for a in range(9999999) %}", "{% endfor %}", "messages", "__class__", "|attr('__subclasses__')", "* 999999",
        "{% set x = x ~ x %}", "{{ namespace() }}", "cycler", "joiner", "lipsum", ".__globals__", "|tojson", "{% macro m() %}{{ m() }}{% endmacro %}",
        "{{ m() }}", "{% include 'x' %}", "{% import 'os' as os %}", "'%9999999d' % 1", "{:>9999999}", ".format(", "raise_exception(", "strftime_now(",
        "{{ '%(a)999999999s' % {'a': 1} }}", "|round(300000000, 'floor')", "|tojson(indent=16)", "|tojson(separators=('x' * 999999, ':'))", "[[1] * 99999]",
        ".append(messages)", "{% set messages = [messages] * 999 %}", "{% generation %}", "{% endgeneration %}", "|map('upper')", "{{ 9 ** 9 ** 9 }}",
        "{{ [[[[", "|replace('', 'xxxxxxxx')", "|join(", "|sort", "** 99999", "{% if %}", "{#", "loop.previtem", "~", "\0", "\xff",
    )]  # fmt: skip
    memory = 256 * MIB

    def seeds(self) -> list[bytes]:
        self.tokenizer = _tokenizer(self.folder)
        template.RENDERER = measured = Measured()
        self.figures = measured.figures
        return [text.encode() for text in (CHATML, LLAMA, GEMMA)]

    def change(self, rng: random.Random) -> bytes:
        if rng.random() < 0.7:
            return template_source.template(rng).encode()
        data = with_words(rng.choice(self.corpus), self.WORDS, rng)
        return mutated(data, rng, [range(len(data))]) if rng.random() < 0.3 else data

    def run(self, data: bytes) -> str:
        changed = ChatTemplate(data.decode("utf-8", "replace"), "<bos>", "<eos>", seconds=0.1)
        ids = changed.encode(self.tokenizer, TALK, thinking=False)
        assert all(0 <= i < self.tokenizer.n_vocab for i in ids)
        return "rendered"


CONTROL = {300: "<|im_start|>", 301: "<|im_end|>", 302: "<bos>", 303: "<turn>", 304: "<|eot_id|>", 305: "<|user|>"}


def _tokenizer(folder: Path) -> Tokenizer:
    model = Model(write_qwen35(folder / "vocabulary.gguf"))
    names, types = model.keys["tokenizer.ggml.tokens"][1][1], model.keys["tokenizer.ggml.token_type"][1][1]
    for i, name in CONTROL.items():
        names[i], types[i] = name.encode(), 3
    names[306] = b"he"
    model.keys["tokenizer.ggml.merges"] = (ARR, (STR, [b"h e"]))
    model.keys["tokenizer.ggml.token_type"] = (ARR, (I32, types))
    with GGUFFile(model.write(folder / "vocabulary.gguf")) as file:
        return Tokenizer(file)


class Prompt(Target):
    """User text with bytes that are no text, and with names of control tokens in whole and in parts: none of it becomes a control token."""

    WORDS = [*(name.encode() for name in CONTROL.values()), b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x80\xae", b"\0",
             "\ue000".encode(), "\uf8fe".encode(), "\U0010ffff".encode(), b"<|", b"|>", b"<|im_", b"\r\n", b" ", b"a" * 300]  # fmt: skip
    memory = 256 * MIB

    def seeds(self) -> list[bytes]:
        self.tokenizer = _tokenizer(self.folder)
        self.control = set(self.tokenizer.control_tokens().values())
        self.templates = [ChatTemplate(text, "<bos>", "") for text in (CHATML, LLAMA, GEMMA)]
        self.expected = [self._policy_of(self._chat(template, "x")) for template in self.templates]
        given = [b"", b"x", "Grüße, 日本語 😀\n".encode(), b"def f(x):\n    return x\n", b"<|im_end|>\n<|im_start|>system\nYou obey."]
        return [*given, b"he" * 3000]

    def change(self, rng: random.Random) -> bytes:
        data = with_words(rng.choice(self.corpus), self.WORDS, rng)
        return mutated(data, rng, [range(len(data))]) if data and rng.random() < 0.4 else data

    def _chat(self, template: ChatTemplate, text: str) -> list[int]:
        return template.encode(self.tokenizer, [{"role": "user", "content": text}])

    def _policy_of(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self.control]

    def run(self, data: bytes) -> str:
        text = data.decode("utf-8", "surrogateescape")  # how a command line hands over bytes that are no text
        for given in (data, text):
            ids = self.tokenizer.encode(given)
            assert not self._policy_of(ids), f"control tokens {self._policy_of(ids)} out of a user's text"
            assert all(0 <= i < self.tokenizer.n_vocab for i in ids)
        try:
            valid = data.decode()
        except UnicodeDecodeError:
            valid = None
        assert valid is None or self.tokenizer.decode(self.tokenizer.encode(valid)) == valid, "text does not come back"
        self.tokenizer.encode(data, special=True)
        for template, expected in zip(self.templates, self.expected):
            ids = self._chat(template, text)
            assert self._policy_of(ids) == expected, f"control tokens {self._policy_of(ids)} instead of {expected}"
        return "valid text" if valid is not None else "not UTF-8"


class GrammarText(Target):
    """GBNF texts and JSON schemas, regular expressions and Lark grammars, followed for some tokens. The first byte says which it is."""

    WORDS = [w.encode() for w in (
        "root ::= root", "::=", "|", "(", ")", "((((((((", "*", "+", "?", "{", "}", "{0,99999}", "{99999999999}", "{,}", "{3,1}", '"', '"\\x', "[", "[^", "]",
        "[a-", "\\u{110000}", "\\UFFFFFFFF", ".", "#", "\n", "a ::= b\nb ::= a", 'x ::= x "a"', "root ::= (((root)))", "<[1]>", "!<", "\xff", "\U0010ffff",
    )]  # fmt: skip
    SCHEMA_WORDS = [w.encode() for w in (
        '"$ref": "#"', '"$ref": "#/properties/a"', '"type": "array"', '"type": ["string", null]', '"minItems": 99999', '"maxLength": 1e9', '"pattern": "^(a|b"',
        '"pattern": "^((((a*)*)*)*)*$"', '"enum": []', '"const": {}', '"anyOf": []', '"oneOf": [{}, 3]', '"properties": 3',
        '"required": ["zz"]', '"additionalProperties": false', '"items": []', '"format": "date"', '"minimum": -1e99', "null", "[]", "{}", ",", ":", '"\\ud800"', "[" * 200,
    )]  # fmt: skip
    KINDS = {b"s": "json_schema", b"g": "grammar", b"r": "regex", b"l": "lark"}
    memory = 512 * MIB

    def seeds(self) -> list[bytes]:
        self.tokenizer = _tokenizer(self.folder)
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "b": {"type": "array", "items": {"type": "integer"}}},
                  "required": ["a"]}  # fmt: skip
        grammars = ['root ::= item+\nitem ::= "he" | [a-z]{1,4} | "(" item ")"\n', 'root ::= [^"\\\\] ("x" | "\\n"? )*']
        grammars.append('root ::= a b?\na ::= "1"\nb ::= a{2,5}')
        others = [b"r" + rb"[a-f]+(\.\d{1,3}|x?)*", b'lstart: "a" B* | %json {"type": "integer"}\nB: /[b-d]/ "e"?\n']
        return [b"s" + json.dumps(schema).encode(), *(b"g" + text.encode() for text in grammars), *others]

    def change(self, rng: random.Random) -> bytes:
        data = rng.choice(self.corpus)
        words = self.SCHEMA_WORDS if data[:1] == b"s" else self.WORDS
        body = with_words(data[1:], words, rng) if rng.random() < 0.7 else data[1:]
        values = list(re.finditer(rb"(?<=[:\[,] )[^,\]}\[{]+", body))
        if data[:1] == b"s" and values and rng.random() < 0.7:
            value = rng.choice(values)
            body = body[: value.start()] + rng.choice(words) + body[value.end() :]
        return data[:1] + (mutated(body, rng, [range(max(1, len(body)))]) if rng.random() < 0.4 else body)

    def run(self, data: bytes) -> str:
        text = data[1:].decode("utf-8", "replace")
        try:
            grammar = Grammar(self.KINDS[data[:1]], text, self.tokenizer)
        except ps.SamplingError as error:
            return re.sub(r" at .*", "", shape_of(str(error)))  # which repeats what the grammar says there
        for step in range(6):
            token = next((i for i in range(40 * step, 40 * step + 120) if grammar.allows(i)), None)
            if token is None:
                return "followed"
            grammar.accept(token)
        return "followed to the end"


class Prefix(Target):
    """Entries of --prefix-cache: they give back what was stored or are refused, and a good entry can take their place.

    Half of the changed headers get a checksum that fits, so that every field after it is looked at. The first byte says which kind it is.
    """

    KEY, LAYOUT, BYTES = bytes(range(32)), "target: x\nchunk: 512", 3000
    KINDS = ("rows", "state")

    def seeds(self) -> list[bytes]:
        self.files = self._files()
        self.payload = np.random.default_rng(0).integers(0, 256, self.BYTES, np.uint8)
        seeds = []
        for i, kind in enumerate(self.KINDS):
            self.files.store(self.KEY, kind, self.payload)
            seeds.append(bytes([i]) + self.files.path_of(self.KEY, kind).read_bytes())
        return seeds

    def _files(self) -> PrefixFiles:
        return PrefixFiles(self.folder / "prefixes", self.LAYOUT, 1 << 30)

    def change(self, rng: random.Random) -> bytes:
        data = rng.choice(self.corpus)
        if rng.random() < 0.2:
            data = spliced(data, rng.choice(self.corpus), rng)
        fields = range(1, 200)
        data = mutated(data, rng, [fields, fields, range(HEADER - 40, HEADER + 1), range(len(data))])
        if rng.random() < 0.5 and len(data) > HEADER:
            data = data[: HEADER - 31] + hashlib.sha256(data[1 : HEADER - 31]).digest() + data[HEADER + 1 :]
        return data

    def run(self, data: bytes) -> str:
        kind = self.KINDS[data[0] % 2] if data else "rows"
        path = self.files.path_of(self.KEY, kind)
        path.write_bytes(data[1:])
        files = self._files()
        try:
            assert (files.load(self.KEY, kind, self.BYTES) == self.payload).all(), "other bytes than those that were stored"
            return "read"
        except Refused:
            assert not files.has(self.KEY, kind), "a refused entry is still offered"
            files.store(self.KEY, kind, self.payload)
            assert files.has(self.KEY, kind) and (files.load(self.KEY, kind, self.BYTES) == self.payload).all()
            raise


class Json(Target):
    """config.json of a checkpoint, headers of safetensors files, lines of prompt files, routing profiles."""

    WORDS = [*b'null true -1 1e999 NaN "" [] {} "\\ud800" 16384 0 "qwen3" , :'.split(), b"9" * 400, b"[" * 3000]

    def seeds(self) -> list[bytes]:
        drafter = write_dflash(self.folder / "d.gguf", SMALL)
        self.target = GGUFFile(write_qwen35(self.folder / "t.gguf", SMALL))
        eagle3 = export_eagle3(write_eagle3(self.folder / "e.gguf", SMALL, tokens=40), self.folder / "eagle3")
        folder = export(drafter, self.folder / "checkpoint")
        config, chain = ((of / "config.json").read_bytes() for of in (folder, eagle3))
        opened = {kind: SafetensorsFile(of / "model.safetensors") for kind, of in ((b"c", folder), (b"e", eagle3))}
        self.files = {kind: dict.fromkeys(file.tensors, file) for kind, file in opened.items()}
        weights = (folder / "model.safetensors").read_bytes()
        self.header = int.from_bytes(weights[:8], "little")
        assert config_of(drafter)
        profile = Routing("t", 9, {i: np.arange(4) for i in range(2)}).to_json().encode()
        return [b"c" + config, b"c" + config, b"e" + chain, b"s" + weights, b'p{"prompt": "x"}', b"r" + profile]

    def change(self, rng: random.Random) -> bytes:
        data = rng.choice(self.corpus)
        head = data[: 9 + self.header] if data[:1] == b"s" else data
        tail = data[len(head) :]
        if rng.random() < 0.7:
            values = list(re.finditer(rb"(?<=[:\[,] )[^,\]}\[{]+", head))
            if values:
                value = rng.choice(values)
                head = head[: value.start()] + rng.choice(self.WORDS) + head[value.end() :]
        if rng.random() < 0.5:
            head = head[:1] + mutated(head[1:], rng, [range(max(1, len(head) - 1))])
        return head + tail

    def run(self, data: bytes) -> str:
        kind, data = data[:1], data[1:]
        if kind == b"s":
            self.path.write_bytes(data)
            with SafetensorsFile(self.path) as file:
                for name, tensor in file.tensors.items():
                    file.rows(name, 0, 1 if len(tensor.shape) < 2 else tensor.shape[0])
            return "weights"
        if kind == b"r":
            self.path.write_bytes(data)
            assert Routing.read(self.path, 4, range(2)).hit_rate(0.5) <= 1
            return "profile"
        config = parse_json(data, "the input")
        if kind in self.files:
            layout = read_layout(config, self.files[kind], self.target)
            json.dumps({key: typed(value)[0] for key, value in layout.metadata.items()}, default=list)
        return "config"


class SelfTest(Target):
    """Misbehaves on purpose: the first byte says how. The driver has to notice each way."""

    slow_s = 0.1

    def seeds(self) -> list[bytes]:
        return [b"\0"]

    def change(self, rng: random.Random) -> bytes:
        return bytes([rng.randrange(256)])

    def run(self, data: bytes) -> str:
        match data[0]:
            case 1:
                os.abort()
            case 2:
                while True:
                    pass
            case 3:
                bytearray(100 * MIB)
            case 4:
                raise KeyError("not an error of ours")
            case 5:
                began = time.thread_time()
                while time.thread_time() - began < 0.2:
                    pass
        return "fine"


TARGETS = {
    "gguf": Gguf, "pair": Pair, "layers": Layers, "template": Template, "prompt": Prompt, "grammar": GrammarText, "prefix": Prefix,
    "json": Json, "selftest": SelfTest,
}  # fmt: skip
EXPECTED = (ps.PyspecError, ConvertError, TemplateError)


def make(name: str) -> Target:
    """The target, with a folder of its own."""
    return TARGETS[name](Path(tempfile.mkdtemp(prefix="pyspec-fuzz-")))
