"""Opens a drafter that the engine refuses, with wrong keys replaced in memory, so that the rest can be measured."""

import numpy as np

from ..drafters.base import Drafter
from ..errors import PyspecError
from ..gguf_io import GGUFFile
from ..models.registry import open_drafter
from .report import FAIL, Check


def _repairs(file: GGUFFile, target) -> list[tuple[str, str, object, str]]:
    """(check that reports it, key that can prevent opening, value tried instead or None for no key, remedy)."""
    again = "convert the drafter again"
    layers = np.unique(np.linspace(1, max(1, target.n_layer - 2), 4).round().astype(np.int32))
    theirs = target.file.metadata.get("tokenizer.ggml.mask_token_id")
    mask = theirs if type(theirs) is int and 0 <= theirs < target.n_vocab else mask_candidates(file, target)[0]
    return [
        ("rope sections", "dflash.rope.dimension_sections", None, f"{again}: text needs one section that holds all rotated pairs"),
        ("mask token", "tokenizer.ggml.mask_token_id", mask, f"{again}, naming the mask token that it was trained with"),
        ("block size", "dflash.block_size", 16, f"{again} with the block size that it was trained with"),
        ("sliding window", "dflash.attention.sliding_window", 0, f"{again}: the window needs a pattern that says which layers have it"),
        ("rope base", "dflash.rope.freq_base", 10000.0, f"{again} with the rope base of its training"),
        ("target layers", "dflash.target_layers", layers, f"{again}, naming the layers that it reads"),
        ("activation", "dflash.hidden_activation", "silu", "use a drafter with silu or gelu; others are not supported"),
    ]


def mask_candidates(file: GGUFFile, target, limit: int = 8) -> list[int]:
    """Candidate mask tokens: by key, by text, or at the position of unused tokens; at least the last token."""
    found = []
    for one in (target.file, file):
        found += [one.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("mask", "padding", "unknown")]
    tokens = target.file.metadata["tokenizer.ggml.tokens"]
    found += [i for i, raw in enumerate(tokens.raws()) if raw[:1] in b"<[{" and b"mask" in raw.lower()]
    found.append(target.n_vocab - 1)
    valid = [i for i in found if type(i) is int and 0 <= i < target.n_vocab]
    return list(dict.fromkeys(valid))[:limit]


def open_leniently(file: GGUFFile, target) -> tuple[Drafter, list[Check]]:
    """Opens the drafter; if refused, tries each repair until the refusal changes.

    Returns:
        The drafter, and failed checks of the repaired keys.

    Raises:
        PyspecError: a refusal that no repair changes.
    """
    refusals: list[Check] = []
    left = _repairs(file, target)
    while (refusal := _refusal(file, target)) is not None:
        for repair in left:
            check, key, value, remedy = repair
            before = file.metadata.get(key)
            _set(file, key, value)
            if _refusal(file, target) != refusal:
                break
            _set(file, key, before)
        else:
            raise PyspecError(refusal)
        left.remove(repair)
        refusals.append(Check(check, FAIL, f"the engine refuses the drafter: {refusal}", remedy))
    return open_drafter(file, target.file), refusals


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
