"""LoRA adapters: llama.cpp's logits, speculation and prefixes of each choice apart, and what is refused."""

import ctypes
import time

import llama_cpp as L
import numpy as np
import pytest
from architectures import write_tiny
from gguf_io.build import STR, Model
from random_gguf.adapter import write_adapter
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.errors import EngineError, ModelError
from pyggml_spec.loading import DEMO_TARGET

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]


def theirs(path, adapters: dict, tokens: list[int], n_vocab: int) -> np.ndarray:
    """Logits of llama.cpp with adapters, by file and scale."""
    params = L.llama_model_default_params()
    params.n_gpu_layers = 0
    model = L.llama_model_load_from_file(str(path).encode(), params)
    options = L.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_threads, options.n_threads_batch = 256, 256, 256, 1, 1
    options.flash_attn_type = 1
    ctx, batch = L.llama_init_from_model(model, options), L.llama_batch_init(256, 0, 1)
    loaded = [L.llama_adapter_lora_init(model, str(file).encode()) for file in adapters]
    if loaded:
        pointers = (L.llama_adapter_lora_p_ctypes * len(loaded))(*loaded)
        assert L.llama_set_adapters_lora(ctx, pointers, len(loaded), (ctypes.c_float * len(loaded))(*adapters.values())) == 0
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert L.llama_decode(ctx, batch) == 0
    out = np.array([np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, i), (n_vocab,)) for i in range(len(tokens))])
    L.llama_batch_free(batch)
    L.llama_free(ctx)
    L.llama_model_free(model)
    return out


SLOWER = ("llama", "gemma3", "phi3", "glm4", "starcoder2", "qwen35")


@pytest.mark.parametrize("arch", ["qwen3", "qwen2", *(pytest.param(arch, marks=pytest.mark.slow) for arch in SLOWER)])
def test_logits_are_llama_cpps(arch, tmp_path):
    """NMSE 0 on ggml's kernels, alone and both, at each one's scale; without adapters what was before."""
    target = write_tiny(arch, tmp_path / "t.gguf")
    one = write_adapter(tmp_path / "one.gguf", target, seed=1)
    two = write_adapter(tmp_path / "two.gguf", target, rank=3, alpha=0, seed=2, only=lambda name: "attn" in name)
    with ps.load(target, device="CPU", threads=1, kernels="ggml", n_ctx=256, spec=(), lora=[(one, 1.0), (two, 0.5)]) as session:
        seen = []
        for chosen in ((), ((0, 1.0),), ((1, 0.5),), ((0, -0.75), (1, 2.0))):
            want = theirs(target, {(one, two)[i]: scale for i, scale in chosen}, TOKENS, session.target.n_vocab)
            for order in (chosen, chosen[::-1]):  # llama.cpp adds those of several adapters in the order of their addresses
                session.runner.slots[0].adapters = order
                session.runner.reset(drafting=False)
                ours = session.runner.logits(TOKENS)
                if equal := ours.tobytes() == want.tobytes():
                    break
            assert equal, (chosen, ((ours - want) ** 2).sum() / (want**2).sum())
            seen.append(ours)
        assert all(np.abs(a - seen[0]).max() > 1e-3 for a in seen[1:])
        assert session.target.weights.adapters.default == ((0, 1.0), (1, 0.5))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return [write_adapter(folder / f"{i}.gguf", DEMO_TARGET, seed=i, size=0.05) for i in range(2)]


@pytest.mark.slow
def test_speculative_text_of_each_choice_is_its_plain_text(files):
    """Requests with other adapters have steps of their own, by turns; prefixes of one choice are not used for another."""
    prompt = "def quicksort(items):\n    if len(items) < 2:\n        return items\n" * 4
    with ps.load(device="CPU", threads=1, kernels="ggml", n_ctx=512, draft_width=4, lora=[(files[0], 0.0), (files[1], 0.0)]) as session:
        choices = ((), ((0, 1.0),), ((1, 1.0),), ((0, 1.0), (1, 1.0)))
        want = []
        for chosen in choices:
            session.target.weights.adapters.default = chosen
            text, _ = session.generate(prompt, 24, mode="reference")
            want.append(text)
            assert session.generate(prompt, 24)[0] == text
        assert len(set(want)) == 4
        session.target.weights.adapters.default = ()
        with session.concurrent(3, 512, prefix_memory=64 << 20) as server:
            for again in (False, True):
                handles = [server.submit(prompt, 24, adapters=chosen) for chosen in (*choices, *choices)]
                results = [handle.result() for handle in handles]
                assert [text for text, _ in results] == [*want, *want]
                reused = [stats.reused_tokens for _, stats in results]
                assert all(reused) if again else not any(reused[:4])
            order: list[int] = []
            both = [
                server.submit(prompt, 60, adapters=chosen, sink=lambda event, i=i: order.append(i)) for i, chosen in enumerate(choices[1:3])
            ]
            while len(order) < 2 or not all(handle.stats.stop_reason for handle in both):
                time.sleep(0.01)
            assert order.index(1) < len(order) - 1 - order[::-1].index(0) and order.index(0) < len(order) - 1 - order[::-1].index(1)
            fails_with(ModelError, "no adapter 2", server.submit, prompt, 4, adapters=((2, 1.0),))
    with ps.load(device="CPU", threads=1, n_ctx=256) as session, session.concurrent(1, 256) as server:
        fails_with(EngineError, "there are no adapters", server.submit, prompt, 4, adapters=((0, 1.0),))


@pytest.mark.slow
def test_acceptance_is_learnt_for_each_choice(files):
    with ps.load(device="CPU", threads=1, n_ctx=256, lora=[(files[0], 1.0)]) as session:
        session.generate("def f(x):\n", 8)
        assert any("adapters ((0, 1.0),)" in name for name in session.engine.policy.priors)


def test_what_is_no_adapter_of_the_target_is_refused(files, tmp_path):
    def load(file):
        ps.load(device="CPU", threads=1, n_ctx=256, lora=[(file, 1.0)]).close()

    fails_with(ModelError, "is no LoRA adapter", load, DEMO_TARGET)
    model = Model(files[0])
    for change, words in (
        (lambda m: m.keys.update({"general.architecture": (STR, "llama")}), "'llama'"),
        (lambda m: m.tensors.pop(next(n for n in m.tensors if n.endswith("lora_b"))), "half of a pair"),
        (lambda m: m.tensors.update({"token_embd.weight.lora_a": [(4, 8), 0, bytes(128)]}), "for no matrix"),
        (lambda m: m.tensors[next(iter(m.tensors))].__setitem__(0, (2, 4)), "made for another model"),
    ):
        other = model.copy()
        change(other)
        fails_with(ModelError, words, load, other.write(tmp_path / "x.gguf"))
    load(files[0])
