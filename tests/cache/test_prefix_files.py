"""The prefix cache's files: they outlive the process, and a file that is not what it should be costs nothing but its use."""

import hashlib
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from cache.test_prefix import CHUNK, answer, assert_same, tokens
from random_gguf.archs import WRITERS
from random_gguf.model import Shape
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.cache import prefix_files
from pyggml_spec.cache.prefix import PrefixCache
from pyggml_spec.cache.prefix_files import HEADER, PrefixFiles, Refused
from pyggml_spec.errors import PyspecError
from pyggml_spec.files import new_file

PROMPT = tokens(50, 10 * CHUNK + 5)
KEY = bytes(range(32))
MANY = 1 << 30


@pytest.fixture(scope="module")
def engine(pair):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=512, draft_width=8, chunk=CHUNK) as session:
        yield session.runner


@pytest.fixture(scope="module")
def want(engine):
    return answer(engine, PROMPT)


def cached(engine, folder, prompt=PROMPT, layout="model: one", budget=MANY, memory=MANY):
    """One request of a new process; the sentences that it had to say."""
    files = PrefixFiles(folder, layout, budget)
    cache = PrefixCache(engine, memory, files)
    reuse = cache.begin(prompt)
    notes = files.notes + reuse.notes
    cache.close()
    cache = PrefixCache(engine, memory, files)
    run = answer(engine, prompt, cache)
    notes += cache.notes
    cache.close()
    return run, notes


def test_a_second_process_goes_on_where_the_first_one_was(engine, want, tmp_path):
    first, notes = cached(engine, tmp_path)
    assert first.reused == 0 and not notes
    names = sorted(name.rsplit(".", 1)[1] for name in os.listdir(tmp_path))
    assert names == ["rows"] * 10 + ["state"] * 4  # after 4, 8, and the last two chunks
    second, notes = cached(engine, tmp_path)
    assert second.where == {"in place": 0, "memory": 0, "disk": 10} and not notes
    assert_same(first, want), assert_same(second, want)
    longer = PROMPT[: 9 * CHUNK + 3] + tokens(51, 80)
    third, _ = cached(engine, tmp_path, longer)
    assert third.reused == 9 * CHUNK
    assert_same(third, answer(engine, longer))


def damage(path, how):
    contents = path.read_bytes()
    if how == "cut in the header":
        path.write_bytes(contents[:100])
    elif how == "cut":
        path.write_bytes(contents[:-1])
    elif how == "longer":
        path.write_bytes(contents + b"\0" * 4096)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "zeros":
        path.write_bytes(bytes(len(contents)))
    elif how == "folder":
        path.unlink(), path.mkdir()
    elif how == "pipe":
        path.unlink(), os.mkfifo(path)
    else:
        at = {"header bit": 50, "words bit": 200, "first bit": HEADER, "last bit": len(contents) - 1, "version": 8, "size": 84}[how]
        path.write_bytes(contents[:at] + bytes([contents[at] ^ 0x10]) + contents[at + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "state"])
@pytest.mark.parametrize("how", [
    "cut in the header", "cut", "longer", "empty", "zeros", "folder", "pipe", "header bit", "words bit", "first bit", "last bit",
    "version", "size",
])  # fmt: skip
def test_a_damaged_file_is_refused_with_a_sentence_and_the_request_completes(engine, want, tmp_path, kind, how):
    cached(engine, tmp_path)
    files = PrefixFiles(tmp_path, "model: one", MANY)
    cache = PrefixCache(engine, MANY, files)
    key = cache.keys_of(np.asarray(PROMPT), True)[9 if kind == "state" else 8]
    damage(files.path_of(key, kind), how)
    reuse = cache.begin(PROMPT)
    assert reuse.tokens == (9 if kind == "state" else 8) * CHUNK
    assert len(reuse.notes) == 1 and str(tmp_path) in reuse.notes[0] and "is computed" in reuse.notes[0]
    run = answer(engine, PROMPT, cache)
    assert_same(run, want)
    cache.close()
    if how != "folder":  # a good file has taken its place
        again, notes = cached(engine, tmp_path)
        assert again.reused == 10 * CHUNK and not notes
        assert_same(again, want)


@pytest.mark.slow
def test_random_bit_flips_never_change_the_answer(engine, want, tmp_path):
    cached(engine, tmp_path)
    paths, rng = sorted(tmp_path.iterdir()), np.random.default_rng(0)
    for _ in range(8):
        path = paths[rng.integers(len(paths))]
        contents = bytearray(path.read_bytes())
        contents[rng.integers(len(contents))] ^= 1 << int(rng.integers(8))
        path.write_bytes(contents)
        run, notes = cached(engine, tmp_path)
        assert_same(run, want)
        assert len(notes) == 1 or (path.suffix == ".state" and not notes)  # only the deepest state is read


def test_files_of_another_model_or_name(engine, want, tmp_path):
    cached(engine, tmp_path)
    run, notes = cached(engine, tmp_path, layout="model: two")
    assert run.reused == 0 and len(notes) == 1 and "'model: one' there, 'model: two' here" in notes[0]
    assert_same(run, want)
    for name in os.listdir(tmp_path):  # renamed so that they seem to fit
        digest = PrefixFiles(tmp_path, "model: three", MANY).name_prefix
        os.rename(tmp_path / name, tmp_path / (digest + name[16:]))
    files = PrefixFiles(tmp_path, "model: three", MANY)
    name = next(name for name in os.listdir(tmp_path) if name.endswith(".rows"))
    with pytest.raises(Refused, match="another prefix|another model or layout"):
        files.read(open(tmp_path / name, "rb"), tmp_path / name, KEY, "rows", 1)
    files = PrefixFiles(tmp_path, "model: one", MANY)
    files.store(KEY, "rows", np.arange(10, dtype=np.uint8))
    os.rename(files.path_of(KEY, "rows"), files.path_of(KEY[::-1], "rows"))
    fails_with(Refused, "another prefix", files.load, KEY[::-1], "rows", 10)
    assert not files.has(KEY[::-1], "rows")


def test_files_of_the_disk_that_lie_or_are_in_the_way(tmp_path):
    files = PrefixFiles(tmp_path, "model: one", MANY)
    files.store(KEY, "rows", np.arange(10, dtype=np.uint8))
    path = files.path_of(KEY, "rows")
    header = bytearray(path.read_bytes()[:HEADER])
    header[84:92] = (1 << 60).to_bytes(8, "little")
    header[-32:] = hashlib.sha256(header[:-32]).digest()
    path.write_bytes(header)
    os.truncate(path, 1 << 40)
    fails_with(Refused, f"has {1 << 40} bytes instead of {HEADER + 10}", files.load, KEY, "rows", 10)
    assert not files.has(KEY, "rows")
    (tmp_path / "f").write_text("")
    fails_with(PyspecError, "cannot be opened", PrefixFiles, tmp_path / "f", "", MANY)


def test_the_disk_budget_deletes_what_was_not_used_for_longest(tmp_path):
    size = HEADER + 1000
    files, keys = PrefixFiles(tmp_path, "model: one", 3 * size), [bytes([i]) * 32 for i in range(4)]
    for i, key in enumerate(keys):
        files.store(key, "rows", np.zeros(1000, np.uint8))
        os.utime(files.path_of(key, "rows"), (i, i))
    files.load(keys[0], "rows", 1000)
    (tmp_path / "another file").write_text("x" * 10000)
    files.trim()
    assert [files.has(key, "rows") for key in keys] == [True, False, True, True] and (tmp_path / "another file").exists()


def test_a_folder_that_cannot_be_written_costs_a_sentence(engine, want, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyggml_spec.files.os.replace", full)
    run, notes = cached(engine, tmp_path)
    assert_same(run, want)
    assert "No space left on device" in notes[0] and not os.listdir(tmp_path)


def test_a_session_says_at_once_what_could_not_be_written(pair, tmp_path, monkeypatch):
    """It was a note of the next generation: a run on a full disk or a read-only folder ended without a word."""

    def full(*args):
        raise OSError(28, "No space left on device")

    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4, chunk=16, prefix_cache=tmp_path) as session:
        monkeypatch.setattr("pyggml_spec.files.os.replace", full)
        notes = session.generate(list(range(40)), 4)[1].notes
        assert len(notes) == 1 and "No space left on device; the text is not affected" in notes[0]
        monkeypatch.undo()
        assert session.generate(list(range(50)), 4)[1].notes == [] and os.listdir(tmp_path)


WRITER = """
import sys, numpy as np
from pyggml_spec.cache.prefix_files import PrefixFiles
files = PrefixFiles(sys.argv[1], "model: one", 1 << 40)
payload = np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8)
print("ready", flush=True)
for i in range(1000):
    files.store(i.to_bytes(32, "little"), "rows", payload)
"""


@pytest.mark.slow
def test_kill_9_while_writing_leaves_no_broken_entry(tmp_path):
    """Killed at five moments: every entry that is there is whole, and what was half written is swept away an hour later."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        files = PrefixFiles(tmp_path, "model: one", MANY)
        entries = [path for path, _ in files.entries()]
        for i in range(len(entries)):
            assert files.load(i.to_bytes(32, "little"), "rows", 8 << 20).nbytes == 8 << 20
            files.path_of(i.to_bytes(32, "little"), "rows").unlink()
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    PrefixFiles(tmp_path, "model: one", MANY)
    assert not os.listdir(tmp_path)


def test_a_part_file_that_is_renamed_during_listing(tmp_path, monkeypatch):
    """Another process renames it: the model could not be loaded."""
    part = tmp_path / f".{'0' * 16}-{'0' * 48}.rows.1.part"
    part.touch()
    monkeypatch.setattr(prefix_files, "PART_NAME", SimpleNamespace(fullmatch=lambda name: part.unlink() or True))
    assert PrefixFiles(tmp_path, "model: one", MANY).notes == []


@pytest.fixture
def open_umask():
    old = os.umask(0)
    yield
    os.umask(old)


def test_files_are_the_users_alone(tmp_path, open_umask):
    """Rows are what a prompt becomes: they were readable for everybody, as the umask had it."""
    files = PrefixFiles(tmp_path / "a" / "b", "model: one", MANY)
    files.store(KEY, "rows", np.zeros(10, np.uint8))
    assert stat.S_IMODE(os.stat(tmp_path / "a" / "b").st_mode) == 0o700 and files.notes == []
    assert [stat.S_IMODE(path.stat().st_mode) for path in files.folder.iterdir()] == [0o600]
    files = PrefixFiles(tmp_path, "model: one", MANY)
    files.store(KEY, "rows", np.zeros(10, np.uint8))
    files.path_of(KEY, "rows").chmod(0o644)
    tmp_path.chmod(0o755)
    notes = PrefixFiles(tmp_path, "model: one", MANY).notes
    assert len(notes) == 1 and "others can list" in notes[0] and "chmod 700" in notes[0]
    assert stat.S_IMODE(files.path_of(KEY, "rows").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path, mode):
    """They could put rows there that this model goes on with."""
    tmp_path.chmod(mode)
    fails_with(PyspecError, "can be written by others, who could put rows.*chmod go-w", PrefixFiles, tmp_path, "model: one", MANY)
    tmp_path.chmod(0o700)


def test_what_belongs_to_another_user_is_not_used(tmp_path, monkeypatch):
    files = PrefixFiles(tmp_path, "model: one", MANY)
    files.store(KEY, "rows", np.zeros(10, np.uint8))
    monkeypatch.setattr("pyggml_spec.files.os.geteuid", lambda: os.getuid() + 1)
    fails_with(PyspecError, "belongs to the user", PrefixFiles, tmp_path, "model: one", MANY)
    fails_with(Refused, "belongs to the user", files.load, KEY, "rows", 10)


def test_an_entry_that_is_a_link_or_that_others_can_write_is_refused(tmp_path):
    for how in ("link", "open"):
        files = PrefixFiles(tmp_path / how, "model: one", MANY)
        files.store(KEY, "rows", np.zeros(10, np.uint8))
        path = files.path_of(KEY, "rows")
        if how == "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        else:
            path.chmod(0o666)
        fails_with(Refused, "cannot be read|can be written by others", files.load, KEY, "rows", 10)


def test_part_files_have_random_names_and_follow_no_link(tmp_path, monkeypatch):
    """They were called by the process id: a link of that name, made beforehand, was written through."""
    with ExitStack() as stack:
        names = {stack.enter_context(new_file(tmp_path))[0] for _ in range(20)}
        assert len(names) == 20 and all(len(name.name) > 32 and name.exists() for name in names)
        assert all(prefix_files.PART_NAME.fullmatch(name.name) for name in names)
    assert not any(name.exists() for name in names)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    files = PrefixFiles(tmp_path / "p", "model: one", MANY)
    monkeypatch.setattr("pyggml_spec.files.secrets.token_hex", lambda n: "0" * 2 * n)
    (tmp_path / "p" / f".pyspec-{'0' * 32}.part").symlink_to(victim)
    fails_with(Refused, "cannot be written", lambda: files.store(KEY, "rows", np.zeros(10, np.uint8)))
    assert victim.read_text() == "mine" and not files.has(KEY, "rows")


@pytest.mark.parametrize("slots", [1, 2])
def test_a_model_whose_layers_all_have_windows_keeps_states_alone(tmp_path, slots):
    """Its chunks have no rows: what was read of them had one part too many."""
    path, prompt = WRITERS["gemma3"](tmp_path / "t.gguf", Shape(target_window=12)), tokens(3, 300)
    for reused in (0, 256):
        with ps.load(path, device="CPU", threads=1, n_ctx=512, chunk=32, prefix_cache=tmp_path / "kept") as session:
            assert session.runner.kv.ring and all(session.runner.kv.in_ring)
            if slots == 1:
                text, stats = session.generate(prompt, 8, ignore_end=True)
            else:
                with session.concurrent(slots, prefix_cache=tmp_path / "kept") as server:
                    text, stats = server.submit(prompt, 8, ignore_end=True).result()
            assert stats.reused_tokens >= reused
            assert text == session.generate(prompt, 8, ignore_end=True, mode="plain")[0]


def test_a_folder_that_cannot_be_looked_into_costs_one_sentence(pair, tmp_path, monkeypatch):
    """A mount that is gone: every request that shared the steps ended, and the session could not be closed."""
    prompts, real = [list(range(40)), list(range(50, 90))], os.stat

    def gone(path, *args, **more):
        if str(path).endswith((".rows", ".state")):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **more)

    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4, chunk=16, prefix_cache=tmp_path) as session:
        alone = [session.generate(prompt, 8)[0] for prompt in prompts]
        with session.concurrent(slots=2) as server:
            monkeypatch.setattr("pyggml_spec.cache.prefix_files.os.stat", gone)
            handles = [server.submit(prompt, 8) for prompt in prompts]
            assert [handle.result()[0] for handle in handles] == alone
        stats = [*(handle.stats for handle in handles), session.generate(prompts[0], 8)[1]]
        assert sum("cannot be looked into: Permission denied; prompts are" in note for s in stats for note in s.notes) == 1


def test_a_session_is_freed_whatever_one_of_its_parts_raises(pair, tmp_path, monkeypatch):
    def fails(self, *args):
        raise OSError(5, "Input/output error")

    session = ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4, chunk=16, prefix_cache=tmp_path)
    session.generate(list(range(40)), 4)
    server = session.concurrent(slots=2)
    server.submit(list(range(40)), 4).result()
    monkeypatch.setattr(PrefixCache, "save", fails)
    engines = session.runner, server.engine.runner
    fails_with(OSError, "Input/output", session.close)
    assert [engine.graphs.closed for engine in engines] == [True, True] and not session._parts
