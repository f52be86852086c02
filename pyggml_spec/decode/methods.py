"""Ways of drafting, by the names that llama.cpp's `--spec-type` has for them."""

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import PyspecError
from .suffix import LOOKUPS

MODELS = ("draft-dflash", "draft-mtp", "draft-eagle3", "draft-dspark")
METHODS = (*MODELS, *LOOKUPS)
NONE = "none"
_REFUSED = {
    "draft-simple": "a separate small model would be a second engine; an MTP layer or a DFlash drafter gives more tokens per step for less",
    "ngram-map-k4v": "matches with several continuations are not counted; suffix takes the longest match",
    "ngram-cache": "there are no lookup files; suffix keeps the sequences of the session",
}


class Methods(NamedTuple):
    """Ways that may draft: ``model``, of MODELS; ``asked``: those that somebody named, and that have to be there;
    ``lookup``: of LOOKUPS, or None."""

    model: frozenset[str] = frozenset(MODELS)
    asked: frozenset[str] = frozenset()
    lookup: str | None = None


def methods(names: Iterable[str] | None, without: Iterable[str] = ()) -> Methods:
    """The ways that may draft.

    Args:
        names: of METHODS, or "none" alone; None for whatever there is: a drafter's file, or the target's own MTP layer.
        without: names that may not, whatever there is.

    Raises:
        PyspecError: another name; the message says why llama.cpp's are not among them.
    """
    asked, refused = None if names is None else list(names), list(without)
    for name in (*(asked or ()), *refused):
        if name in METHODS or name == NONE:
            continue
        why = f": {_REFUSED[name]}" if name in _REFUSED else ""
        raise PyspecError(f"{name!r} is not a way of drafting here{why}; use {', '.join(METHODS)}, or {NONE}")
    if asked is None:
        return Methods(frozenset(MODELS) - {*refused})
    if NONE in asked and len(asked) > 1:
        raise PyspecError(f"{NONE!r} stands for no drafts at all; leave it out, or the other names")
    lookups = [name for name in asked if name in LOOKUPS and name not in refused]
    if len(lookups) > 1:
        raise PyspecError(f"{' and '.join(lookups)} look for matches in the same text; name one of them")
    wanted = frozenset(name for name in asked if name in MODELS) - {*refused}
    return Methods(wanted, wanted, lookups[0] if lookups else None)
