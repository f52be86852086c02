"""GBNF means here what it means to llama.cpp: the same tokens are allowed after the same text, whatever the grammar."""

import ctypes
import random

import llama_cpp
import numpy as np
import pytest

from pyggml_spec.constraints.gbnf import Characters, parse
from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.ggml.library import ffi
from pyggml_spec.sampling.sampler import TOKEN_DATA

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


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens_are_allowed_as_by_libllama(tokenizer, name, seed):
    """After every token of a random text. Left aside: control tokens, whose names libllama takes for text, NUL, and parts of a character."""
    text, rng, length = GRAMMARS[name], random.Random(seed), 0
    ours, theirs = Grammar("grammar", text, tokenizer), Libllama(text, tokenizer)
    compared = np.ones(tokenizer.n_vocab, bool)
    for token in range(tokenizer.n_vocab):
        whole = tokenizer.piece(token).decode("utf-8", "replace")
        compared[token] = tokenizer.is_end(token) or (whole != "" and not {"\ufffd", "\0"} & set(whole))
    while length < 40:
        mine, other = ours.mask(), theirs.mask()
        assert (mine == other)[compared].all(), [tokenizer.piece(int(i)) for i in (compared & (mine != other)).nonzero()[0][:9]]
        allowed = (mine & other).nonzero()[0].tolist()
        on = [token for token in allowed if not tokenizer.is_end(token)]
        if not on:
            break
        token = rng.choice(on)
        ours.accept(token)
        theirs.accept(token)
        length += 1
    assert length > 0


@pytest.mark.parametrize(
    "grammar, good, bad",
    [
        ('root ::= "a"*', ["", "a", "aaaaa"], ["b", "ab", "aab", "ba"]), ('root ::= "a"+', ["a", "aaa"], ["", "b", "ab"]), ('root ::= "a"?', ["", "a"], ["b", "aa"]),
        ('root ::= "a"{4}', ["aaaa"], ["", "aaa", "aaaaa", "b"]), ('root ::= "a"{2,}', ["aa", "aaaaa"], ["", "a", "b"]), ('root ::= "a"{,3}', [], [""]),
        ('root ::= "a"{0,3}', ["", "a", "aaa"], ["aaaa", "b"]), ('root ::= ("0" | "1"){2,4}', ["00", "0101", "110"], ["0", "01010", "2"]),
        ("root ::= .{3}", ["abc", "é\n\x00", "😀b "], ["ab", "abcd"]), (r'root ::= ... "abc" ...', ["aaaabcccc", "☀☂☃abc❤☕✨"], ["abcabc", "aaabcccc"]),
        ('root ::= n\nn ::= "(" n ")" | ""', ["", "()", "((((()))))"], ["(", "())", ")("]), (VALUES, ['{"a": [1, -0.5e+3, null], "é": {}}', "{}"], ["{a: 1}", '{"a":}', "[]"]),
    ],
)  # fmt: skip
def test_texts_of_a_grammar(tokenizer, grammar, good, bad):
    if not good:
        with pytest.raises(Exception, match="repetitions"):
            parse(grammar)
        return
    for text, fits in [(text, True) for text in good] + [(text, False) for text in bad]:
        tokens, state = tokenizer.encode(text, bos=False) if text else [], Grammar("grammar", grammar, tokenizer)
        whole = state.fits(tokens) == len(tokens)
        for token in tokens if whole else ():
            state.accept(token)
        assert (whole and state.complete) is fits, text


def test_tokens_are_named_by_id_or_by_text(tokenizer):
    name, token = next((name, token) for name, token in tokenizer.control_tokens().items() if not tokenizer.is_end(token))
    assert name.startswith("<")
    assert name.endswith(">")
    for grammar in (f'root ::= {name} "a"', f'root ::= <[{token}]> "a"'):
        assert Grammar("grammar", grammar, tokenizer).fits([token, *tokenizer.encode("a", bos=False)]) == 2
    assert not Grammar("grammar", f'root ::= !{name} "a"', tokenizer).allows(token)
    assert not Grammar("grammar", "root ::= .*", tokenizer).allows(token), "the name of a control token is no text"


def test_classes_hold_what_they_say():
    (part,) = parse(r"root ::= [^b-y\U00000061-\u0063]").values()
    assert part == Characters(((0, 0x60), (0x7A, 0xD7FF), (0xE000, 0x10FFFF)))
