"""Opens a drafter that the engine refuses, with wrong keys replaced in memory, so that the rest can be measured."""

from dataclasses import dataclass

import numpy as np

from ..drafters.base import Drafter
from ..errors import PyspecError
from ..gguf_io import GGUFFile
from ..models.registry import open_drafter
from .report import FAIL, FILES, Check


@dataclass(frozen=True)
class Repair:
    """A key that can prevent opening, the check that reports it, and the value tried instead (None: no key)."""

    check: str
    key: str
    value: object
    remedy: str


def _repairs(file: GGUFFile, target) -> list[Repair]:
    again = "convert the drafter again"
    layers = np.unique(np.linspace(1, max(1, target.n_layer - 2), 4).round().astype(np.int32))
    return [
        Repair("rope sections", "dflash.rope.dimension_sections", None, f"{again}: text needs one section that holds all rotated pairs"),
        Repair(
            "mask token",
            "tokenizer.ggml.mask_token_id",
            _mask_token(file, target),
            f"{again}, naming the mask token that it was trained with",
        ),
        Repair("block size", "dflash.block_size", 16, f"{again} with the block size that it was trained with"),
        Repair(
            "sliding window", "dflash.attention.sliding_window", 0, f"{again}: the window needs a pattern that says which layers have it"
        ),
        Repair("rope base", "dflash.rope.freq_base", 10000.0, f"{again} with the rope base of its training"),
        Repair("target layers", "dflash.target_layers", layers, f"{again}, naming the layers that it reads"),
        Repair("activation", "dflash.hidden_activation", "silu", "use a drafter with silu or gelu; others are not supported"),
    ]


def _mask_token(file: GGUFFile, target) -> int:
    """The target's mask token, or the first token that looks like one, or the last token."""
    theirs = target.file.metadata.get("tokenizer.ggml.mask_token_id")
    if type(theirs) is int and 0 <= theirs < target.n_vocab:
        return theirs
    return next(iter(mask_candidates(file, target)), target.n_vocab - 1)


def mask_candidates(file: GGUFFile, target, limit: int = 8) -> list[int]:
    """Candidate mask tokens: by key, by text, or at the position of unused tokens."""
    found = []
    for one in (target.file, file):
        found += [one.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("mask", "padding", "unknown")]
    tokens = target.file.metadata["tokenizer.ggml.tokens"]
    found += [i for i in range(len(tokens)) if b"mask" in (raw := tokens.raw(i).lower()) and raw[:1] in b"<[{"]
    found.append(target.n_vocab - 1)
    valid = [i for i in found if type(i) is int and 0 <= i < target.n_vocab]
    return list(dict.fromkeys(valid))[:limit]


@dataclass
class Opened:
    """A drafter, possibly repaired; ``refusals``: failed checks of the repaired keys."""

    drafter: Drafter
    refusals: list[Check]


def open_leniently(file: GGUFFile, target) -> Opened:
    """Opens the drafter; if refused, tries each repair until the refusal changes. Raises PyspecError: a refusal that no repair changes."""
    refusals: list[Check] = []
    left = _repairs(file, target)
    while True:
        try:
            return Opened(open_drafter(file, target.file), refusals)
        except PyspecError as error:
            refusal = str(error)
        for repair in left:
            before = file.metadata.get(repair.key)
            _set(file, repair.key, repair.value)
            if _refusal(file, target) != refusal:
                break
            _set(file, repair.key, before)
        else:
            raise PyspecError(refusal)
        left.remove(repair)
        refusals.append(Check(repair.check, FAIL, f"the engine refuses the drafter: {refusal}", repair.remedy, FILES))


def _set(file: GGUFFile, key: str, value) -> None:
    if value is None:
        file.metadata.pop(key, None)
    else:
        file.metadata[key] = value


def _refusal(file: GGUFFile, target) -> str | None:
    try:
        open_drafter(file, target.file)
    except PyspecError as error:
        return str(error)
    return None
