"""A server that embeds, and one that ranks, through the clients' routes."""

import base64

import numpy as np
import pytest
import scripted
from embedders import write_encoder, write_reranker
from server.running import Running

from pyggml_spec.embedding import Embedder, normalised
from pyggml_spec.loading import DEMO_TARGET

pytestmark = pytest.mark.slow

TEXTS = ["the cat sat on a mat", "a dog ran", "the dog sat"]


@pytest.fixture(scope="module")
def embeds(tmp_path_factory):
    path = write_encoder(tmp_path_factory.mktemp("e") / "nomic.gguf", "nomic-bert")
    with Running("-m", path, "--embeddings", "-a", "nomic") as server:
        yield server, path


def test_openais_embeddings(embeds, openai):
    server, path = embeds
    made = Embedder(path, "CPU", None, 1)
    want = [normalised(made.embed([made.encode(t)])[0]) for t in TEXTS]
    made.close()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    found = client.embeddings.create(model="nomic", input=TEXTS)  # by base64
    assert [d.index for d in found.data] == [0, 1, 2] and found.usage.prompt_tokens > 10
    for data, values in zip(found.data, want):
        assert np.allclose(data.embedding, values, atol=1e-5)
    (one,) = server.ok("/v1/embeddings", input=TEXTS[1])["data"]
    assert np.array_equal(np.array(one["embedding"], np.float32), want[1])
    (packed,) = server.ok("/v1/embeddings", input=TEXTS[1], encoding_format="base64")["data"]
    assert base64.b64decode(packed["embedding"]) == want[1].tobytes()
    (native,) = server.ok("/embedding", content=TEXTS[1])
    assert native["embedding"] == [one["embedding"]]
    ids = server.ok("/tokenize", content=TEXTS[1], add_special=True)["tokens"]
    assert server.ok("/v1/embeddings", input=[ids])["data"][0]["embedding"] == one["embedding"]
    for body, words in (
        ({}, "input is missing"),
        ({"input": []}, "1 to 2048 texts"),
        ({"input": "a " * 200}, "embeds 128 at most"),
        ({"input": [[7, 999]]}, "999"),
        ({"input": "a", "dimensions": 8}, "64, which this model"),
    ):
        refused = server.post("/v1/embeddings", **body)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    assert server.post("/v1/rerank", query="a", documents=["b"]).status_code == 501
    assert server.post("/v1/chat/completions", messages=[]).status_code == 404
    assert server.ok("/v1/embeddings", input=["a cat"] * 200)["data"][199]["index"] == 199
    assert server.http.get("/v1/models").json()["data"][0]["meta"]["pooling"] == "mean" and server.http.get("/health").status_code == 200


def test_rankings(tmp_path):
    path = write_reranker(tmp_path / "r.gguf")
    with Running("-m", path, "--reranking") as server:
        made = Embedder(path, "CPU", None, 1, "rank")
        want = [float(made.embed([made.encode_pair("cat", t)])[0][0]) for t in TEXTS]
        made.close()
        found = server.ok("/v1/rerank", query="cat", documents=TEXTS, top_n=2, return_documents=True)["results"]
        best = np.argsort(want)[::-1][:2].tolist()
        assert [r["index"] for r in found] == best and found[0]["document"]["text"] == TEXTS[best[0]]
        assert [r["relevance_score"] for r in found] == pytest.approx([want[i] for i in best], abs=1e-4)
        tei = server.ok("/rerank", query="cat", texts=TEXTS, return_text=True)
        assert len(tei) == 3 and tei[0]["text"] == TEXTS[best[0]] and set(tei[0]) == {"index", "score", "text"}
        assert server.post("/v1/rerank", query="", documents=TEXTS).status_code == 400


def test_ollamas_embeddings_are_the_same(embeds):
    server, _ = embeds
    want = [data["embedding"] for data in server.ok("/v1/embeddings", input=TEXTS)["data"]]
    found = server.ok("/api/embed", model="nomic:latest", input=TEXTS, keep_alive="5m")
    assert found["embeddings"] == want and found["prompt_eval_count"] > 10 and found["model"] == "nomic:latest"
    assert server.ok("/api/embeddings", model="nomic", prompt=TEXTS[0]) == {"embedding": want[0]}
    refused = server.post("/api/embed", model="nomic", input=[])
    assert refused.status_code == 400 and list(refused.json()) == ["error"]
    assert server.http.get("/api/tags").json()["models"][0]["name"] == "nomic"


def test_a_router_has_models_that_embed(embeds, tmp_path):
    scripted.write(tmp_path / "says.gguf", ["these words"], None)
    (tmp_path / "preset.toml").write_text(
        f'[nomic]\nmodel = "{embeds[1]}"\nembeddings = true\n[says]\nmodel = "says.gguf"\nctx-size = 512\nslots = 1\n'
    )
    with Running("--models-preset", tmp_path / "preset.toml") as router:
        want = embeds[0].ok("/v1/embeddings", input=TEXTS)["data"]
        assert router.ok("/v1/embeddings", model="nomic", input=TEXTS)["data"] == want
        assert router.ok("/api/embed", model="nomic", input=TEXTS[0])["embeddings"] == [want[0]["embedding"]]
        said = router.ok("/v1/completions", model="says", prompt="a", temperature=0)
        assert said["choices"][0]["text"] == "these words"
        assert router.post("/v1/embeddings", model="says", input="a").status_code == 501


def test_a_router_plans_what_embeds(embeds, tmp_path):
    """Buffers of a batch count: those of the embedded target take five times its file."""
    (tmp_path / "preset.toml").write_text(f'["*"]\nembeddings = true\n[nomic]\nmodel = "{embeds[1]}"\n[large]\nmodel = "{DEMO_TARGET}"\n')
    with Running("--models-preset", tmp_path / "preset.toml", "--models-memory", 100) as router:
        assert router.post("/v1/embeddings", model="nomic", input="a cat").status_code == 200
        refused = router.post("/v1/embeddings", model="large", input="a cat")
        assert refused.status_code == 500 and "large needs 14" in refused.json()["error"]["message"]
