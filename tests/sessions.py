"""Fixtures of sessions, and threads that run together."""

import threading
from collections.abc import Callable, Iterable

import pytest

import pyggml_spec as ps


def loaded(*files: object, pair: bool | str = False, **options):
    """A module's fixture: a session on one thread of the CPU, of ``files``, of a fixture of files (True: the random pair), or of the embedded pair."""

    @pytest.fixture(scope="module")
    def session(request):
        named = request.getfixturevalue("pair" if pair is True else pair) if pair else files
        with ps.load(*named, device="CPU", threads=1, **options) as made:
            yield made

    return session


def together(calls: Iterable[Callable[[], object]], seconds: float = 120) -> None:
    """Runs each call in a thread of its own, and waits for all."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)


def fails_with(
    error: type[BaseException] | tuple[type[BaseException], ...], words: str, call: Callable[..., object], *args, **more
) -> None:
    """``call`` raises ``error``, and its message has ``words``, a regular expression."""
    with pytest.raises(error, match=words):
        call(*args, **more)
