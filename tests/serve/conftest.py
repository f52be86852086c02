"""One server per module."""

import pytest
from serve.running import Running


@pytest.fixture(scope="module")
def server():
    running = Running("--slots", 4, "--draft-width", 4)  # a width that is measured may be 1 on a busy machine: nothing is drafted then
    yield running
    assert running.end() == 0, running.lines
    assert not any("Traceback" in line for line in running.lines), running.lines
