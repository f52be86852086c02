"""The page at /: three files of this folder, which load nothing from elsewhere."""

from functools import cache
from pathlib import Path

from ...server.http import Response

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/index.html": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page(path: str) -> Response | None:
    """The file at ``path``, None if there is none."""
    if path not in _FILES:
        return None
    name, kind = _FILES[path]
    return Response(_read(name), headers={"content-type": kind, **_HEADERS})


@cache
def _read(name: str) -> bytes:
    return (Path(__file__).parent / name).read_bytes()
