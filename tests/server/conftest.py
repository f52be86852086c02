"""One server per module, and the clients of others: importing them takes seconds, which only the process that runs these tests has to spend."""

from types import ModuleType

import pytest
from server.running import serving


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    import openai

    return openai


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    import anthropic

    return anthropic


server = serving("--slots", 4, "--draft-width", 4)  # a width that is measured may be 1 on a busy machine: nothing is drafted then
