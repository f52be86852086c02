"""One server per module."""

import pytest
from serve.running import Running


@pytest.fixture(scope="module")
def server():
    running = Running("--slots", 4)
    yield running
    assert running.end() == 0, running.lines
    assert not any("Traceback" in line for line in running.lines), running.lines
