"""One server per module, and the clients of others: importing them takes seconds, which only the process that runs these tests has to spend."""

from types import ModuleType

import pytest
from server.running import Running


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    import openai

    return openai


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    import anthropic

    return anthropic


@pytest.fixture(scope="module")
def server():
    running = Running("--slots", 4, "--draft-width", 4)  # a width that is measured may be 1 on a busy machine: nothing is drafted then
    yield running
    assert running.end() == 0, running.lines
    assert not any("Traceback" in line for line in running.lines), running.lines
