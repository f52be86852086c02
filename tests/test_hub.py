"""-hf and fetch: llama.cpp's names for files of the hub, fetched once, and every failure one sentence. The hub is a server of this test."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cli.process import one_sentence, pyspec
from gguf_io.build import split_gguf

from pyggml_spec.hub import _chosen

pytestmark = pytest.mark.slow
CPU = ["--device", "CPU", "-t", "1", "-c", "64", "-p", "abc", "-n", "4", "--draft-width", "4"]
FILES = ["README.md", "m-Q8_0.gguf", "m-q4_k_m.gguf", "sub/m-BF16.gguf", "mmproj-F16.gguf", "imatrix.gguf", "dflash-m-Q8_0.gguf",
         "m-Q6_K-00001-of-00002.gguf", "m-Q6_K-00002-of-00002.gguf"]  # fmt: skip


@pytest.fixture
def hub(pair, tmp_path_factory):
    target, drafter = (Path(path).read_bytes() for path in pair)
    split = {path.name: path.read_bytes() for path in split_gguf(pair[0], tmp_path_factory.mktemp("split"), 3)}
    models = {"t-F16.gguf": b"not chosen", "t-Q8_0.gguf": target, "mmproj-t-Q8_0.gguf": b"x", "dflash-t.gguf": drafter, "notes.txt": b"x"}
    others = {"parts": {FILES[-2]: b"x"}, "split": split, "miscounted": {"m-Q6_K-00001-of-00000.gguf": b"x"}, "none": {"a.txt": b""}}
    with closing(Hub({"Some/Target-GGUF": models, **{f"some/{name}": files for name, files in others.items()}})) as server:
        yield server


@pytest.fixture
def asked(hub, tmp_path, monkeypatch):
    """Runs a command whose hub is the server, with a cache of its own."""
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def run(*args, **more):
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        return pyspec(*args, env={**env, **more})

    return run


@pytest.mark.parametrize("quant, drafter, name", [
    (None, False, "m-q4_k_m.gguf"), ("q8_0", False, "m-Q8_0.gguf"), ("bf16", False, "sub/m-BF16.gguf"),
    ("Q6_K", False, "m-Q6_K-00001-of-00002.gguf"), ("F16", False, None), ("Q4_K", False, None), (None, True, "dflash-m-Q8_0.gguf"),
    ("Q4_K_M", True, None),
])  # fmt: skip
def test_which_file_a_name_means(quant, drafter, name):
    """As llama.cpp chooses: the quantisation in any case and whole, never a projector, an importance matrix or a drafter for a target."""
    assert _chosen(FILES, quant, drafter) == name


def test_which_drafter_and_which_quantisation():
    names = ["m-assistant-F16.gguf", "mtp-m-Q8_0.gguf", "m.EAGLE3.gguf", "dspark-m-Q8_0.gguf", "sub/M-DFlash2-F16.gguf", "m-F16.gguf"]
    for kind in ("sub/M-DFlash2-F16.gguf", "dspark-m-Q8_0.gguf", "m.EAGLE3.gguf", "mtp-m-Q8_0.gguf", "m-assistant-F16.gguf"):
        assert _chosen(names, None, True) == kind and _chosen(names, None, False) == "m-F16.gguf"
        names.remove(kind)
    assert _chosen(names, None, True) == "m-F16.gguf" and _chosen(["a-F16.gguf", "a-Q8_0.gguf"], None, False) == "a-Q8_0.gguf"
    assert _chosen(["mmproj-a.gguf", "a-Q5_1.gguf", "a-F16.gguf"], None, False) == "a-Q5_1.gguf"
    assert _chosen(["a-Q4_K_M.gguf"], None, True) == "a-Q4_K_M.gguf"  # a drafter's own repository
    assert _chosen(["mmproj-a.gguf"], None, False) is None
    whole = ["code-assistant-Q8_0.gguf", "code-assistant-Q4_K_M.gguf"]  # models that are called so
    assert _chosen(whole, None, False) == whole[1] and _chosen(whole, "Q8_0", False) == whole[0]


def test_a_pair_of_the_hub_runs_and_is_fetched_once(hub, asked, pair, tmp_path):
    named = ["-hf", "Some/Target-GGUF", "-hfd", "Some/Target-GGUF"]
    first, files = asked("run", *named, *CPU), asked("run", "-m", str(pair[0]), "-md", str(pair[1]), *CPU)
    assert first.returncode == 0 and first.stdout == files.stdout and "t-Q8_0.gguf" in first.stderr and "dflash-t.gguf" in first.stderr
    bodies = [line for line in hub.asked if line.startswith("GET") and "/resolve/" in line]
    assert sorted(line.rsplit("/")[-1] for line in bodies) == ["dflash-t.gguf", "t-Q8_0.gguf"]
    again = asked("run", *named, *CPU, "-q")
    assert again.stdout == first.stdout and again.stderr == ""
    assert [line for line in hub.asked if line.startswith("GET") and "/resolve/" in line] == bodies
    # without a connection, and where the hub is out of order, what is there is used
    offline = asked("run", *named, *CPU, "-q", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert offline.stdout == first.stdout and offline.stderr == ""
    hub.broken = True
    assert asked("run", *named, *CPU, "-q").stdout == first.stdout


def test_a_model_in_several_files_is_fetched_whole(hub, asked, pair):
    done, file = asked("run", "-hf", "some/split", *CPU[:-2]), asked("run", "-m", str(pair[0]), *CPU[:-2])
    assert done.returncode == 0 and done.stdout == file.stdout, done.stderr
    assert len({line for line in hub.asked if line.startswith("GET") and "/resolve/" in line}) == 3
    assert asked("run", "-hf", "some/split", *CPU[:-2], "-q", HF_HUB_OFFLINE="1").stdout == done.stdout


def test_the_python_api_fetches_too(asked, hub, tmp_path):
    script = (
        "import pyggml_spec as ps; seen = []\n"
        "path = ps.fetch('Some/Target-GGUF:q8_0', progress=lambda what, done, total: seen.append((what, done, total)))\n"
        "with ps.load(path, draft=ps.fetch('Some/Target-GGUF', file='dflash-t.gguf'), device='CPU', threads=1, n_ctx=64, draft_width=4) as s:\n"
        "    print(s.generate('abc', 4)[1].drafted > 0, seen[-1] == ('download', path.stat().st_size, path.stat().st_size))\n"
    )
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True True\n" and done.stderr == "", done.stderr


def test_a_closed_repository_an_absent_hub_and_an_absent_package(asked, hub, tmp_path):
    hub.closed.add("Some/Target-GGUF")
    assert "closed to you" in (done := asked("run", "-hf", "Some/Target-GGUF", *CPU)).stderr and done.returncode == 1
    away = asked("run", "-hf", "Some/Target-GGUF", *CPU, HF_ENDPOINT="http://127.0.0.1:9")
    assert away.returncode == 1 and "cannot be reached" in away.stderr and away.stderr.count("\n") == 1, away.stderr
    off = asked("run", "-hf", "Some/Target-GGUF", *CPU, HF_HUB_OFFLINE="1")
    assert "offline mode is on" in off.stderr and off.stderr.count("\n") == 1, off.stderr
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError")
    lacking = asked("run", "-hf", "Some/Target-GGUF", *CPU, PYTHONPATH=str(tmp_path))
    assert lacking.returncode == 1 and "pip install huggingface_hub" in lacking.stderr and lacking.stderr.count("\n") == 1
    assert asked("run", "-hf", "a/b", "-m", "c", *CPU).returncode == asked("run", "-hff", "b", *CPU).returncode == 2


@pytest.mark.parametrize("names, words", [
    (["-hf", "nobody/nothing"], ["nobody/nothing", "does not exist on the hub"]),
    (["-hf", "Some/Target-GGUF:Q2_K"], ["no GGUF of the quantisation Q2_K", "it has t-F16.gguf, t-Q8_0.gguf"]),
    (["-hf", "Some/Target-GGUF", "-hff", "x.gguf"], ["no file 'x.gguf'", "t-Q8_0.gguf"]),
    (["-hf", "some/parts:Q6_K"], ["one of 2 parts", "m-Q6_K-00002-of-00002.gguf is not there"]),
    (["-hf", "some/miscounted:Q6_K"], ["m-Q6_K-00001-of-00000.gguf", "is no part"]),
    (["-hf", "some/none"], ["no GGUF of a model"]),
    (["-hf", "a/b/c"], ["'a/b/c' names no repository", "USER/MODEL"]),
    (["-hf", "Some/Target-GGUF:F16"], ["t-F16.gguf", "not a GGUF"]),
])  # fmt: skip
def test_what_cannot_be_had_is_one_sentence(asked, names, words):
    done = asked("run", *names, *CPU)
    one_sentence(done, *words)


@pytest.mark.parametrize("settings, words", [
    ({"HF_ENDPOINT": "http://["}, "Invalid IPv6 URL"), ({"HF_ENDPOINT": "http://a\u007fb"}, ""), ({"HF_ENDPOINT": "hub"}, ""),
    ({"HF_TOKEN": "schl\u00fcssel"}, ""), ({"HF_HUB_DOWNLOAD_TIMEOUT": "soon"}, "soon"), ({"HF_HUB_ETAG_TIMEOUT": "soon"}, "soon"),
    ({"HTTP_PROXY": "foo://x", "NO_PROXY": "", "no_proxy": "", "HF_ENDPOINT": "http://hub.invalid"}, ""),
])  # fmt: skip
def test_settings_that_cannot_be_read_are_one_sentence(asked, settings, words):
    one_sentence(asked("run", "-hf", "Some/Target-GGUF", *CPU, **settings), "Some/Target-GGUF", words)


@pytest.mark.parametrize("repo", ["a--b/c", "a/b..c", "a/b.git", "-a/b", "a/b-", f"a/{'x' * 200}"])
def test_names_that_the_hub_does_not_have(asked, repo):
    one_sentence(asked("run", "-hf", repo, *CPU), "names no repository of the hub")
    one_sentence(asked("run", "-hf", repo, *CPU, HF_HUB_OFFLINE="1"), "names no repository of the hub")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        self.server.asked.append(f"{self.command} {self.path}")

    def _answer(self, status: int, body: bytes = b"", **headers) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if self.server.broken:
            return self._answer(503)
        if parts[:2] == ["api", "models"]:
            repo = self.server.repos.get("/".join(parts[2:4]))
            if repo is None:
                return self._answer(404, X_Error_Code="RepoNotFound")
            siblings = [{"rfilename": name} for name in repo]
            body = json.dumps(
                {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            )
            return self._answer(200, body.encode(), Content_Type="application/json")
        if "/".join(parts[:2]) in self.server.closed:
            return self._answer(403, X_Error_Code="GatedRepo")
        repo, name = self.server.repos.get("/".join(parts[:2]), {}), "/".join(parts[4:])
        if parts[2:3] != ["resolve"] or name not in repo:
            return self._answer(404, X_Error_Code="EntryNotFound")
        tag = hashlib.sha256(repo[name]).hexdigest()
        return self._answer(200, repo[name], ETag=f'"{tag}"', X_Repo_Commit=COMMIT, Accept_Ranges="none")

    def do_HEAD(self):
        self.do_GET()


class Hub(ThreadingHTTPServer):
    """``repos``: the bytes of each file by repository and name. ``asked``: the requests so far."""

    daemon_threads = True

    def __init__(self, repos: dict[str, dict[str, bytes]]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.asked, self.closed, self.broken = repos, [], set(), False
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


def test_the_drafter_of_the_targets_repository_is_used(hub, asked):
    """It had to be named with -hfd."""
    for options, drafts in ((["--no-spec"], False), (["--spec-type", "none"], False), ([], True), (["-q"], True)):
        done = asked("run", "-hf", "Some/Target-GGUF", *CPU[:-2], *options)
        assert done.returncode == 0 and ("-q" in options or ("drafter dflash-t.gguf" in done.stderr) == drafts), done.stderr
        assert any(line.endswith("/dflash-t.gguf") for line in hub.asked) == drafts


def test_models_are_pulled_listed_and_deleted(asked, tmp_path):
    """A file that two revisions share is deleted with its last one; what is not there is one sentence."""
    target, drafter = map(Path, asked("pull", "Some/Target-GGUF").stdout.decode().split())
    assert (target.name, drafter.name) == ("t-Q8_0.gguf", "dflash-t.gguf")
    listed = [json.loads(line) for line in asked("list", "--json").stdout.splitlines()]
    assert {one["name"]: one["size"] for one in listed} == {
        "Some/Target-GGUF:Q8_0": target.stat().st_size, "Some/Target-GGUF:dflash-t": drafter.stat().st_size,
    }  # fmt: skip
    assert b"Some/Target-GGUF:Q8_0" in asked("list").stdout
    blob = target.resolve()
    assert "t-Q8_0.gguf" in asked("rm", "some/target-gguf:q8_0").stderr and not target.exists() and not blob.exists() and drafter.exists()
    one_sentence(asked("rm", "Some/Target-GGUF:Q8_0"), "there is no model", "pyspec list")
    assert asked("rm", "Some/Target-GGUF").returncode == 0 and not list((tmp_path / "home" / "hub").glob("models--*"))
    assert "pyspec pull" in asked("list").stderr
    one_sentence(asked("ps", "--url", "127.0.0.1:9"), "no server answers at http://127.0.0.1:9", "--url")
