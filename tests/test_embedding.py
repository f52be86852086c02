"""Embeddings and rankings: libllama's own for each pooling, whatever shares a step, and what is refused."""

import re

import llama_cpp as L
import numpy as np
import pytest
from embedders import write_encoder, write_reranker
from sessions import fails_with

from pyggml_spec.embedding import POOLINGS, Embedder, normalised
from pyggml_spec.errors import ContextError, ModelError
from pyggml_spec.loading import DEMO_TARGET

TEXTS = ["the cat sat on a mat", "a dog ran", "the dog sat while a cat ran on the mat . the cat sat , the dog ran ."]


def theirs(path, ids: list[int], pooling: str, n_embd: int) -> np.ndarray:
    """By llama_cpp's functions, as llama.cpp's `llama-embedding` calls them."""
    params = L.llama_model_default_params()
    params.n_gpu_layers = 0
    model = L.llama_model_load_from_file(str(path).encode(), params)
    options = L.llama_context_default_params()
    options.embeddings, options.n_batch, options.n_ubatch, options.n_ctx = True, 512, 512, 512
    options.pooling_type, options.n_threads, options.n_threads_batch = POOLINGS.index(pooling), 1, 1
    ctx, batch = L.llama_init_from_model(model, options), L.llama_batch_init(512, 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert L.llama_decode(ctx, batch) == 0
    if pooling == "none":
        out = np.array([np.ctypeslib.as_array(L.llama_get_embeddings_ith(ctx, i), (n_embd,)) for i in range(len(ids))])
    else:
        out = np.ctypeslib.as_array(L.llama_get_embeddings_seq(ctx, 0), (n_embd,)).copy()
    L.llama_batch_free(batch)
    L.llama_free(ctx)
    L.llama_model_free(model)
    return out


@pytest.mark.parametrize("kind", ["bert", "nomic-bert", "reranker", "demo mean", "demo last", "demo none"])
def test_values_are_libllamas_alone_and_near_them_together(kind, tmp_path):
    path = tmp_path / "m.gguf"
    if kind.startswith("demo"):
        made = Embedder(DEMO_TARGET, "CPU", 512, 1, kind.split()[1])
    else:
        path = write_reranker(path) if kind == "reranker" else write_encoder(path, kind)
        made = Embedder(path, "CPU", None, 1, "rank" if kind == "reranker" else None)
    assert made.pooling == {"bert": "cls", "nomic-bert": "mean", "reranker": "rank"}.get(kind, kind.split()[-1])
    texts = [made.encode_pair("cat", t) if kind == "reranker" else made.encode(t) for t in TEXTS]
    if kind == "bert":
        assert texts[1][0] == 2 and texts[1][-1] == 3
        assert made.encode_pair("a", "cat") == [
            2,
            *made.encode("a")[1:-1],
            3,
            *made.encode("cat")[1:-1],
        ]  # as llama.cpp's server lays it out
    alone = [made.embed([ids])[0] for ids in texts]
    for ids, ours in zip(texts, alone):
        want = theirs(DEMO_TARGET if kind.startswith("demo") else path, ids, made.pooling, made.n_embd)
        assert ours.tobytes() == want.tobytes() and ours.shape == want.shape
    assert not np.array_equal(alone[0][-1], alone[1][-1])
    for one, shared in zip(alone, made.embed(texts), strict=True):  # other shapes of products
        assert ((one - shared) ** 2).sum() <= 1e-6 * (one**2).sum()
    assert kind != "reranker" or alone[0].sum() == pytest.approx(1)
    if kind == "bert":
        assert list(made.batches([1000, 1000, 48, 1, *[1] * 70])) == [3, 64, 7] and made.n_ctx == 128
        fails_with(ContextError, "has 129 tokens", made.embed, [[1] * 129])
        fails_with(ContextError, "outside of the vocabulary", made.embed, [[999]])
    made.close()
    made.close()


@pytest.mark.parametrize("kind, n_ctx", [("nomic-bert", None), ("demo", 512), ("demo", 4096)])
def test_what_is_counted_is_what_llama_cpp_allocates(kind, n_ctx, tmp_path):
    path = DEMO_TARGET if kind == "demo" else write_encoder(tmp_path / "m.gguf", kind)
    counted = Embedder(path, "CPU", n_ctx, 1, "mean", counted=True)
    lines: list[str] = []
    keep = L.llama_log_callback(lambda level, line, data: lines.append(line.decode()))
    params, options = L.llama_model_default_params(), L.llama_context_default_params()
    params.n_gpu_layers = 0
    options.n_ctx = options.n_batch = options.n_ubatch = max(counted.n_ctx, 2048)
    options.n_seq_max, options.embeddings, options.kv_unified, options.pooling_type = 64, True, True, POOLINGS.index("mean")
    model = L.llama_model_load_from_file(str(path).encode(), params)
    L.llama_log_set(keep, None)
    ctx = L.llama_init_from_model(model, options)
    L.llama_log_set(L.llama_log_callback(), None)
    L.llama_free(ctx)
    L.llama_model_free(model)
    sizes = [float(found[1]) for line in lines if (found := re.search(r"buffer size = +([\d.]+) MiB", line))]
    assert sizes and counted.nbytes == pytest.approx(path.stat().st_size + sum(sizes) * (1 << 20), abs=200_000)  # lines have two digits
    counted.close()


def test_what_cannot_be_embedded_is_refused(tmp_path):
    fails_with(ModelError, "no head for rankings", Embedder, DEMO_TARGET, "CPU", pooling="rank")
    fails_with(ModelError, "the pooling is 'max'", Embedder, DEMO_TARGET, "CPU", pooling="max")


def test_norms_are_llama_cpps():
    values = np.array([3, -4, 0], np.float32)
    for norm, want in ((-1, [3, -4, 0]), (0, [24570, -32760, 0]), (1, [3 / 7, -4 / 7, 0]), (2, [0.6, -0.8, 0])):
        assert normalised(values, norm) == pytest.approx(np.array(want, np.float32))
    assert not normalised(np.zeros(3, np.float32)).any()
