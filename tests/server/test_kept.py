"""What a server keeps for later: of an answer for the next turn, of a prompt for its other answers, of both for the next start, however it ended."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from server.running import Running, wait_for

pytestmark = pytest.mark.slow

PROMPT = "def quicksort(items):\n    " + "# sorts a list of items in place\n    " * 12


def ask(prompt, tokens=60, **more):
    return {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, **more}


def test_the_next_turn_computes_what_is_new(server):
    """The embedded target is a hybrid. The text is that without reuse (its drafts: test_prefix_ends.py)."""
    first = server.ok("/completion", **ask(PROMPT), return_tokens=True)
    ids = server.ok("/tokenize", content=PROMPT)["tokens"]
    turn = [*ids, *first["tokens"], *server.ok("/tokenize", content="\n\ndef merge(a, b):\n")["tokens"]]
    second = server.ok("/completion", **ask(turn))
    assert second["timings"]["cache_n"] == len(ids) + 59
    whole = server.ok("/completion", **ask(turn), cache_prompt=False)
    assert whole["timings"]["cache_n"] == 0 and whole["content"] == second["content"]


def test_a_conversation(server):
    """Through the chat template: what the assistant said comes back as text, and is mostly the same tokens."""
    messages = [{"role": "user", "content": PROMPT}]
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    first = server.ok("/v1/chat/completions", messages=messages, **body)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and now merge sort"}]
    second = server.ok("/v1/chat/completions", messages=messages, **body)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 10


def test_several_answers_compute_the_prompt_once(server):
    """4 answers to one prompt: one of them reads it, the others its last token; greedy ones are the same, seeds give different ones."""
    before = server.metric("llamacpp:prompt_tokens_total")
    body = {"prompt": "# many\n" + PROMPT, "max_tokens": 30, "n": 4, "temperature": 0, "ignore_eos": True}
    choices = server.ok("/v1/completions", **body)["choices"]
    assert len({c["text"] for c in choices}) == 1
    n = len(server.ok("/tokenize", content=body["prompt"])["tokens"])
    assert server.metric("llamacpp:prompt_tokens_total") - before == n + 3
    different = server.ok("/v1/completions", **{**body, "temperature": 1.5, "seed": 1, "max_tokens": 20})["choices"]
    assert len({c["text"] for c in different}) > 1


def test_after_kill_9_a_restart_goes_on_with_what_was_written(tmp_path):
    """Killed while it decodes: what is there afterwards is whole, and used; parts of files are not read."""
    options = ("--slots", 2, "--prefix-cache", tmp_path / "kept")
    running = Running(*options)
    try:
        first = running.ok("/completion", **ask(PROMPT), return_tokens=True)
        ids = running.ok("/tokenize", content=PROMPT)["tokens"]
        turn = [*ids, *first["tokens"], *ids[:40]]
        want = running.ok("/completion", **ask(turn), cache_prompt=False)["content"]
        wait_for(lambda: any(path.suffix == ".state" for path in (tmp_path / "kept").iterdir()))
        with running.http.stream("POST", "/completion", json=ask("import os\n" * 60, 2000, stream=True)) as stream:
            next(stream.iter_lines())
            running.process.send_signal(signal.SIGKILL)
            running.process.wait(60)
    except Exception as error:  # the stream breaks off, which is what is tested
        assert running.process.wait(60) is not None, error
    finally:
        running.end(signal.SIGKILL)
    state = max((tmp_path / "kept").glob("*.state"), key=lambda path: path.stat().st_mtime)
    half = tmp_path / "kept" / f"{state.name}.0123456789abcdef.part"  # as a writer that was killed leaves it
    half.write_bytes(state.read_bytes()[:5000])
    with Running(*options) as again:
        second = again.ok("/completion", **ask(turn))
        assert second["timings"]["cache_n"] >= 128 and second["content"] == want
        assert not any("cut short" in line for line in again.lines)


def test_a_folder_without_memory_is_refused(tmp_path):
    from cli.process import pyspec

    done = pyspec("serve", "--device", "CPU", "-t", 1, "--port", 0, "--prefix-cache", tmp_path, "--prefix-memory", 0)
    assert done.returncode == 1 and "filled from memory" in done.stderr


def _reused(running, key, prompt="# first\n" + PROMPT * 4):
    response = running.http.post("/completion", json=ask(prompt, 4), headers={"x-api-key": key})
    assert response.status_code == 200, response.text
    return response.json()["timings"]["cache_n"]


@pytest.mark.parametrize("shares", [False, True])
def test_a_key_is_not_told_what_another_one_asked(tmp_path, shares):
    """`cache_n`, and the time that a prompt took, said whether some other key had sent the same: from memory, from files, and while both waited."""
    options = [
        "--slots",
        2,
        "--prefix-cache",
        tmp_path / "kept",
        "--api-key",
        "first,second,third",
        *(["--share-prefixes"] if shares else []),
    ]
    with Running(*options) as running:
        assert _reused(running, "first") == 0 and _reused(running, "first") > 100
        assert (_reused(running, "second") > 0) == shares
        assert _reused(running, "second") > 100
        with ThreadPoolExecutor(2) as both:  # the second of two with the same prompt would wait for what the first one computes
            told = list(both.map(lambda key: _reused(running, key, "# together\n" + PROMPT * 4), ("first", "second")))
        assert min(told) == 0 and (max(told) > 0) == shares
    with Running(*options) as running:
        assert (_reused(running, "third") > 0) == shares and _reused(running, "first") > 100
