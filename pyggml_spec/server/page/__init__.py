"""The pages: a chat at /, speculation at /speculation. All that they load lies in this folder, nothing comes from elsewhere.

``vendor`` holds libraries that ``scripts/vendor_page.py`` fetches.
"""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = {
    "/": _FOLDER / "chat.html",
    "/index.html": _FOLDER / "chat.html",
    "/speculation": _FOLDER / "speculation.html",
    **{f"/page/{path.relative_to(_FOLDER).as_posix()}": path for path in sorted(_FOLDER.rglob("*")) if path.suffix in (".js", ".css")},
}
PATHS = tuple(_FILES)
_POLICY = (  # markup enters through DOMPurify alone: the browser refuses other text where it would become elements
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(context: Any, request: Request) -> Response:
    path = _FILES[request.scope["path"]]
    return Response(path.read_bytes(), headers=_HEADERS, media_type=_KINDS[path.suffix])
