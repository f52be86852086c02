"""`_native.pyi` is what type checkers know about the compiled extension: it has to be that of this extension."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_stub.py"


def test_the_stub_is_what_the_extension_offers():
    """If this fails, run scripts/make_stub.py."""
    spec = importlib.util.spec_from_file_location("make_stub", SCRIPT)
    make_stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_stub)
    assert make_stub.STUB.read_text("utf-8") == make_stub.stub()
