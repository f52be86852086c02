"""What `pyspec serve --record` keeps: whole answers of requests that allow it, for the owner's eyes alone, up to a limit."""

import json
import stat
from types import SimpleNamespace

import pytest
from server.running import Running

from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import PyspecError
from pyggml_spec.server.record import Recorder
from pyggml_spec.server.tasks import TaskRequest


def ended(tokens, record=True, reason="length"):
    stats = Stats(prompt_tokens=2)
    stats.stop_reason = reason
    return SimpleNamespace(
        request=TaskRequest([5, 6], record=record), stats=stats, handle=SimpleNamespace(sequence=SimpleNamespace(tokens=tokens))
    )


def test_a_server_keeps_answers_but_of_requests_that_opt_out(tmp_path):
    folder = tmp_path / "records"
    with Running("--record", folder) as server:
        kept = server.ok("/completion", prompt="def f(x):", n_predict=6, ignore_eos=True, temperature=0, return_tokens=True)
        server.ok("/completion", prompt="secret", n_predict=6, ignore_eos=True, record=False)
        server.ok("/v1/messages", messages=[{"role": "user", "content": "secret"}], max_tokens=4, record=False)
        (path,) = folder.glob("*.jsonl")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["tokens"][line["prompt_tokens"] :] == kept["tokens"] and line["temperature"] == 0


def test_records_end_at_the_limit_and_leave_out_what_was_broken_off(tmp_path):
    recorder = Recorder(tmp_path, "a/b c", 200)
    for task in (
        ended([7, 8]),
        ended([7, 8], record=False),
        ended([7, 8], reason="cancelled"),
        ended([7, -1]),
        ended([9] * 200),
        ended([9, 9]),
    ):
        recorder.take(task)
    recorder.close()
    assert [json.loads(line)["tokens"] for line in recorder.path.read_text().splitlines()] == [[5, 6, 7, 8]]
    again = Recorder(tmp_path / "empty", "m", 200)
    again.close()
    assert not again.path.exists()
    (tmp_path / "file").touch()
    with pytest.raises(PyspecError, match="cannot be kept"):
        Recorder(tmp_path / "file", "m", 200)
