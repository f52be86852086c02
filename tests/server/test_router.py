"""Several models at one address: names, loading and leaving, limits, and what a lost process leaves behind."""

import asyncio
import json
import os
import signal
from pathlib import Path

import click
import httpx
import pytest
import scripted
from cli.process import one_sentence, pyspec
from server.running import Running, events, wait_for

from pyggml_spec.cli.main import cli
from pyggml_spec.cli.presets import model_specs

pytestmark = pytest.mark.slow
TEXTS = {
    "first": "The first model says these chosen words, and then it ends.",
    "second": "Other words come from the second one: nobody mixes them up!",
}
PRESET = """
["*"]
ctx-size = 512
slots = 2
prefix-memory = 0

[first]
model = "first.gguf"
alias = ["gpt-4o-mini", "one"]

[second]
model = "second.gguf"
sleep-idle-seconds = 1
"""
FOR_ONE = 4  # MiB: each of the two takes 2.5
AT_ONCE = "import pyggml_spec.server.router as router; router.PATIENCE = router.COMMENT_SECONDS = 0.05"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    for name, text in TEXTS.items():
        scripted.write(made / f"{name}.gguf", [text], None)
    (made / "preset.toml").write_text(PRESET)
    return made


@pytest.fixture(scope="module")
def router(folder):
    with Running("--models-preset", folder / "preset.toml", before=AT_ONCE) as running:
        yield running


def chat(model: str, **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "Say it"}], "temperature": 0, **more}


def said(response: httpx.Response) -> str:
    return "".join(json.loads(e)["choices"][0]["delta"].get("content") or "" for e in events(response)[:-1])


def states(running: Running) -> dict[str, str]:
    return {entry["id"]: entry["status"]["value"] for entry in running.http.get("/v1/models").json()["data"]}


def listed(running: Running, name: str) -> dict:
    return next(entry for entry in running.http.get("/v1/models").json()["data"] if entry["id"] == name)


def processes(running: Running) -> list[int]:
    pid = running.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_first_request_loads_a_model_and_its_stream_says_so(router):
    assert states(router) == {"first": "sleeping", "second": "sleeping"}
    assert router.http.get("/props").json()["is_sleeping"] and router.http.get("/slots").status_code == 503
    response = router.post("/v1/chat/completions", **chat("gpt-4o-mini", stream=True))
    assert response.status_code == 200 and response.text.startswith(": first: ") and said(response) == TEXTS["first"]
    entry = listed(router, "first")
    assert entry["status"]["value"] == "loaded" and entry["aliases"] == ["first", "gpt-4o-mini", "one"] and entry["meta"]["drafter"] is None
    assert entry["meta"]["n_ctx"] == 512 and entry["pyspec"]["planned_bytes"] > entry["meta"]["size"] and entry["pyspec"]["loads"] == 1
    for name in ("any", "first:latest", "one", ""):  # the loaded one
        assert router.ok("/v1/chat/completions", **chat(name))["model"] == "first"
    assert router.http.get("/props").json()["model_alias"] == "first" and len(router.http.get("/slots").json()) == 2
    assert router.metric('pyspec:model_loads_total{model="first"} ') == 1 and "llamacpp:" in router.http.get("/metrics?model=first").text


def test_an_idle_model_is_unloaded_and_loaded_again(router):
    answer = router.ok("/v1/messages", **chat("second", max_tokens=50))
    assert answer["content"][0]["text"] == TEXTS["second"] and states(router)["second"] == "loaded"
    wait_for(lambda: states(router)["second"] == "sleeping")
    assert router.post("/models/load", model="second").json() == {"success": True} and states(router)["second"] == "loaded"
    assert router.post("/models/unload", model="second").json() == {"success": True} and states(router)["second"] == "sleeping"


def test_keep_alive_counts_until_the_next_request(router):
    for body in ({"prompt": "x", "stream": False}, {}):
        router.ok("/v1/chat/completions", **chat("first"))
        assert listed(router, "first")["pyspec"]["idle_seconds"] is None
        router.ok("/api/generate", model="first", keep_alive=0, **body)
        wait_for(lambda: states(router)["first"] == "sleeping")
    assert router.ok("/api/chat", model="first", keep_alive=0)["done_reason"] == "unload" and states(router)["first"] == "sleeping"
    assert (
        router.ok("/api/chat", model="first", keep_alive="5m")["done_reason"] == "load"
        and listed(router, "first")["pyspec"]["idle_seconds"] == 300
    )
    router.post("/models/unload", model="first")
    assert not any("was ended by SIGTERM" in line for line in router.lines)


def test_errors_name_the_models_and_keep_each_dialect(router):
    unknown = router.post("/v1/chat/completions", **chat("third"))
    assert (
        unknown.status_code == 404 and "there are first, second; 'any' is the one that was used last" in unknown.json()["error"]["message"]
    )
    assert router.post("/v1/messages", **chat("third")).json()["type"] == "error"
    assert router.post("/v1/chat/completions", model=3).json()["error"]["param"] == "model"
    wrong = router.post("/v1/chat/completions", **chat("first", top_p=7))
    assert wrong.status_code == 400 and "top_p" in wrong.json()["error"]["message"]
    ignored = router.post("/v1/chat/completions", **chat("first", tempratur=1))
    assert ignored.headers["x-pyspec-ignored"] == "tempratur" and ignored.headers["server"] == "pyspec"
    wait_for(lambda: states(router)["second"] == "sleeping")
    late = router.post("/v1/messages", **chat("second", stream=True, top_p=7))  # its status had been sent when that was found
    assert late.status_code == 200 and json.loads(events(late)[-1])["error"]["message"].startswith("top_p") and "event: error" in late.text


def test_a_killed_process_ends_its_streams_with_an_error_and_the_next_request_works(router):
    router.ok("/v1/chat/completions", **chat("first"))
    wait_for(lambda: states(router)["second"] == "sleeping")
    for path, last in (("/v1/chat/completions", lambda e: e["error"]["code"] == 503), ("/v1/messages", lambda e: e["type"] == "error")):
        for _ in range(5):  # so small a model may have ended before the signal comes
            process = listed(router, "first")["pyspec"]["pid"]
            with router.http.stream("POST", path, json=chat("first", stream=True, ignore_eos=True, max_tokens=400)) as response:
                lines = response.iter_lines()
                while not next(lines).startswith("data: "):
                    pass
                os.kill(process, signal.SIGKILL)
                data = [line for line in lines if line.startswith("data: ")]
            if not any(end in data[-1] for end in ("[DONE]", "message_stop")):
                break
            wait_for(lambda: not os.path.exists(f"/proc/{process}"))
            router.ok("/v1/chat/completions", **chat("first"))
        assert router.ok("/v1/chat/completions", **chat("first"))["choices"][0]["message"]["content"] == TEXTS["first"]
        assert last(json.loads(data[-1].removeprefix("data: ")))
    assert any("was ended by SIGKILL" in line for line in router.lines)


def test_two_models_in_memory_for_one_lose_no_request(folder):
    """Four clients whose requests alternate, some as streams: each gets its model's text, and never are both loaded."""
    with Running("--models-preset", folder / "preset.toml", "--models-memory", FOR_ONE) as running:
        both = []

        async def client(number: int) -> None:
            async with httpx.AsyncClient(base_url=running.url, timeout=120) as http:
                for i in range(2):
                    name, stream = ("first", "second")[(i + number) % 2], (i + number) % 3 == 0
                    response = await http.post("/v1/chat/completions", json=chat(name, stream=stream))
                    text = said(response) if stream else response.json()["choices"][0]["message"]["content"]
                    assert (response.status_code, text) == (200, TEXTS[name]), response.text
                    entries = (await http.get("/v1/models")).json()["data"]
                    both.append(sum(entry["status"]["value"] == "loaded" for entry in entries))

        async def clients() -> None:
            await asyncio.gather(*map(client, range(4)))

        asyncio.run(clients())
        assert max(both) == 1
        assert sum(entry["pyspec"]["loads"] for entry in running.http.get("/v1/models").json()["data"]) >= 3


def test_what_never_fits_is_refused_with_its_plan(folder):
    with Running("--models-dir", folder, "--models-memory", 1, "--slots", 1, "-c", 512) as running:
        refused = running.post("/v1/chat/completions", **chat("first"))
        assert refused.status_code == 500 and refused.headers["x-should-retry"] == "false"
        assert "first needs" in (text := refused.json()["error"]["message"]) and "1 MiB are free" in text and "a smaller context" in text
        (folder / "broken.gguf").write_bytes(b"GGUF but not really")
        broken = running.post("/v1/chat/completions", **chat("broken"))  # it came after the start
        assert broken.status_code == 500 and "broken.gguf" in broken.json()["error"]["message"]
        (folder / "broken.gguf").unlink()
        assert [entry["id"] for entry in running.http.get("/v1/models").json()["data"]] == ["first", "second"]


def test_keys_and_limits_hold_at_the_router_and_killed_it_leaves_no_process(folder):
    running = Running("--models-dir", folder, "-c", 512, "--slots", 1, "--api-key", "mine,yours", "--max-body", 1)
    try:
        assert running.post("/v1/chat/completions", **chat("first")).status_code == 401
        spoof = running.http.post("/v1/chat/completions", json=chat("first"), headers={"x-pyspec-key": "key-1"})
        assert spoof.status_code == 401 and "Invalid API Key" in spoof.text and states(running)["first"] == "sleeping"
        foreign = {"authorization": "Bearer mine", "origin": "https://evil.example"}
        assert running.http.post("/v1/chat/completions", json=chat("first"), headers=foreign).status_code == 403
        long = {"model": "first", "prompt": "a" * (1 << 20)}
        assert running.http.post("/v1/completions", json=long, headers={"authorization": "Bearer mine"}).status_code == 413
        prompt = {"model": "first", "prompt": list(range(40, 240)), "max_tokens": 1, "return_tokens": True}
        cached = {}
        for key in ("mine", "mine", "yours"):  # prefixes belong to keys here as well
            answer = running.http.post("/completion", json=prompt, headers={"authorization": f"Bearer {key}"})
            cached.setdefault(key, []).append(answer.json()["timings"]["cache_n"])
        assert cached["mine"][1] > 0 and cached["yours"] == [0]
        left = processes(running)
    finally:
        running.end(signal.SIGKILL)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left), 20)


def test_a_single_model_sleeps_and_wakes(folder):
    with Running("-m", folder / "first.gguf", "--sleep-idle-seconds", "0.5", "-c", 512, "--slots", 1, "-a", "solo") as running:
        assert running.ok("/v1/chat/completions", **chat("solo"))["choices"][0]["message"]["content"] == TEXTS["first"]
        wait_for(lambda: states(running)["solo"] == "sleeping")
        running.ok("/v1/chat/completions", **chat(""))


def test_the_next_model_has_a_process_before_it_is_asked_for_and_a_stream_ends_before_the_router(folder):
    with Running("--models-dir", folder, "-c", 2048, "--slots", 1) as running:
        for name in ("first", "second"):
            wait_for(lambda: [pid for pid in processes(running) if pid not in (listed(running, n)["pyspec"]["pid"] for n in TEXTS)])
            waiting = processes(running)
            assert running.ok("/v1/chat/completions", **chat(name))["choices"][0]["message"]["content"] == TEXTS[name]
            assert listed(running, name)["pyspec"]["pid"] in waiting
        os.kill(listed(running, "first")["pyspec"]["pid"], signal.SIGKILL)
        wait_for(lambda: states(running)["first"] == "sleeping")
        (spare,) = wait_for(lambda: [pid for pid in processes(running) if pid != listed(running, "second")["pyspec"]["pid"]])
        os.kill(spare, signal.SIGKILL)
        wait_for(lambda: not os.path.exists(f"/proc/{spare}"))  # another one is started for the request
        assert running.ok("/v1/chat/completions", **chat("first"))["choices"][0]["message"]["content"] == TEXTS["first"]
        left = processes(running)
        with running.http.stream(
            "POST", "/v1/chat/completions", json=chat("first", stream=True, ignore_eos=True, max_tokens=1500)
        ) as response:
            lines = response.iter_lines()
            while not next(lines).startswith("data: "):
                pass
            running.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert running.process.wait(30) == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in left)


@pytest.mark.parametrize("preset, words", [
    ("[a]\nmodel = 'none.gguf'", ["[a] of", "none.gguf, which is not there"]),
    ("[a]\nctx-size = 5", ["[a] of", "names no model"]),
    ("[a]\nmodel = 'first.gguf'\nctx-sise = 5", ["ctx-sise, which is no option", "ctx-size"]),
    ("[a]\nmodel = 'first.gguf'\nctx-size = 'x'", ["[a] of", "'x' is not a valid integer"]),
    ("[a]\nmodel = 'first.gguf'\nport = 5", ["port, which is the server's"]),
    ("[a]\nmodel = 'first.gguf'\nalias = 'b'\n[b]\nmodel = 'first.gguf'", ["the name 'b' twice"]),
    ("[a]\nmodel = 'first.gguf'\npinned = 1", ["pinned = 1", "true or false"]),
    ("a = 5", ["no table of models"]), ("[a", ["is no TOML"]),
])  # fmt: skip
def test_a_wrong_preset_is_one_sentence(folder, tmp_path, preset, words):
    (tmp_path / "first.gguf").symlink_to(folder / "first.gguf")
    (tmp_path / "preset.toml").write_text(preset)
    one_sentence(pyspec("serve", "--models-preset", tmp_path / "preset.toml", "--port", 0), *words)


@pytest.mark.parametrize("options, words", [
    (["-m", "none.gguf", "--sleep-idle-seconds", "5"], ["none.gguf does not exist"]),
    (["-m", "first.gguf", "-md", "none.gguf", "--sleep-idle-seconds", "5"], ["none.gguf does not exist"]),
])  # fmt: skip
def test_a_file_that_is_not_there_is_missed_at_the_start(folder, options, words):
    one_sentence(pyspec("serve", "--port", 0, *(str(folder / o) if o.endswith(".gguf") else o for o in options)), *words)


def test_a_drafter_for_several_models_is_refused(folder):
    done = pyspec("serve", "--port", 0, "--models-dir", folder, "-md", folder / "first.gguf")
    assert done.returncode == 2 and "name it in the file of --models-preset" in done.stderr


def test_options_reach_the_processes_of_their_models(folder):
    """Those of the command line all of them, those of a preset its model, over the others; the server's own none."""
    (folder / "preset.json").write_text(
        json.dumps({"*": {"temp": 0.5}, "a": {"model": "first.gguf", "temp": 0.1, "no-slots": True, "jinja": False}})
    )
    command = cli.get_command(click.Context(cli), "serve")
    given = [
        "--models-preset",
        str(folder / "preset.json"),
        "--models-dir",
        str(folder),
        "--port",
        "7",
        "-t",
        "3",
        "--no-metrics",
        "--logit-bias",
        "5+1",
        "--logit-bias",
        "6-1",
    ]
    context = command.make_context("serve", [*given])
    specs = {spec.name: spec for spec in model_specs(command, context.params, context.meta["arguments"])()}
    assert list(specs) == ["a", "second"]  # the file of the first one has a name already
    parsed = {name: command.make_context("serve", [*spec.arguments]).params for name, spec in specs.items()}
    assert [p["threads"] for p in parsed.values()] == [3, 3] and not any(p["metrics"] for p in parsed.values())
    assert parsed["a"]["temperature"] == 0.1 and parsed["a"]["show_slots"] is False and parsed["a"]["port"] == 8080
    assert parsed["a"]["logit_bias"] == ("5+1", "6-1") and parsed["second"]["target"] == str(folder / "second.gguf")
    (folder / "preset.json").unlink()
