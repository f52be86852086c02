"""Checkpoints of every published layout are converted, and draft what their makers' formulae give (reference.py)."""

import json
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from drafters import published
from drafters.published import MASK, TARGET, VOCAB, N, Random, windows
from drafters.reference import Block, Eagle
from drafters.test_parity import matrices
from llama_oracle import LlamaDFlash
from random_gguf.archs import WRITERS

import pyggml_spec as ps
from pyggml_spec.engine.batch import Draft, Verify
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import ConvertError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.tools.convert import convert_drafter

pytestmark = pytest.mark.slow
PROMPT = np.random.default_rng(4).integers(0, 256, 40).tolist()
ACCEPTED = 3
NEAR = 1e-2  # of logits with a standard deviation of 1; attention sums V in F16

BLOCKS = {
    "DFlash": published.dflash,
    "DFlash, sliding layers causal": partial(published.dflash, **windows()),
    "DFlash, sliding layers bidirectional": partial(published.dflash, is_causal=False, **windows()),
    "DFlash of all sliding layers": partial(published.dflash, **windows(layer_types=["sliding_attention"] * 3)),
    "JetSpec": partial(published.dflash, own={"causal_head": True}),
    "DFlash2": published.dflash2,
    "DFlash2, scaled and capped": partial(published.dflash2, own={"output_multiplier": 0.2, "final_logit_softcapping": 2.0}),
    "DFlash2, sliding layers bidirectional": partial(published.dflash2, **windows()),
    "speculators DFlash": published.speculators_dflash,
    "speculators DSpark": published.speculators_dspark,
    "speculators DSpark, first row drafts nothing": partial(published.speculators_dspark, from_anchor=None),
    "DeepSpec DSpark": published.deepspec,
    "DeepSpec DFlash": partial(published.deepspec, rank=0),
    "Laguna": published.laguna,
    "Laguna, gate per output": partial(published.laguna, gating="per-element"),
    "Gemma 4 DSpark": published.gemma,
    "Gemma 4 DSpark, capped": partial(published.gemma, cap=1.5),
}
CHAINS = {
    "EAGLE-3": published.eagle3,
    "EAGLE-3.1": partial(published.eagle3, fc_norm=True, norm_output=True),
    "speculators EAGLE-3": partial(published.speculators_eagle3, qk_norms=False, norm_before_residual=True),
    "speculators EAGLE-3 with a Qwen3 layer": published.speculators_eagle3,
    "speculators EAGLE-3 with norms around": partial(published.speculators_eagle3, fc_norm=True, norm_output=True),
    "speculators EAGLE-3 with three layers": partial(published.speculators_eagle3, layers=3, norm_before_residual=True),
    "DeepSpec EAGLE-3": published.deepspec_eagle3,
    "speculators P-EAGLE": published.peagle,
    "speculators P-EAGLE with norms around": partial(published.peagle, layers=2, qk_norms=False, fc_norm=True, norm_before_residual=True),
    "speculators P-EAGLE, norms together": partial(published.peagle, layers=1, norm_before_fc=True),
    "P-EAGLE of vLLM": published.vllm_peagle,
    "speculators EAGLE-3, norms together": partial(published.speculators_eagle3, qk_norms=False, norm_before_fc=True),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("targets"), {}

    def of(layout):
        arch = "laguna" if "Laguna" in layout else "gemma4" if "Gemma" in layout else "qwen3"
        if arch not in made:
            made[arch] = WRITERS[arch](folder / f"{arch}.gguf", TARGET)
        return made[arch]

    return of


def written(folder, make, seed=7):
    random = Random(seed)
    return random.write(folder / "checkpoint", make(random)), random.tensors


def drafted(target, draft, drafts, layers):
    """Two blocks, some drafts accepted in between: (tokens before, ids, logits) of each, and the target's hidden states."""
    kept = []
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=256, draft_width=drafts + 1) as session:
        engine, drafter = session.runner, session.drafter
        original = drafter.logits

        def logits(g, hidden, target):
            node = original(g, hidden, target)
            g.keep_output(node)
            kept.append((g, node))
            return node

        engine.graphs.drop("fused")
        drafter.logits = logits
        tokens = [*PROMPT, engine.prefill(PROMPT)]
        blocks = []
        for _ in range(2):
            result = engine.fused_step()
            graph = kept[-1][0]
            seen = np.concatenate([graph.host_view(node).copy() for g, node in kept if g is graph])
            blocks.append((list(tokens), result.tokens[1:].tolist(), seen))
            tokens += [*result.tokens[1 : 1 + ACCEPTED].tolist(), int(result.ids[ACCEPTED])]
            engine.accept(ACCEPTED + 1, int(result.ids[ACCEPTED]))
        engine.reset()
        _, features = engine.capture(tokens, layers)
    return blocks, features


SEEDS = {  # with which no two logits are so near that rounding decides; 7 for others
    "DFlash, sliding layers bidirectional": 8, "DFlash of all sliding layers": 9, "speculators DFlash": 8,
    "speculators DSpark, first row drafts nothing": 8, "DeepSpec DSpark": 8, "DeepSpec DFlash": 10, "Laguna, gate per output": 10,
    "Gemma 4 DSpark": 22, "Gemma 4 DSpark, capped": 9, "speculators EAGLE-3": 8, "speculators EAGLE-3 with a Qwen3 layer": 11,
    "speculators EAGLE-3 with three layers": 8, "speculators P-EAGLE with norms around": 8,
}  # fmt: skip


@pytest.mark.parametrize("layout", [*BLOCKS, *CHAINS])
def test_drafts_are_what_the_formulae_give(tmp_path, targets, layout):
    """Two blocks: ids, and every logit."""
    target = targets(layout)
    folder, tensors = written(tmp_path, (BLOCKS | CHAINS)[layout], SEEDS.get(layout, 7))
    done = convert_drafter(folder, target, tmp_path / "d.gguf", "f32", threads=1)
    reference = made(folder, tensors, target)
    drafts = reference.most_drafts
    blocks, features = drafted(target, tmp_path / "d.gguf", drafts, done.target_layers)
    for tokens, ids, logits in blocks:
        expected, wanted, margins = reference.drafts(features[:, : len(tokens) - 1], tokens, drafts)
        assert min(margins) > 2 * NEAR and np.abs(logits - wanted).max() < NEAR
        assert ids == expected


@pytest.mark.parametrize("kernels", ["native", "ggml"])
@pytest.mark.parametrize("layout", ["speculators EAGLE-3 with three layers", "speculators P-EAGLE", "P-EAGLE of vLLM"])
@pytest.mark.parametrize("slots", [1, 2])
def test_rows_that_read_rows(tmp_path, targets, layout, slots, kernels):
    """Drafts after prompts in chunks, plain tokens and given blocks, whose rows are computed later in batches; of two sequences at once, too."""
    target = targets(layout)
    folder, tensors = written(tmp_path, (BLOCKS | CHAINS)[layout], SEEDS.get(layout, 7))
    done = convert_drafter(folder, target, tmp_path / "d.gguf", "f32", threads=1)
    reference, drafts, seen, compared = made(folder, tensors, target), 4, [], 0
    with ps.load(target, tmp_path / "d.gguf", device="CPU", threads=1, kernels=kernels, n_ctx=256, draft_width=5, chunk=16) as session:
        engine = ModelRunner(session.backend, session.target, session.drafter, EngineOptions(n_ctx=256, slots=slots, width=5, chunk=16))
        tokens = {engine.admit(): list(prompt) for prompt in (PROMPT, PROMPT[:13])[:slots]}

        def step(item, kept=0):
            """The same for all; of a block, ``kept`` are accepted in the first sequence, and one more in others."""
            out = engine.step(dict.fromkeys(tokens, item))
            for slot, result in out.items():
                n = min(kept + slot, item.rows - 1)
                engine.accept(n + 1, int(result.ids[n]), slot)
                tokens[slot] += [*result.tokens[1 : n + 1].tolist(), int(result.ids[n])]
            return out

        for slot, known in tokens.items():
            tokens[slot] = [*known, engine.prefill(known, slot=slot)]
        for plain, kept in ((0, 3), (1, 0), (12, 2), (3, 1), (40, 2)):
            for _ in range(plain):
                step(Verify())
            if plain:
                step(Verify([5, 6, 7]), 1)
            before = {slot: list(known) for slot, known in tokens.items()}
            seen += [(before[slot], result.tokens[1:].tolist()) for slot, result in step(Draft(1 + drafts), kept).items()]
        engine.close()
        for known, ids in seen:
            session.runner.reset()
            _, features = session.runner.capture(known, done.target_layers)
            expected, _, margins = reference.drafts(features[:, : len(known) - 1], known, drafts)
            sure = next((i for i, margin in enumerate(margins) if margin < 2 * NEAR), drafts)
            assert ids[:sure] == expected[:sure]
            compared += sure
        assert len(seen) == 5 * slots and compared > 10 * slots


def made(folder, tensors, target):
    config, of_target = json.loads((folder / "config.json").read_text()), matrices(target)
    head = of_target.get("output.weight", of_target["token_embd.weight"])
    chain = any("eagle" in name.lower() for name in config["architectures"])
    return (Eagle if chain else Block)(config, tensors, of_target["token_embd.weight"], head)


@pytest.mark.parametrize("layout", [*BLOCKS, *CHAINS])
def test_a_key_that_is_not_known_is_refused_by_name(tmp_path, targets, layout):
    """Wherever it is; what it asks for would be left out."""
    folder, _ = written(tmp_path, (BLOCKS | CHAINS)[layout])
    known = json.loads((folder / "config.json").read_text())
    objects = [name for name in ("dflash_config", "eagle_config", "transformer_layer_config") if name in known]
    for where in (None, *objects):
        config = json.loads(json.dumps(known))
        (config if where is None else config[where])["block_softness"] = 0.5
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConvertError, match="config.json has the key 'block_softness'.* which is not known here and would be ignored"):
            convert_drafter(folder, targets(layout), tmp_path / "d.gguf", threads=1)
    (folder / "config.json").write_text(json.dumps({**known, "block_softness": None}))
    convert_drafter(folder, targets(layout), tmp_path / "d.gguf", threads=1)


@pytest.mark.parametrize("layout, change, words", [
    ("JetSpec", {"is_causal": False}, "is_causal False and causal_head True exclude each other"),
    ("JetSpec", {"dflash_config": {"causal_head": "yes", "mask_token_id": MASK, "target_layer_ids": [0, 2, 4]}}, "block direction 'yes'"),
    ("JetSpec", {"target_hidden_size": 2 * N}, "hidden states of 128 values"),
    ("DFlash", {"attention_sink_bias": True}, "attention_sink_bias is True, but only False"),
    ("DFlash", {"rope_scaling": {"rope_type": "default", "truncate": False}}, "the key 'truncate' in its rope parameters"),
    ("DFlash", {"draft_vocab_size": 100}, "draft_vocab_size is 100"),
    ("DFlash", {"quantization_config": {"bits": 4}}, "quantization_config is "),
    ("speculators DFlash", {"sample_from_anchor": True}, "whose last token's row drafts"),
    ("speculators DSpark", {"confidence_head_with_markov": False}, "confidence_head_with_markov is False"),
    ("speculators DSpark", {"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
    ("Laguna", {"gating": "per-token"}, "gating is 'per-token'"),
    ("Laguna", {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "are not the inputs after"),
    ("Laguna", {"sliding_windows": [12, 13, 12]}, "sliding_windows is"),
    ("Gemma 4 DSpark", {"attention_k_eq_v": False}, "attention_k_eq_v is False"),
    ("Gemma 4 DSpark", {"enable_moe_block": True}, "enable_moe_block is True"),
    ("EAGLE-3.1", {"norm_output": False}, "norm_output is False"),
    ("EAGLE-3", {"layer_types": ["sliding_attention"], "sliding_window": 9, "use_sliding_window": True}, "layer_types is|use_sliding_window is True"),
    ("EAGLE-3", {"parallel_drafting": "yes"}, "parallel_drafting is 'yes'"),
    ("DFlash", {"parallel_drafting": True}, "parallel_drafting is True, but only False"),
    ("DeepSpec EAGLE-3", {"target_layer_ids": [0, 1, 2, 3, 6]}, "target_layer_ids holds 6"),
    ("DeepSpec EAGLE-3", {"target_layer_ids": []}, "target_layer_ids has 0 entries"),
    ("DeepSpec EAGLE-3", {"num_target_layers": 7}, "made for a target of 7 layers"),
    ("DeepSpec EAGLE-3", {"num_hidden_layers": 2, "layer_types": None}, "2 layers, and a Qwen3Eagle3Model has one"),
    ("EAGLE-3", {"target_layer_ids": [1, 2, 3]}, "the key 'target_layer_ids'"),
    ("speculators P-EAGLE", {"mask_token_id": None}, "no mask_token_id"),
    ("speculators P-EAGLE", {"transformer_layer_config": {**published.sizes(4), **windows(layer_types=["sliding_attention"] * 4)}}, "layer_types is|use_sliding_window is True"),
    ("speculators EAGLE-3, norms together", {"fc_norm": True}, "both fc_norm and norm_before_fc"),
])  # fmt: skip
def test_what_would_be_computed_wrongly_is_refused(tmp_path, targets, layout, change, words):
    folder, _ = written(tmp_path, (BLOCKS | CHAINS)[layout])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConvertError, match=words):
        convert_drafter(folder, targets(layout), tmp_path / "d.gguf", threads=1)


@pytest.mark.parametrize("layout, change, words", [
    ("Laguna", lambda t: t.pop("aux_hidden_norms.1.weight"), "no tensor 'aux_hidden_norms.1.weight'"),
    ("Laguna", lambda t: t.update({"aux_hidden_norms.1.weight": np.ones(3, np.float32)}), r"'aux_hidden_norms.1.weight' has the shape \[3\]"),
    ("Laguna", lambda t: t.update({"layers.0.self_attn.qkv_proj.weight": np.ones((9, N), np.float32)}), r"shape \[9, 64\], but config.json calls for \[256, 64\]"),
    ("EAGLE-3.1", lambda t: t.update({"fc_norm.2.weight": np.full(N, np.nan, np.float32)}), "'fc_norm.2.weight' holds NaN"),
    ("EAGLE-3.1", lambda t: t.pop("fc_norm.0.weight"), "no tensor 'fc_norm.0.weight'"),
    ("P-EAGLE of vLLM", lambda t: t.update({"mask_hidden": np.ones((1, 64), np.float32)}), r"'mask_hidden' has the shape \[1, 64\]"),
    ("P-EAGLE of vLLM", lambda t: t["mask_hidden"].fill(np.inf), "'mask_hidden' holds NaN or Inf"),
    ("speculators P-EAGLE", lambda t: t.pop("layers.3.self_attn.q_norm.weight"), "has no norm of q or k of some layers"),
    ("DFlash", lambda t: t.update({"d2t": np.zeros(VOCAB, np.int64)}), "reduced-vocabulary"),
])  # fmt: skip
def test_tensors_that_are_missing_or_damaged(tmp_path, targets, layout, change, words):
    random = Random(7)
    config = (BLOCKS | CHAINS)[layout](random)
    change(random.tensors)
    with pytest.raises(ConvertError, match=words):
        convert_drafter(random.write(tmp_path / "c", config), targets(layout), tmp_path / "d.gguf", threads=1)


OF_LLAMA_CPP = ["DFlash", "JetSpec", "DFlash2", "DFlash2, scaled and capped", "DFlash2, sliding layers bidirectional"]


@pytest.mark.parametrize("layout", [*OF_LLAMA_CPP, "DFlash, sliding layers causal"])
def test_llama_cpp_on_the_same_files(tmp_path, targets, layout):
    """It drafts what the formulae give but where some layers are causal: it runs all of them alike."""
    target, seed = targets(layout), SEEDS.get(layout, 7)
    folder, tensors = written(tmp_path, BLOCKS[layout], seed)
    convert_drafter(folder, target, tmp_path / "d.gguf", "f32", threads=1)
    with ps.load(target, tmp_path / "d.gguf", device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        hp, top_k = session.drafter.hp, getattr(session.drafter, "top_k", 0)
        _, features = session.runner.capture(PROMPT, hp.target_layers)
    options = {"n_ctx": 256, "block": hp.block_size, "causal": all(hp.causal), "top_k": top_k}
    with closing(LlamaDFlash(target, tmp_path / "d.gguf", hp.target_layers, hp.mask_token, **options)) as oracle:
        tokens = [*PROMPT, oracle.prefill(PROMPT)]
        theirs = oracle.draft(hp.block_size)
    expected, *_ = made(folder, tensors, target).drafts(features, tokens, hp.block_size - 1)
    assert (theirs == expected) == (layout in OF_LLAMA_CPP)


def test_a_file_without_the_key_has_causal_sliding_layers(tmp_path, targets):
    """As llama.cpp's converter writes those whose config does not say it."""
    folder, _ = written(tmp_path, BLOCKS["DFlash, sliding layers causal"])
    convert_drafter(folder, targets("DFlash"), tmp_path / "d.gguf", "f32", threads=1)
    with GGUFFile(tmp_path / "d.gguf") as file:
        assert "dflash.attention.causal" not in file.metadata
    with ps.load(targets("DFlash"), tmp_path / "d.gguf", device="CPU", threads=1, n_ctx=64) as session:
        assert session.drafter.hp.causal == (True, True, False) and session.drafter.hp.window == (12, 12, 0)
