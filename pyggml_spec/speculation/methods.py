"""Ways of drafting, by the names that llama.cpp's `--spec-type` has for them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..checks import whole
from ..errors import PyspecError
from ..suggest import meant
from .ngram import LOOKUPS

MODELS = ("draft-dflash", "draft-mtp", "draft-eagle3", "draft-dspark", "draft-simple")
METHODS = (*MODELS, *LOOKUPS)
NONE = "none"
IMPLIED = "suffix"  # drafts where there is no drafter and nothing was asked for
LEAST_TOKENS = 64  # of the vocabulary; a head of fewer would be no faster
_REFUSED = {
    "ngram-map-k4v": "matches with several continuations are not counted; suffix takes the longest match",
    "ngram-cache": "there are no lookup files; suffix keeps the sequences of the session",
}


class Methods(NamedTuple):
    """Ways that may draft: ``model``, of MODELS; ``asked``: those named by the caller, which have to be available;
    ``lookup``: of LOOKUPS, or None; ``tokens``: models draft none but the first so many of the vocabulary, 0 for all; ``implied``: of LOOKUPS, what
    drafts where there is no model that does."""

    model: frozenset[str] = frozenset(MODELS)
    asked: frozenset[str] = frozenset()
    lookup: str | None = None
    tokens: int = 0
    implied: str | None = None


def listed(names: Any) -> Any:
    """The names in a text that has commas between them, as `--spec-type` takes it; anything else as it is."""
    return [name for part in names.split(",") if (name := part.strip())] if isinstance(names, str) else names


def methods(names: Iterable[str] | None, without: Iterable[str] = (), tokens: int | None = None) -> Methods:
    """The drafting methods that may be used.

    Args:
        names: of METHODS, or "none" alone, in a list or in one text with commas; None for whatever there is: a drafter's file, given or in the target's folder, or the target's own MTP layer.
        without: names that may not, whatever there is.
        tokens: models draft none but the first so many tokens of the vocabulary; None for all of them.

    Raises:
        PyspecError: another name, where the message says why llama.cpp's are not among them; or a name in both lists.
    """
    tokens = 0 if tokens is None else whole(tokens, "the vocabulary of drafts (`draft_vocab`)", LEAST_TOKENS, 1 << 30, PyspecError)
    for given in (names, without):
        if not isinstance(given, (Iterable, type(None))) or (isinstance(given, str) and not listed(given)):
            raise PyspecError(f"drafting methods are a name or a list of names, like 'suffix', and not {given!r}")
    asked, refused = None if names is None else list(listed(names)), list(listed(without))
    for name in (*(asked or ()), *refused):
        if name in METHODS or name == NONE:
            continue
        why = f": {_REFUSED[name]}" if name in _REFUSED else ""
        raise PyspecError(
            f"unknown drafting method {name!r}{why}; available: {', '.join(METHODS)}, {NONE}{'' if why else meant(name, METHODS)}"
        )
    if both := [name for name in refused if name in (asked or ())]:
        raise PyspecError(f"{both[0]} is both requested and excluded as a drafting method; leave one of the two out")
    if asked is None:
        return Methods(frozenset(MODELS) - {*refused}, tokens=tokens, implied=None if IMPLIED in refused else IMPLIED)
    if NONE in asked and len(asked) > 1:
        raise PyspecError(f"{NONE!r} stands for no drafts at all; leave it out, or the other names")
    lookups = [name for name in asked if name in LOOKUPS and name not in refused]
    if len(lookups) > 1:
        raise PyspecError(f"{' and '.join(lookups)} look for matches in the same text; name one of them")
    wanted = frozenset(name for name in asked if name in MODELS) - {*refused}
    return Methods(wanted, wanted, lookups[0] if lookups else None, tokens)
