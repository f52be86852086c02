"""Starting and ending: what is missing is said in one sentence, and nothing that was running is lost without a word."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import make_dataclass
from pathlib import Path
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from cli.process import environment, one_sentence, pyspec
from server.running import Running, posted, wait_for
from workers import Worker, need_library

from pyggml_spec.cli.main import main
from pyggml_spec.errors import PyspecError
from pyggml_spec.server import protocol
from pyggml_spec.server.access import Keys
from pyggml_spec.server.errors import ApiError
from pyggml_spec.text.renderer import RENDERER

pytestmark = pytest.mark.slow


def test_what_is_missing_is_one_sentence(tmp_path, server):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['uvicorn'] = sys.modules['msgspec'] = None\n")
    done = pyspec("serve", env={"PYTHONPATH": str(tmp_path)})
    one_sentence(done, "uvicorn and msgspec", "run: pip install uvicorn httptools msgspec starlette prometheus-client")
    port = server.url.rpartition(":")[2]
    done = pyspec("serve", "--device", "CPU", "-t", 1, "--port", port)
    assert done.returncode == 1 and f"127.0.0.1:{port} cannot be listened at" in done.stderr and "--port" in done.stderr


@pytest.mark.parametrize("options, words", [
    (["--ssl-key-file", __file__], "--ssl-key-file is the key of a certificate; name that with --ssl-cert-file"),
    (["--ssl-cert-file", __file__], "HTTPS cannot be served by "),
    (["--ssl-cert-file", __file__, "--ssl-key-file", __file__], " with the key "),
    (["--ssl-cert-file", "none.pem"], "none.pem cannot be read: No such file"),
    (["--api-key-file", "none.txt"], "none.txt cannot be read"),
    (["--host", "a..b"], "a..b:0 cannot be listened at"),
    (["--chat-template-kwargs", "{"], "is no JSON object"),
])  # fmt: skip
def test_what_cannot_be_served_is_said_before_a_model_is_loaded(capsys, monkeypatch, options, words):
    """A key without its certificate ended in a traceback, a wrong one in "the output cannot be written", behind minutes of loading."""
    monkeypatch.setattr("pyggml_spec.api.load_to_serve", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as end:
        main(["serve", "--port", "0", *options])
    assert end.value.code in (1, 2) and words in capsys.readouterr().err


def test_what_comes_through_a_pipe_is_read_once(monkeypatch):
    """`--api-key-file <(...)` was read before the model was loaded, and had no keys when the server started; a certificate neither."""
    ends = []

    def pipe(data):
        there, to = os.pipe()
        os.write(to, data)
        os.close(to)
        ends.append(there)
        return f"/dev/fd/{there}"

    asked = []

    def serve(session, settings, *_):
        asked.append(settings)
        return 0

    load = MagicMock()
    session = load.return_value
    session.slots_context.return_value = session.runner.options.n_ctx = 512
    session.configuration.return_value = make_dataclass("Used", ["n_ctx", "memory"])(512, {})
    monkeypatch.setattr("pyggml_spec.api.load_to_serve", load)
    monkeypatch.setattr("pyggml_spec.sampling.recommended.recommended", lambda _: ({}, []))
    monkeypatch.setattr("pyggml_spec.cli.serve.configuration_line", lambda *_: "")
    monkeypatch.setattr("pyggml_spec.server.start.serve", serve)
    keys, certificate, key = (pipe(data) for data in (b"first", b"certificate", b"key"))
    with pytest.raises(SystemExit) as end:
        main(["serve", "--port", "0", "--api-key-file", keys, "--ssl-cert-file", certificate, "--ssl-key-file", key])
    assert end.value.code == 0 and asked[0].keys.check({"x-api-key": "first"})
    assert [os.read(there, 20) for there in ends] == [b"", b"certificate", b"key"]
    for there in ends:
        os.close(there)


def test_what_renders_templates_starts_before_the_model_is_loaded(monkeypatch):
    """Its quarter of a second came after the model's."""
    order = []

    def load(*_):
        order.append("model")
        raise PyspecError("that is enough")

    monkeypatch.setattr(RENDERER, "start", lambda: order.append("templates"))
    monkeypatch.setattr("pyggml_spec.api.load_to_serve", load)
    with pytest.raises(SystemExit):
        main(["serve", "--port", "0", "--device", "CPU"])
    assert order == ["templates", "model"]


def test_a_key_has_the_same_name_whatever_others_there_are(tmp_path):
    """Its name was its place in the list: with a line taken out of the file, another key read its streams."""
    file = tmp_path / "keys"
    file.write_text("first\nsecond\nthird\n")
    keys = Keys(["given"], str(file))
    named = {key: keys.check({"x-api-key": key}) for key in ("given", "first", "second", "third")}
    assert len(set(named.values())) == 4 and not any(key in name for key, name in named.items())
    file.write_text("third\n# none\nsecond\n")
    keys.read()
    for key in ("given", "second", "third"):
        assert keys.check({"x-api-key": key}) == keys.check({"authorization": f"Bearer {key}"}) == named[key]
    with pytest.raises(ApiError, match="Invalid API Key"):
        keys.check({"x-api-key": "first"})


def test_an_encrypted_key_needs_a_terminal(capsys, monkeypatch):
    """OpenSSL asked the terminal that a supervisor's process has not: "the output cannot be written: Invalid argument"."""
    monkeypatch.setattr("pyggml_spec.api.load_to_serve", lambda *a, **k: pytest.fail("a model was loaded"))
    monkeypatch.setattr("ssl.SSLContext.load_cert_chain", lambda self, certificate, key, password: password())
    with pytest.raises(SystemExit) as end:
        main(["serve", "--port", "0", "--ssl-cert-file", __file__])
    assert end.value.code == 1 and "is encrypted, and there is no terminal" in capsys.readouterr().err


def test_two_addresses_and_a_key_file(tmp_path):
    (tmp_path / "keys").write_text("# ours\nfirst\n")
    with Running("--host", "127.0.0.1,127.0.0.2", "--api-key-file", tmp_path / "keys", "--slots", 1) as running:
        ask = {"prompt": "a", "max_tokens": 1}
        assert running.http.get("/health").status_code == 200 and running.http.get("/v1/models").status_code == 200
        refused = running.post("/v1/completions", **ask)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert running.http.get("/slots").status_code == 401 and running.http.get("/metrics").status_code == 401
        for headers in ({"authorization": "Bearer first"}, {"x-api-key": "first"}):
            assert running.http.post("/v1/completions", json=ask, headers=headers).status_code == 200
        assert running.http.post("/v1/messages", json={}, headers={"x-api-key": "no"}).json()["type"] == "error"
        (tmp_path / "keys").write_text("second\n")
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: running.http.post("/v1/completions", json=ask, headers={"x-api-key": "second"}).status_code == 200)
        assert running.http.post("/v1/completions", json=ask, headers={"x-api-key": "first"}).status_code == 401


@contextlib.contextmanager
def reading(running, tokens):
    """The events of a stream that has begun; it is over at the end."""
    got, body = [], {"prompt": "import os\n", "n_predict": tokens, "ignore_eos": True, "stream": True}

    def read():
        with running.http.stream("POST", "/completion", json=body) as response:
            got.extend(json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: got)
    yield got
    thread.join(280)


def _watch(running, seen):
    with running.http.stream("GET", "/pyspec/live") as response:
        seen.extend(response.iter_lines())
    seen.append("ended")


def test_what_runs_when_the_server_is_ended_comes_to_its_end():
    """What has no end of its own is ended: a page that was open held up the end for all of `--drain`, and was told of as a reader that was cut off."""
    with Running("--slots", 2, "--drain", 600, alone=True) as running:
        seen = []
        watcher = threading.Thread(target=_watch, args=(running, seen))
        watcher.start()
        with reading(running, 800) as got:
            wait_for(lambda: seen)
            running.process.send_signal(signal.SIGTERM)
            wait_for(lambda: any(line.startswith("ending") for line in running.lines))
            assert running.http.get("/ready").status_code == 503
            refused = running.post("/completion", prompt="x", n_predict=1)
            assert refused.status_code == 503 and refused.headers["retry-after"]
        assert got[-1]["stop"] and got[-1]["tokens_predicted"] == 800
        watcher.join(60)  # before the second signal, which cuts off readers
    assert seen[-1] == "ended" and not any("cut off" in line for line in running.lines), running.lines


@pytest.mark.parametrize("options, second", [(["--drain", "0.2"], False), ([], True)])
def test_what_does_not_end_in_time_is_told_so(options, second):
    running = Running("--slots", 1, *options, alone=True)
    with reading(running, 2000) as got:
        running.process.send_signal(signal.SIGINT)
        if second:
            time.sleep(0.3)
            running.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert running.end() == 0 and time.monotonic() - began < 60
    assert got[-1]["error"]["code"] == 503 and "cut off" in got[-1]["error"]["message"]


HANGS = """
import time
from pyggml_spec.engine.engine import Engine
from pyggml_spec.server import start
step, start.STEP_SECONDS = Engine.step, 0.2
Engine.step = lambda self, *given: step(self, *given) if self.stats.steps < 3 else time.sleep(600)
"""


def test_workers_and_steps_that_are_lost():
    """A device that hangs, or threads that others leave no core: the thread of the steps was waited for as long as it took."""
    running = Running("--slots", 1, "--drain", "0.1", before=HANGS)
    with reading(running, 2000) as got:
        assert running.end() == 0
    assert got[-1]["error"]["code"] == 503
    wait_for(lambda: running.lines[-1] == "ended while a step was under way")  # it may still be in the pipe
    need_library()
    with Worker() as worker, Running("--device", worker.device, "--slots", 1, "--draft-width", 2) as running:
        assert running.ok("/v1/completions", prompt="x", max_tokens=2) and running.http.get("/health").status_code == 200
        worker.kill()
        for response in (running.post("/v1/completions", prompt="x", max_tokens=2), running.http.get("/health")):
            assert response.status_code in (500, 503) and f"the worker 127.0.0.1:{worker.port} is lost" in response.text


ENCODES = """
import time
from pyggml_spec.text.tokenizer import Tokenizer
encode = Tokenizer.encode
Tokenizer.encode = lambda self, text, *given, **named: time.sleep(600) if "never" in str(text)[:9] else encode(self, text, *given, **named)
"""


def test_a_request_that_is_being_read_holds_up_no_end():
    """Threads that encode, render or compile were waited for, however long that took: `--drain 1` never ended."""
    running = Running("--slots", 1, "--drain", "0.2", before=ENCODES)

    def ask():
        with contextlib.suppress(httpx.HTTPError):
            running.post("/tokenize", content="never")

    waits = [threading.Thread(target=ask) for _ in range(6)]
    for thread in waits:
        thread.start()
    assert running.ok("/tokenize", content="others go on")["tokens"] and running.end() == 0
    for thread in waits:
        thread.join(60)
    wait_for(lambda: running.lines[-1] == "ended while a request was under way")


def test_a_reader_that_does_not_read_holds_up_no_end():
    """uvicorn waited 5 s for it, whatever `--drain` said. The one that reads is told that its answer was cut off."""
    running = Running("--slots", 2, "--drain", "0.2")

    def decoded():
        states = [slot["next_token"][0] for slot in running.http.get("/slots").json()]
        return max([0, *(state["n_decoded"] for state in states if state["n_decoded"] + state["n_remain"] == 1800)])

    with running.connect(4096) as unread, reading(running, 2000) as got:
        unread.sendall(posted({"prompt": "import os\n", "n_predict": 1800, "ignore_eos": True, "stream": True, "n_probs": 1000}))
        wait_for(lambda: decoded() >= 100)  # 90 kB per token: more than a socket takes
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0
    assert got[-1]["error"]["code"] == 503
    assert any(line.startswith("cut off what had not ended within 0.2 s") for line in running.lines)
    assert not any("Traceback" in line or "graceful" in line for line in running.lines), running.lines
    running.http.close()


def test_a_server_with_a_closed_stderr_ends():
    """The line that said so went into a closed pipe, and the signal was not obeyed."""
    first = subprocess.Popen(
        [sys.executable, "-m", "pyggml_spec", "serve", "--device", "CPU", "-t", "1", "--port", "0", "--slots", "1"], stderr=subprocess.PIPE, env=environment()
    )  # fmt: skip
    line = b""
    while not line.startswith(b"serving "):
        line = first.stderr.readline()
        assert line
    first.stderr.close()
    first.terminate()
    try:
        assert first.wait(60) == 0
    finally:
        first.kill()


def test_readers_have_the_rest_of_the_time(monkeypatch):
    """Who reads slowly has until the end of `--drain`, or 0.9 s if that is over; then the connection is cut off."""

    class Connection(protocol.Connection):
        def __init__(self, looks):
            self.looks, self.transport = looks, types.SimpleNamespace(abort=lambda: cut.append(self))

        @property
        def busy(self):
            self.looks -= 1
            return self.looks >= 0

    cut, slept = [], []

    async def main(looks, seconds):
        server = protocol.Server(uvicorn.Config(None, log_config=None))
        server.server_state.connections = {Connection(n) for n in looks}
        loop, now = asyncio.get_running_loop(), [0.0]
        monkeypatch.setattr(loop, "time", lambda: now[0], raising=False)

        async def sleep(seconds):
            slept.append(seconds)
            now[0] += seconds

        monkeypatch.setattr("pyggml_spec.server.protocol.asyncio.sleep", sleep)
        return await server.read_out(seconds)

    assert asyncio.run(main([3, 0, 5], 2.0)) == 0 and not cut and len(slept) == 5
    slept.clear()
    assert asyncio.run(main([10**9, 2], 0.5)) == 1 and len(cut) == 1 and 0.45 < sum(slept) < 0.6


def test_help_and_the_outside_check():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules.update(dict.fromkeys(['uvicorn', 'msgspec', 'starlette', 'prometheus_client', 'anyio']))\nfrom pyggml_spec.cli import main; main(['serve', '--help'])"],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0 and "--queue" in done.stdout, done.stderr
    told = json.loads((Path(__file__).parent / "llama_server_tests.json").read_text("utf-8"))
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    passing = [case for case, how in told["cases"].items() if how == "passes"]
    every = sum(told["llama-server"].values())
    assert len(told["cases"]) == told["llama-server"]["passed"]
    assert f"llama-server passes {len(told['cases'])}\nof {every} " in page
    assert f"passes {len(passing)} of these {len(told['cases'])}, and\nthe {len(told['cases']) - len(passing)} others" in page
    assert all(len(how) > 15 for how in told["cases"].values() if how != "passes")
