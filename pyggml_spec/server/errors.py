"""Errors of requests, in the two JSON shapes that clients know."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import ContextError, PyspecError, SamplingError, TemplateError

KINDS = {  # llama-server's names, and those that it has no case for; 400: any other
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 500: "server_error", 501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip
REFUSALS = (ContextError, SamplingError, TemplateError)
_ANTHROPIC = {413: "request_too_large", 500: "api_error", 501: "invalid_request_error", 503: "overloaded_error"}


class ApiError(Exception):
    """The error that a request gets. ``message`` is a sentence with the remedy, ``param`` the field that is wrong, if one is; ``headers`` are those of
    the response, ``more`` further members of the error object."""

    def __init__(
        self, status: int, message: str, *, kind: str | None = None, param: str | None = None, headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.more = status, message, param, more
        self.kind = kind or KINDS.get(status, KINDS[400])
        self.headers = dict(headers or {})
        if status in (500, 501):  # OpenAI's clients retry every 5xx, and these would fail again
            self.headers.setdefault("x-should-retry", "false")

    def openai(self) -> dict:
        return {"error": {"code": self.status, "message": self.message, "type": self.kind, "param": self.param, **self.more}}

    def anthropic(self) -> dict:
        return {"type": "error", "error": {"type": _ANTHROPIC.get(self.status, self.kind), "message": self.message}}


def api_error(error: BaseException) -> ApiError:
    """Any exception as one: wrong requests are 400, the rest is 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PyspecError):
        return ApiError(400 if isinstance(error, REFUSALS) else 500, str(error).replace("`", ""))
    if isinstance(error, MemoryError):
        return ApiError(500, "there is not enough memory for this request; make it smaller")
    return ApiError(500, f"the server failed with {type(error).__name__}; its log has the details")


@contextmanager
def translated(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a request that was translated to another dialect name fields as its client did: ``names`` has the client's by the others."""
    try:
        yield
    except (ApiError, *REFUSALS) as error:
        converted = api_error(error)
        longest = sorted((name for name in names if not name.isalpha()), key=len, reverse=True)  # a plain word may be one of the sentence's
        pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?!\w)" for name in longest) or "(?!)")
        converted.message = pattern.sub(lambda found: names[found[0]], converted.message)
        converted.param = names.get(converted.param, converted.param) if converted.param is not None else None
        raise converted from error.__cause__
