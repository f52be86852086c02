"""Tokens of equal bytes and kind in two vocabularies, so that a small model drafts for a target with other ids."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import DeviceError
from ..ggml.library import ffi, lib, new_context
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray
from ..models.weights import Weights

TOKENS = "tokenizer.ggml.tokens"
FREQUENT = 32768  # first tokens of a vocabulary: BPE merges are sorted by frequency
LEAST_COVERAGE = 0.5  # of these, that a drafter has to have
CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # in tokenizer.ggml.token_type
ROLES = ("bos", "eos", "eot", "eom")
NO_TOKEN = -1e30  # added to logits of tokens that the target lacks


@dataclass(frozen=True)
class VocabularyMap:
    """Attributes:
    to_draft: I32 [target's tokens]: the drafter's token; of tokens that it lacks, the longest one that ends them.
    to_target: I32 [drafter's tokens]: the target's token, 0 where it has none.
    drafted: bool [drafter's tokens]: whether the target has them.
    covered: bool [target's tokens]: whether the drafter has them.
    """

    to_draft: np.ndarray
    to_target: np.ndarray
    drafted: np.ndarray
    covered: np.ndarray
    names: tuple[bytes, ...]

    @property
    def coverage(self) -> float:
        """Share of the target's first FREQUENT tokens that the drafter has."""
        return float(self.covered[:FREQUENT].mean())

    @cached_property
    def lost(self) -> list[str]:
        """The first of these that it lacks, at most eight."""
        return [self.names[i].decode("utf-8", "replace") for i in np.flatnonzero(~self.covered[:FREQUENT])[:8]]

    def description(self) -> str:
        lost = f"; the most frequent ones that it lacks: {', '.join(map(repr, self.lost))}" if self.lost else ""
        return f"it has {100 * self.coverage:.1f} % of the target's first {min(FREQUENT, len(self.covered))} tokens{lost}"


def map_vocabulary(target: GGUFFile, draft: GGUFFile) -> VocabularyMap | None:
    """None if every id of the target is the same token in both, or where one file has no token list."""
    a, b = (file.metadata.get(TOKENS) for file in (target, draft))
    if not isinstance(a, StringArray) or not isinstance(b, StringArray) or a.same(b):
        return None
    theirs, ours = _tokens(target, a), _tokens(draft, b)
    if theirs == ours[: len(theirs)]:
        return None
    index: dict[tuple[bool, bytes], int] = {}
    for i, token in enumerate(ours):
        index.setdefault(token, i)
    found = np.array([index.get(token, -1) for token in theirs], np.int32)
    for role in ROLES:  # ends of texts have other names in other families
        of_target, of_draft = (file.metadata.get(f"tokenizer.ggml.{role}_token_id") for file in (target, draft))
        if isinstance(of_target, int) and isinstance(of_draft, int) and 0 <= of_target < len(theirs) and 0 <= of_draft < len(ours):
            found[of_target] = of_draft if found[of_target] < 0 else found[of_target]
    covered, to_target, drafted = found >= 0, np.zeros(len(ours), np.int32), np.zeros(len(ours), bool)
    ids = np.flatnonzero(covered)[::-1]  # of several of the target's tokens the first one stays
    to_target[found[ids]], drafted[found[ids]] = ids, True
    for i in np.flatnonzero(~covered).tolist():
        raw = theirs[i][1]
        found[i] = next((index[False, raw[j:]] for j in range(len(raw)) if (False, raw[j:]) in index), 0)
    return VocabularyMap(found, to_target, drafted, covered, tuple(token for _, token in theirs))


def _tokens(file: GGUFFile, tokens: StringArray) -> list[tuple[bool, bytes]]:
    """(control, bytes) of each token, as libllama has them (``Tokenizer.pieces``, which needs a vocabulary of libllama for each file: 2.4 s instead of 0.5 for
    262,144 tokens)."""
    types = file.metadata.get("tokenizer.ggml.token_type")
    kinds = types.tolist() if isinstance(types, np.ndarray) and len(types) == len(tokens) else [1] * len(tokens)
    spelled = file.metadata.get("tokenizer.ggml.model") == "gpt2"
    table = _byte_letters() if spelled else {}
    out = []
    for raw, kind in zip(tokens.raws(), kinds):
        if kind in (CONTROL, USER_DEFINED):
            out.append((kind == CONTROL, raw))
        elif spelled:
            text = raw.decode("utf-8", "replace")
            out.append((False, bytes(table[c] for c in text) if all(c in table for c in text) else raw))
        elif kind == BYTE and raw[:3] == b"<0x":
            out.append((False, bytes([int(raw[3:5], 16)])))
        else:
            out.append((False, raw.replace("\u2581".encode(), b" ")))
    return out


def _byte_letters() -> dict[str, int]:
    """GPT-2's spelling of bytes."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenTables:
    """The maps, which the drafter's ``weights`` own.

    Attributes:
        to_draft, to_target: I32 [1, target's tokens] and I32 [1, drafter's tokens].
        mask: F32 [drafter's tokens], added to logits.
    """

    def __init__(self, weights: Weights, made: VocabularyMap) -> None:
        backend, ctx = weights.backend, new_context(3)
        mask = np.where(made.drafted, np.float32(0), np.float32(NO_TOKEN))
        self.to_draft, self.to_target = (
            lib.ggml_new_tensor(ctx, lib.GGML_TYPE_I32, 2, (1, len(ids))) for ids in (made.to_draft, made.to_target)
        )
        self.mask = lib.ggml_new_tensor(ctx, lib.GGML_TYPE_F32, 1, (len(mask),))
        buffer = backend.allocate(ctx)
        if buffer == ffi.NULL:
            lib.ggml_free(ctx)
            raise DeviceError(f"no memory for maps of {len(made.to_draft)} tokens on {backend.device.name}")
        weights.adopt(ctx, buffer)
        for tensor, values in ((self.to_draft, made.to_draft), (self.to_target, made.to_target), (self.mask, mask)):
            if not backend.counting:
                lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(np.ascontiguousarray(values)), 0, values.nbytes)
