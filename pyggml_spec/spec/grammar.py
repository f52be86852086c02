"""Grammar constraints by llama.cpp's GBNF engine. The state moves by accepted tokens only.

llama.cpp parses grammars for programs that trust them, and says what is wrong on the process's standard error. So ``gbnf`` reads them first.
"""

import ctypes
import json
import re
from typing import Any

import llama_cpp
import numpy as np

from ..errors import SamplingError
from .gbnf import MAX_REPEATS, parse

_CLOSED = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{[^}]*\}", re.DOTALL)  # of a regular expression: escapes, classes, counts
TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


def pointer(tokens: np.ndarray) -> Any:
    """The entries of a ``llama_token_data`` array, as libllama takes them."""
    return ctypes.cast(tokens.ctypes.data, llama_cpp.llama_token_data_p)


class Grammar:
    """One generation's position in a grammar. Owns a libllama sampler.

    Raises:
        SamplingError: the text is no grammar, or an absurd one.
    """

    def __init__(self, text: str, vocab: Any) -> None:
        parse(text)
        self._handle = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        if not self._handle:
            raise SamplingError(
                "the grammar is wrong: it has a rule that begins with itself, a token that does not exist, or too many repetitions of "
                "repetitions; see llama.cpp's grammars/README.md for the notation"
            )
        self._one = np.zeros(1, TOKEN_DATA)
        self._array = llama_cpp.llama_token_data_array()

    @classmethod
    def of(cls, text: str | None, schema: str | None, vocab: Any) -> "Grammar | None":
        """The grammar of a text or of a JSON schema; None without either."""
        if schema is not None:
            text = gbnf(schema)
        return cls(text, vocab) if text is not None else None

    def allows(self, token: int) -> bool:
        self._one[0] = (token, 1.0, 0.0)
        array = self._array
        array.data = pointer(self._one)
        array.size, array.selected, array.sorted = 1, -1, False
        self.mask(array)
        return self._one["logit"][0] != -np.inf

    def mask(self, array: Any) -> None:
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


def _check_schema(node: Any) -> None:
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
