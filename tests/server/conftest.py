"""One server per module, and the clients of others: importing them takes seconds, which only the process that runs these tests has to spend."""

from types import ModuleType

import pytest
from server.browsing import size, start
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


@pytest.fixture(scope="module")
def browser():
    made = start()
    yield made
    made.quit()


@pytest.fixture
def sized(browser):
    """Sets the width of the page as a phone has it, and back."""
    yield lambda *given: size(browser, *given)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
