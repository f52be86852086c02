"""Who may ask: API keys, and what browsers on other pages are told."""

import hmac
from collections.abc import Mapping, Sequence
from hashlib import blake2s
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import PyspecError
from .errors import ApiError

LOCAL = ("localhost", "127.0.0.1", "::1")


class Keys:
    """The API keys: given ones, and those of a file, one per line, which ``read`` takes anew."""

    def __init__(self, given: Sequence[str] = (), file: str | None = None) -> None:
        self._given, self._file = [key.strip() for text in given for key in text.split(",") if key.strip()], file
        self._keys: dict[bytes, str] = {}  # with their names
        self.read()

    def read(self) -> None:
        """Raises PyspecError: the file cannot be read, or has none."""
        keys = list(self._given)
        if self._file is not None:
            try:
                lines = Path(self._file).read_text("utf-8", "replace").splitlines()
            except OSError as error:
                raise PyspecError(f"the file of API keys {self._file} cannot be read: {error.strerror}") from None
            found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not found:
                raise PyspecError(f"the file of API keys {self._file} has none; put one on each line")
            keys += found
        self._keys = {key.encode(): f"key-{blake2s(key.encode(), digest_size=16).hexdigest()}" for key in keys}

    def check(self, headers: Mapping[str, str]) -> str:
        """The name of the key that a request came with: of the key alone, so that it stays the same when the file is read anew. "" where no keys
        are asked for.

        Raises:
            ApiError: none, or a wrong one.
        """
        if not self._keys:
            return ""
        sent = (
            headers.get("x-api-key") or headers.get("authorization", "").partition(" ")[2]
            if "authorization" in headers or "x-api-key" in headers
            else ""
        )
        found = ""
        for key, name in self._keys.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(key, sent.strip().encode("utf-8", "surrogateescape")):
                found = name
        if not found:
            raise ApiError(
                401, 'Invalid API Key: send one as "Authorization: Bearer KEY" or "X-Api-Key: KEY"', headers={"www-authenticate": "Bearer"}
            )
        return found


class Origins:
    """Which pages' scripts may ask: all ("*"), those of this machine ("localhost"), or a list of origins."""

    def __init__(self, text: str = "localhost", credentials: bool = True) -> None:
        self._allowed, self._credentials = [part.strip() for part in text.split(",") if part.strip()], credentials

    def headers(self, origin: str | None) -> list[tuple[str, str]]:
        if origin is None or not self._allows(origin):
            return []
        out = [("access-control-allow-origin", origin), ("vary", "Origin")]
        return [*out, ("access-control-allow-credentials", "true")] if self._credentials else out

    def preflight(self, origin: str | None) -> dict[str, str]:
        """What an OPTIONS request is told."""
        told = {
            "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
            "access-control-allow-headers": "*",
            "access-control-max-age": "600",
        }
        return told if self.headers(origin) else {}

    def _allows(self, origin: str) -> bool:
        if "*" in self._allowed or origin in self._allowed:
            return True
        try:
            return "localhost" in self._allowed and urlsplit(origin).hostname in LOCAL
        except ValueError:
            return False
