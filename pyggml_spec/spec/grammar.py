"""Grammar constraints by llama.cpp's GBNF engine. The state moves by accepted tokens only.

llama.cpp parses grammars for programs that trust them: an absurd one overflows the stack, runs out of memory or ends the process. What
would is refused here first.
"""

import ctypes
import json
import os
import re
import tempfile
import threading
from contextlib import contextmanager

import llama_cpp
import numpy as np

from ..errors import SamplingError

MAX_TEXT = 1 << 17  # characters; every rule in a chain of rules costs the parser stack
MAX_DEPTH = 1000  # of parentheses
MAX_REPEATS = 2000  # llama.cpp's own limit
_redirecting = threading.Lock()
_QUIET = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*')  # literals, character classes, comments
_REPEAT = re.compile(r"\{\s*0*(\d{1,20})\s*,\s*0*(\d{1,20})\s*\}")
_CLOSED = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{[^}]*\}", re.DOTALL)  # of a regular expression: escapes, classes, counts
TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class Grammar:
    """One generation's position in a grammar. Owns a libllama sampler.

    Raises:
        SamplingError: the text is no grammar, or an absurd one.
    """

    def __init__(self, text: str, vocab):
        _check(text)
        with _redirecting, _stderr_text() as said:
            self._handle = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        if not self._handle:
            reason = re.search(r"error parsing grammar: (.*)", said[0]) if said else None
            why = reason[1][:200] if reason else "it has no rule named root, or a rule that begins with itself"
            raise SamplingError(f"the grammar is wrong: {why}; see llama.cpp's grammars/README.md for the notation")
        self._one = np.zeros(1, TOKEN_DATA)
        self._array = llama_cpp.llama_token_data_array()

    @classmethod
    def of(cls, text: str | None, schema: str | None, vocab) -> "Grammar | None":
        """The grammar of a text or of a JSON schema; None without either."""
        if schema is not None:
            text = gbnf(schema)
        return cls(text, vocab) if text is not None else None

    def allows(self, token: int) -> bool:
        self._one[0] = (token, 1.0, 0.0)
        array = self._array
        array.data = ctypes.cast(self._one.ctypes.data, llama_cpp.llama_token_data_p)
        array.size, array.selected, array.sorted = 1, -1, False
        self.mask(array)
        return self._one["logit"][0] != -np.inf

    def mask(self, array) -> None:
        """Sets the logits of all tokens that may not come next to -inf."""
        llama_cpp.llama_sampler_apply(self._handle, ctypes.byref(array))

    def accept(self, token: int) -> None:
        """Moves past ``token``, which has to be allowed: llama.cpp ends the process otherwise."""
        llama_cpp.llama_sampler_accept(self._handle, token)

    def close(self) -> None:
        if self._handle:
            llama_cpp.llama_sampler_free(self._handle)
            self._handle = None


def gbnf(schema: str) -> str:
    """The grammar of a JSON schema's documents. Keywords that llama.cpp's converter does not know restrict nothing.

    Raises:
        SamplingError: no JSON, no schema, or one with references to elsewhere.
    """
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"the JSON schema is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise SamplingError(f'the JSON schema is {schema[:60]!r}, but it has to be an object like {{"type": "object"}}')
    _check_schema(parsed)
    try:
        return json_schema_to_gbnf(schema)
    except Exception as error:  # the converter asserts, recurses and trusts keys to exist
        what = str(error) or type(error).__name__
        raise SamplingError(f"the JSON schema cannot be made a grammar: {what[:200]}; use simpler keywords, or a grammar") from None


def _check_schema(node) -> None:
    """Refuses what the converter would fetch, never finish, or fill the memory with.

    Its own check of references is an assertion, which python -O drops.
    """
    todo = [node]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            ref, pattern = node.get("$ref"), node.get("pattern")
            if isinstance(ref, str) and not ref.startswith("#/"):
                raise SamplingError(f"the JSON schema refers to {ref[:100]!r}; only references into itself (#/...) are followed")
            if isinstance(pattern, str):
                _check_pattern(pattern)
            for key in ("minLength", "maxLength", "minItems", "maxItems"):
                if isinstance(node.get(key), (int, float)) and node[key] > MAX_REPEATS:
                    raise SamplingError(
                        f"the JSON schema has a {key} of {node[key]:g}, but a grammar repeats at most {MAX_REPEATS} times; leave it out"
                    )
            todo += node.values()
        elif isinstance(node, list):
            todo += node


def _check_pattern(pattern: str) -> None:
    shown = f"the pattern {pattern[:100]!r} of the JSON schema"
    if set(_CLOSED.sub("", pattern)) & set("]}"):  # the converter would look at it for ever
        raise SamplingError(f"{shown} holds a bracket that closes nothing; write a backslash before it")
    counts = " ".join(part for part in _CLOSED.findall(pattern) if part[0] == "{")
    if any(int(n) > MAX_REPEATS for n in re.findall(r"\d{1,20}", counts)):
        raise SamplingError(f"{shown} repeats something more than {MAX_REPEATS} times, which no grammar may; use * or +")


def _check(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise SamplingError(f"the grammar has {len(text)} characters, but at most {MAX_TEXT} are allowed; make it smaller")
    if not text.strip() or "\0" in text:
        raise SamplingError("the grammar is empty" if not text.strip() else "the grammar holds a NUL character; remove it")
    rules = _QUIET.sub(" ", text)
    depth = deepest = 0
    for c in rules:
        depth += (c == "(") - (c == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise SamplingError(f"the grammar nests {deepest} parentheses, but at most {MAX_DEPTH} are allowed; name parts as rules")
    for least, most in _REPEAT.findall(rules):
        if int(most) < int(least):
            raise SamplingError(f"the grammar repeats something {{{least},{most}}}, and the second number is the smaller one; swap them")


@contextmanager
def _stderr_text():
    """Collects what C code writes to stderr: the parser says there why it failed, and repeats the whole grammar. One thread at a time."""
    said: list[str] = []
    try:
        kept = os.dup(2)
    except OSError:  # closed
        yield said
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.append(file.read().decode("utf-8", "replace"))
