"""Pictures and sounds of requests: parts of messages in the dialects' forms become bytes of files.

`data:` URLs always; `http` and `https` ones only where the server was started for that (``PictureOptions.urls``): within a time and a size, over a few redirects,
and never from an address that is not public.
"""

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from ..cancel import check
from ..vision.messages import PICTURE
from ..vision.pictures import PictureLimits
from ..vision.sounds import is_sound
from .errors import ApiError

SECONDS, REDIRECTS = 10.0, 3
PIECE = 1 << 16
KINDS = {"image_url": "image", "image": "image", "input_audio": "audio"}
FORM = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'


@dataclass(frozen=True)
class PictureOptions:
    """``urls``: whether pictures are fetched from the addresses that requests name."""

    limits: PictureLimits = field(default_factory=PictureLimits)
    urls: bool = False


def media_kind(part: Any) -> str:
    """ "image" or "audio" for a part of a message with a picture or a sound, "" for others."""
    return KINDS.get(str(part.get("type")), "") if isinstance(part, dict) else ""


def with_bytes(messages: list[dict[str, Any]], options: PictureOptions) -> list[dict[str, Any]]:
    """Messages whose pictures and sounds are parts of ``vision.messages``. Raises ApiError: one cannot be had."""
    out, count = [], 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(map(media_kind, content)):
            count += sum(bool(media_kind(part)) for part in content)
            if count > options.limits.count:
                raise ApiError(400, f"the messages have more than {options.limits.count} pictures and sounds; send fewer", param="messages")
            message = message | {
                "content": [{"type": PICTURE, "data": _bytes(part, options)} if media_kind(part) else part for part in content]
            }
        out.append(message)
    return out


def _bytes(part: dict[str, Any], options: PictureOptions) -> bytes:
    """Those of an OpenAI part (``image_url``, ``input_audio``), or of one of Anthropic's (``source``)."""
    if part["type"] == "input_audio":
        sound = part.get("input_audio")
        file = decoded(sound.get("data") if isinstance(sound, dict) else None, options)
        if not is_sound(file):
            raise ApiError(400, "the data of an input_audio is no WAV, MP3 or FLAC file", param="messages")
        return file
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        return decoded(source.get("data"), options)
    named = part.get("image_url", part.get("url"))
    url = source.get("url") if isinstance(source, dict) else named.get("url") if isinstance(named, dict) else named
    if not isinstance(url, str):
        raise ApiError(400, f"a picture has no address; send {FORM}", param="messages")
    if url.startswith("data:"):
        head, comma, data = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ApiError(400, f"a picture's data URL is not base64; send {FORM}", param="messages")
        return decoded(data, options)
    if not options.urls:
        raise ApiError(400, f"pictures are not fetched by this server; send {FORM}", param="messages")
    return fetched(url, options.limits.nbytes)


def decoded(data: Any, options: PictureOptions) -> bytes:
    """Bytes of base64 text. Raises ApiError."""
    if not isinstance(data, str) or len(data) > 2 * options.limits.nbytes:
        raise ApiError(400, f"data of a picture or sound is no base64 text of at most {options.limits.nbytes} bytes", param="messages")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, "data of a picture or sound is no base64 text; encode the file's bytes", param="messages") from None


# -- from elsewhere


def fetched(url: str, most: int) -> bytes:
    """The bytes at an address. Raises ApiError: it is not public, or not had within the limits."""
    deadline = time.monotonic() + SECONDS
    for _ in range(1 + REDIRECTS):
        response = _get(_checked(url), deadline)
        with response:
            if response.status in (301, 302, 303, 307, 308) and (place := response.headers.get("location")):
                url = urljoin(url, place)
                continue
            if response.status != 200:
                raise _refused(url, f"it answers {response.status}")
            out = bytearray()
            while piece := _read(response, url):
                check()
                out += piece
                if len(out) > most:
                    raise _refused(url, f"it has more than {most} bytes")
                if time.monotonic() > deadline:
                    raise _refused(url, f"it took more than {SECONDS:g} s")
            return bytes(out)
    raise _refused(url, f"there are more than {REDIRECTS} redirects")


def _read(response: http.client.HTTPResponse, url: str) -> bytes:
    try:
        return response.read1(PIECE)
    except (OSError, http.client.HTTPException) as error:
        raise _refused(url, type(error).__name__) from None


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise _refused(url, "it is no address") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _refused(url, "only http and https are fetched")
    return parts


def _get(parts: SplitResult, deadline: float) -> http.client.HTTPResponse:
    """The response of the one address that was checked: a name that is looked up twice may name another one the second time."""
    assert parts.hostname is not None
    url, secure = parts.geturl(), parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _refused(url, "its host is not known") from None
    if not found or not all(is_public(where[4][0]) for where in found):
        raise _refused(url, "its host is not in the public network")
    left = max(0.1, deadline - time.monotonic())
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=left)
    try:
        connection.sock = socket.create_connection((str(found[0][4][0]), port), left)
        if secure:
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=parts.hostname)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"accept": "image/*", "connection": "close"})
        return connection.getresponse()
    except (OSError, ValueError, http.client.HTTPException) as error:
        connection.close()
        raise _refused(url, type(error).__name__) from None


def is_public(address: Any) -> bool:
    """Whether an IP address is one of the public network, and none that stands for another."""
    try:
        ip = ipaddress.ip_address(str(address).partition("%")[0])
    except ValueError:
        return False
    inner = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    return (inner or ip).is_global and not (inner or ip).is_multicast and (inner is None or ip.version == 6)


def _refused(url: str, why: str) -> ApiError:
    return ApiError(400, f"the picture at {url[:100]} cannot be fetched: {why}; send its bytes as a data URL", param="messages")
