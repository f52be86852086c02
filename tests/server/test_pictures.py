"""Pictures in requests: the clients of OpenAI and Anthropic, llama.cpp's `multimodal_data`, what is refused, and what is fetched."""

import base64
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from server.running import Running
from sessions import fails_with
from vision.families import file_of, wav, write_family

from pyggml_spec.server import pictures
from pyggml_spec.server.errors import ApiError
from pyggml_spec.server.pictures import fetched, is_public

PNG, JPEG = file_of((96, 64)), file_of((70, 130), 1, "JPEG")


def url(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def part(address):
    return {"type": "image_url", "image_url": {"url": address}}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A server with an encoder, which it finds beside the target."""
    pytest.importorskip("pyggml_spec._mtmd")
    target, _ = write_family(tmp_path_factory.mktemp("seeing"), "qwen3vl")
    with Running("-m", target, "--slots", 2, "-c", 1024) as server:
        yield server


def test_clients_with_pictures(seeing, openai, anthropic):
    """Two pictures, then the next turn, whose pictures come from the prefix cache; and the same question in Anthropic's form."""
    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0)
    asked = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part(url(PNG)), part(url(JPEG, "jpeg"))]}]
    first = client.chat.completions.create(model="x", messages=asked, max_tokens=8, temperature=0)
    asked += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And now?"}]
    second = client.chat.completions.create(model="x", messages=asked, max_tokens=8, temperature=0)
    assert first.usage.prompt_tokens > 80 and second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 4
    alone = seeing.ok("/v1/chat/completions", messages=asked, max_tokens=8, temperature=0, cache_prompt=False)
    assert alone["choices"][0]["message"]["content"] == second.choices[0].message.content
    theirs = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    blocks = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]}]
    counted = theirs.messages.count_tokens(model="x", messages=blocks).input_tokens
    said = theirs.messages.create(model="x", max_tokens=8, messages=blocks)
    assert said.usage.input_tokens + said.usage.cache_read_input_tokens == counted > 30


def test_sounds_of_clients(tmp_path, openai):
    """A sound and a picture in one message, and what is no sound."""
    pytest.importorskip("miniaudio")
    target, mmproj = write_family(tmp_path, "gemma4")
    with Running("-m", target, "--mmproj", mmproj, "-c", 1024) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def asked(data):
            sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
            return [{"role": "user", "content": [part(url(PNG)), sound, {"type": "text", "text": "What is this?"}]}]

        said = [
            client.chat.completions.create(model="x", messages=asked(wav(seed=seed)), max_tokens=4, temperature=0) for seed in (0, 0, 1)
        ]
        reused = [one.usage.prompt_tokens_details.cached_tokens for one in said]
        assert said[0].usage.prompt_tokens > 130 and said[0].choices == said[1].choices and reused[1] > 100 > reused[2]
        for data, words in ((b"x" * 100, "no WAV"), (PNG, "no WAV"), (wav(0.02), "cut off")):
            with pytest.raises(openai.BadRequestError, match=words):
                client.chat.completions.create(model="x", messages=asked(data), max_tokens=1)
        assert server.http.get("/props").json()["modalities"] == {"vision": True, "audio": True}
        modalities = server.http.get("/v1/models").json()["data"][0]["architecture"]["input_modalities"]
        assert modalities == ["text", "image", "audio"]


def test_native_prompts_and_what_is_said(seeing):
    data = base64.b64encode(PNG).decode()
    body = {"prompt_string": "see <__media__> end", "multimodal_data": [data]}
    told = seeing.ok("/completion", prompt=body, n_predict=4, temperature=0)
    assert told["tokens_evaluated"] == 34 and told["prompt"].startswith("see ") and told["prompt"].endswith(" end")
    assert seeing.ok("/completion", prompt=body, n_predict=4, temperature=0)["content"] == told["content"]
    assert seeing.http.get("/props").json()["modalities"] == {"vision": True, "audio": False}
    assert "multimodal" in seeing.http.get("/v1/models").json()["models"][0]["capabilities"]
    text = seeing.ok("/apply-template", messages=[{"role": "user", "content": [part(url(PNG)), {"type": "text", "text": "x"}]}])["prompt"]
    assert "<__media__>x" in text


@pytest.mark.parametrize(
    "content, words",
    [
        ([part("http://127.0.0.1/x.png")], "not fetched by this server"),
        ([part("file:///etc/passwd")], "not fetched by this server"),
        ([part(url(b"no picture"))], "cannot be read"),
        ([part("data:image/png,xx")], "not base64"),
        ([part("data:image/png;base64,?")], "no base64 text"),
        ([{"type": "image_url"}], "no address"),
        ([part(url(PNG[: len(PNG) // 2]))], "cannot be read"),
        ([part(url(PNG))] * 17, "more than 16 pictures"),
        ([{"type": "input_audio", "input_audio": {}}], "audio input is not supported"),
    ],
)
def test_refused_pictures(seeing, content, words):
    response = seeing.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=1)
    assert response.status_code == 400 and words in response.json()["error"]["message"]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1", "::1", "fe80::1%eth0",
                                     "fd00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "x"])  # fmt: skip
def test_private_addresses(address):
    assert not is_public(address) and is_public("1.1.1.1") and is_public("2606:4700::1111")


class _Files(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.strip("/")
        self.send_response({"missing": 404, "loop": 302, "inside": 302}.get(name, 200))
        if name in ("loop", "inside"):
            self.send_header("location", {"loop": "/loop", "inside": "http://10.0.0.1/"}[name])
        self.end_headers()
        if name in ("picture", "large"):
            self.wfile.write(PNG if name == "picture" else bytes(1 << 20))

    def log_message(self, *_):
        pass


def test_fetched_pictures(monkeypatch):
    """From public addresses only, after every redirect; within a size."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}/"
    try:
        fails_with(ApiError, "not in the public network", fetched, base + "picture", 1 << 16)
        fails_with(ApiError, "not in the public network", fetched, base.replace("127.0.0.1", "localhost") + "picture", 1 << 16)
        monkeypatch.setattr(pictures, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
        assert fetched(base + "picture", 1 << 16) == PNG
        for name, words in {
            "missing": "answers 404",
            "loop": "more than 3 redirects",
            "inside": "not in the public",
            "large": "more than 65536 bytes",
        }.items():
            fails_with(ApiError, words, fetched, base + name, 1 << 16)
        fails_with(ApiError, "only http and https", fetched, "ftp://127.0.0.1/", 10)
    finally:
        server.shutdown()
        server.server_close()
