"""Access: API keys, names of this server, and pages of other sites."""

import codecs
import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2s
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from ..errors import PyspecError
from .errors import ApiError

_LOCAL_ORIGIN = r"[a-z][a-z0-9+.-]*://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d+)?"
MAX_NAME = 300  # characters; DNS has 253
KEY_HEADER, PEER_HEADER = "x-pyspec-key", "x-pyspec-peer"  # from a router: the name of the key, and the client's address and port
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # they neither compute nor change anything
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+(?:%[\w.~-]+)?\]|[^\s\[\]:/@?#\\%]+)(?::\d{1,5})?")
_AROUND = " \t\r\n\ufeff"
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


class Admission(Protocol):
    """Who may request."""

    def check(self, headers: Mapping[str, str]) -> str:
        """The name of a request's key. Raises ApiError."""


class Admitted:
    """Of a model's process under a router, which has checked the request: the socket is the router's alone."""

    def check(self, headers: Mapping[str, str]) -> str:
        return headers.get(KEY_HEADER, "")


class Keys:
    """The API keys: given ones, and those of a file, one per line, which ``read`` takes anew."""

    def __init__(self, given: Sequence[str] = (), file: str | None = None) -> None:
        """Raises PyspecError: one is empty, as of a variable that is not set, which would serve without keys; or as ``read``."""
        parts = [[key.strip(_AROUND) for key in text.split(",") if key.strip(_AROUND)] for text in given]
        if not all(parts):
            raise PyspecError("`api_key` is empty, as a variable that is not set; give a key, or leave the option out to serve without one")
        if file is not None and not file.strip():
            raise PyspecError("`api_key_file` is empty, as a variable that is not set; name a file with one key on each line")
        self._given, self._file = [key for part in parts for key in part], file
        self._keys: dict[bytes, str] = {}  # with their names
        self.read()

    def read(self) -> None:
        """Raises PyspecError: the file cannot be read, or has none."""
        keys = [key.encode("utf-8", "surrogateescape") for key in self._given]
        if self._file is not None:
            try:
                found = _lines(Path(self._file).read_bytes())
            except OSError as error:
                raise PyspecError(f"the file of API keys {self._file} cannot be read: {error.strerror}") from None
            if not found:
                raise PyspecError(f"the file of API keys {self._file} has none; put one on each line")
            keys += found
        self._keys = {key: f"key-{blake2s(key, digest_size=16).hexdigest()}" for key in keys}

    def check(self, headers: Mapping[str, str]) -> str:
        """The name of a request's key, which stays the same when the file is read anew; "" where there are no keys. Raises ApiError: none, or a
        wrong one."""
        if not self._keys:
            return ""
        text = headers.get("x-api-key") or headers.get("authorization", "").partition(" ")[2]
        sent, found = text.encode("latin-1", "replace").strip(b" \t"), ""
        for key, name in self._keys.items():  # all of them: the time must not depend on the key
            if hmac.compare_digest(key, sent) | hmac.compare_digest(_latin(key), sent):
                found = name
        if not found:
            sentence = 'Invalid API Key: send one as "Authorization: Bearer KEY" or "X-Api-Key: KEY"'
            raise ApiError(401, sentence, headers={"www-authenticate": "Bearer"})
        return found


def _lines(data: bytes) -> list[bytes]:
    """The keys of a file, in UTF-8: comments, spaces around them and a byte order mark are left out."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            text = data[len(mark) :].decode(encoding, "surrogateescape" if mark == codecs.BOM_UTF8 else "replace")
            data = text.encode("utf-8", "surrogateescape")
    return [line.strip() for line in data.splitlines() if line.strip() and not line.startswith(b"#")]


def _latin(key: bytes) -> bytes:
    """The key as clients send it that write headers in Latin-1; as it is where that cannot be."""
    try:
        return key.decode().encode("latin-1")
    except UnicodeError:
        return key


class Hosts:
    """Names that requests may have in ``Host``: this machine's, the addresses it listens at, and configured ones. Without this a page of another site
    could read everything by DNS rebinding."""

    def __init__(self, text: str = "", bound: Sequence[str] = ()) -> None:
        """``text``: names with commas between them, "*.example.com" for all below one, "*" for any; ``bound``: what the server listens at. Raises
        PyspecError: one of them is no name."""
        given = [part.strip() for part in text.split(",") if part.strip()]
        self._any = "*" in given
        self._below = tuple(f".{plain_host(name[2:])}" for name in given if name.startswith("*."))
        names = [name.removeprefix("*.") for name in given if name != "*"]
        if wrong := [name for name in names if "*" in name or (host_of(name) is None and not _is_address(name))]:
            raise PyspecError(f"`allowed_hosts` has {wrong[0]!r}, which is no name of a host; give names without http:// and paths, or *")
        here = {plain_host(name) for name in bound}
        self._addresses = any(_is_address(name) and ipaddress.ip_address(name).is_unspecified for name in here)  # any may be this machine's
        self._names = {"localhost", *here, *(host_of(name) or plain_host(name) for name in given)}
        if self._addresses:
            self._names.add(plain_host(socket.gethostname()))

    def check(self, scope: Scope) -> None:
        """Raises ApiError: the request is for another host, or for none that can be read. Browsers do not use unix sockets."""
        if self._any or (scope.get("server") or ("", 0))[1] is None:
            return
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) > 1 or (not given and scope.get("http_version", "1.1") != "1.0"):
            raise ApiError(400, f"the request has {'no header Host' if not given else 'several headers Host'}; send one")
        if (target := scope.get("authority")) is not None:
            given.append(target)
        for text in given:
            name = host_of(text) if len(text) < MAX_NAME else None
            if name is None:
                raise ApiError(400, f"the Host {text[:100]!r} is no name or address of a host")
            ours = _is_address(name) and (self._addresses or ipaddress.ip_address(name).is_loopback)
            if not ours and name not in self._names and not name.endswith(self._below or "\n"):
                start = f"pyspec serve --allowed-hosts {name[:100]}"
                raise ApiError(403, f"this server is not {name[:100]}; start it by {start} if it should be")


@lru_cache(256)
def host_of(text: str) -> str | None:
    """The name or address in a header Host, without its port; None where there is none."""
    found = _AUTHORITY.fullmatch(text.strip(" \t"))
    return plain_host(found[1]) if found is not None else None


def plain_host(name: str) -> str:
    """As hosts are compared: lower case, without a dot at the end, addresses in their shortest form."""
    name = name.strip("[]").partition("%")[0].removesuffix(".").lower()
    if not _is_address(name):
        try:
            return name.encode("idna").decode()
        except UnicodeError:
            return name
    address = ipaddress.ip_address(name)
    return str(getattr(address, "ipv4_mapped", None) or address)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Origins:
    """Pages whose scripts may send requests: all ("*"), those of this machine ("localhost"), or a list of origins."""

    def __init__(self, text: str = "localhost") -> None:
        parts = [part.strip().rstrip("/") for part in text.split(",") if part.strip()]
        self._pattern = "|".join({"*": ".*", "localhost": _LOCAL_ORIGIN}.get(part, re.escape(part)) for part in parts) or "(?!)"
        self._allowed = re.compile(self._pattern)

    def cors(self) -> dict[str, Any]:
        """Options of Starlette's CORSMiddleware."""
        methods = ("GET", "POST", "DELETE", "OPTIONS")
        return {"allow_origin_regex": self._pattern, "allow_credentials": True, "allow_methods": methods, "allow_headers": ("*",)}

    def check(self, scope: Scope) -> None:
        """Raises ApiError: a page of another site, which need not be able to read the response, requests what computes or changes something."""
        headers = Headers(scope=scope)
        origins, site = headers.getlist("origin"), headers.get("sec-fetch-site", "")
        if scope["method"] in SAFE_METHODS or site == "same-origin":
            return
        here = _authority(f"//{headers.get('host', '')}")  # pages of this server itself
        foreign = [o for o in origins if not self._allowed.fullmatch(o) and not (_authority(o) == here != ("", None))]
        if foreign or (site in ("cross-site", "same-site") and not origins and not self._allowed.fullmatch("*")):
            page = foreign[0][:100] if foreign else "another site"
            start = f"pyspec serve --cors-origins {page if foreign else '*'}"
            raise ApiError(403, f"pages of {page} may not use this server; start it by {start} if they should")


def _authority(url: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(url)
        return plain_host(parts.hostname or ""), parts.port
    except ValueError:
        return "", None
