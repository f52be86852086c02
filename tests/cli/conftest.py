"""A pair and how the commands are told to run it: one thread, no width control, so that runs repeat exactly."""

import pytest

import pyggml_spec as ps

PROMPT = "def quicksort(items):\n"


@pytest.fixture(scope="session")
def pinned(pair):
    return ["-m", pair[0], "-md", pair[1], "--device", "CPU", "-t", 1, "--draft-width", 4]


@pytest.fixture(scope="session")
def text(pair):
    """What 40 tokens after PROMPT are, from the library."""
    with ps.load(*pair, device="CPU", threads=1, draft_width=4) as session:
        return session.generate(PROMPT, max_tokens=40)[0]
