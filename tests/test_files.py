"""Files that replace others whole: no error and no signal leaves a part of one."""

import os

import pytest

from pyggml_spec.files import replacing
from pyggml_spec.tools.convert import written_whole

WRITERS = {"replacing": replacing, "written_whole": lambda path: written_whole(path, replace=True)}


@pytest.mark.parametrize("writer", WRITERS)
def test_ctrl_c_as_the_file_is_created(writer, tmp_path, monkeypatch):
    """It had been created before the block that removes it began."""
    create = os.open

    def interrupted(*args, **options):
        os.close(create(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), WRITERS[writer](tmp_path / "out"):
        pytest.fail("the block began")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_an_error_in_the_block_keeps_the_old_file(writer, error, tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(Exception if error is not KeyboardInterrupt else error), WRITERS[writer](tmp_path / "out"):
        raise error("in the block")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "old"
