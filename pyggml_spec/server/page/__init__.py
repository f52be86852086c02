"""The page at /: three files of this folder, which load nothing from elsewhere."""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

_FILES = {
    "/": ("index.html", "text/html"),
    "/index.html": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
PATHS = tuple(_FILES)
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(context: Any, request: Request) -> Response:
    name, kind = _FILES[request.scope["path"]]
    return Response((Path(__file__).parent / name).read_bytes(), headers=_HEADERS, media_type=kind)
