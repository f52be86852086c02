"""A whole small model as drafter: its rows after every kind of step, other vocabularies, and what is refused."""

import json
from contextlib import closing

import numpy as np
import pytest
from cli.process import pyspec
from ggml.kernel_graphs import LEVELS
from gguf_io.build import ARR, I32, STR, U32, Model
from random_gguf.archs import WRITERS, write_gemma4, write_llama, write_qwen3
from random_gguf.model import Shape
from random_gguf.mtp import write_mtp_target

import pyggml_spec as ps
from pyggml_spec.doctor import FAIL, OK, WARN, examine
from pyggml_spec.doctor.files import tokenizer
from pyggml_spec.drafters.vocabulary import _tokens, map_vocabulary
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import ModelError, PairError
from pyggml_spec.ggml.device import Backend
from pyggml_spec.ggml.library import lib, text
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.text.tokenizer import Tokenizer

native = pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing")
OPTIONS = {"device": "CPU", "threads": 1, "n_ctx": 256}
TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
PROMPT = list(range(40, 75))
RECURRENT = "lfm2", "granitehybrid", "falcon-h1", "qwen3next"  # further kinds of recurrent layers


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return write_qwen3(folder / "t.gguf", Shape(), "Q8_0"), write_qwen3(folder / "d.gguf", Shape(n_layer=2), "Q8_0", seed=1)


def other_vocabulary(source, path, order, drop=()):
    """A model with the same weights, whose token i is the source's order[i]; tokens of ``drop`` have other names."""
    model = Model(source)
    order = [int(i) for i in order]
    kind, (item, names) = model.keys[TOKENS]
    names = [f"<other_{i}>" if i in drop else name for i, name in enumerate(names)]
    model.keys[TOKENS] = kind, (item, [names[i] for i in order])
    kind, (item, types) = model.keys[TYPES]
    model.keys[TYPES] = kind, (item, [types[i] for i in order])
    for key in [key for key in model.keys if key.endswith("_token_id")]:
        model.keys[key] = U32, order.index(model.keys[key][1])
    for name in ("token_embd.weight", "output.weight"):
        shape, of_type, data = model.tensors[name]
        rows = np.frombuffer(data, np.uint8)[: len(data) // shape[1] * shape[1]].reshape(shape[1], -1)
        model.tensors[name] = [(shape[0], len(order)), of_type, rows[order].tobytes()]
    return model.write(path)


@native
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("small", ["qwen3", "qwen35", *(pytest.param(arch, marks=pytest.mark.slow) for arch in RECURRENT)])
def test_rows_are_right_after_every_kind_of_step(files, tmp_path, slots, small):
    """Drafts are those of a sequence that was computed anew, whatever the steps before left: all right, some, none, plain, given, proposed, prompts."""
    random, draft = np.random.default_rng(slots), WRITERS[small](tmp_path / "d.gguf", Shape(), "Q8_0", seed=1)
    with ps.load(files[0], draft, **OPTIONS, draft_width=5) as session:
        engine = ModelRunner(
            session.backend, session.target, session.drafter, EngineOptions(n_ctx=256, width=5, chunk=32, slots=slots, given=True)
        )
        try:
            mine = {engine.admit(): list(PROMPT[: 20 + i]) for i in range(slots)}
            for slot, tokens in mine.items():
                engine.step({slot: Prefill(tokens)})
            for i in range(40):
                kinds = {slot: random.integers(0, 6) for slot in mine}
                items = {}
                for slot, kind in kinds.items():
                    given = random.integers(0, 256, random.integers(1, 5))
                    check = len if kind == 3 else None
                    items[slot] = (Verify(), Verify(given), Prefill(given), Draft(5, check=check), Draft(3), Draft(5))[kind]
                kept = {slot: engine.slots[slot].cursor.last_token for slot in mine}
                for slot, result in engine.step(items).items():
                    if isinstance(items[slot], Prefill):
                        mine[slot] += list(items[slot].tokens)
                        continue
                    count = int(random.integers(1, len(result.tokens) + 1))
                    mine[slot] += [kept[slot], *result.tokens[1:count].tolist()]
                    engine.accept(count, int(result.ids[count - 1]), slot)
                if i % 4 == 3:
                    engine.step({slot: Draft(4) for slot in mine})
                    for slot, tokens in mine.items():
                        drafts, last = engine.slots[slot].tokens[1:].tolist(), engine.slots[slot].cursor.last_token
                        session.runner.reset()
                        session.runner.prefill(tokens)
                        session.runner.choose(last)
                        assert session.runner.fused_step(4).tokens[1:].tolist() == drafts, (i, slot, kinds)
                        engine.rollback(len(tokens), slot)
        finally:
            engine.close()


@native
@pytest.mark.parametrize("order", ["same", "reversed", "longer"])
def test_a_model_agrees_with_itself(files, tmp_path, order):
    """Whatever the order of its tokens."""
    draft = files[0]
    if order != "same":
        ids = np.arange(320)[::-1] if order == "reversed" else [*range(200), 200, *range(200, 320)]
        draft = other_vocabulary(files[0], tmp_path / "d.gguf", ids)
    with ps.load(files[0], draft, **OPTIONS, draft_width=6) as session:
        *_, stats = session.generate(PROMPT, 60, ignore_end=True)
        assert stats.matched >= stats.drafted - 1 > 40  # the last block is cut
        assert session.generate(PROMPT, 60)[0] == session.generate(PROMPT, 60, mode="plain")[0]
        with session.concurrent(slots=2) as server:
            handles = [server.submit(PROMPT[i:], 40) for i in range(3)]
            assert all(handle.result()[1].matched > 20 for handle in handles)


@native
def test_tokens_that_the_target_lacks_are_not_drafted(files, tmp_path):
    lost = set(range(256, 300))
    draft = other_vocabulary(files[1], tmp_path / "d.gguf", np.random.default_rng(1).permutation(320), drop=lost)
    with ps.load(files[0], draft, **OPTIONS, draft_width=5) as session:
        assert any("d.gguf has another vocabulary: it has 86.2 % of the target's first 320 tokens" in note for note in session.notes)
        session.runner.prefill(PROMPT)
        for _ in range(20):
            result = session.runner.fused_step()
            assert not lost & set(result.tokens[1:].tolist())
            session.runner.accept(1, int(result.ids[0]))
        for prompt in (PROMPT, [*lost][:20]):
            assert session.generate(prompt, 30)[0] == session.generate(prompt, 30, mode="plain")[0]


def test_a_vocabulary_is_mapped_by_bytes_and_kind(files, tmp_path):
    """Sentencepiece's spelling against GPT-2's; ends by role; tokens that are missing become what ends them."""
    model = Model(files[1])
    names = ["<s>", "</s>", "<0x0A>", "\u2581", "\u2581\u2581", "a", "xa"]
    names += [f"<u{i}>" for i in range(320 - len(names))]
    model.keys["tokenizer.ggml.model"] = STR, "llama"
    model.keys[TOKENS], model.keys[TYPES] = (ARR, (STR, names)), (ARR, (I32, [3, 3, 6, *[1] * 317]))
    model.keys["tokenizer.ggml.eos_token_id"] = U32, 1
    with GGUFFile(files[0]) as target, GGUFFile(model.write(tmp_path / "d.gguf")) as draft:
        found = map_vocabulary(target, draft)
        newline, space, letter = 10, 32, ord("a")
        assert found.to_draft[[newline, space, letter, 256, 318]].tolist() == [2, 3, 5, 4, 1]
        assert found.to_target[[2, 3, 5, 4, 1]].tolist() == [newline, space, letter, 256, 318] and not found.drafted[6]
        assert found.coverage < 0.1 and found.lost[0] == "\x00"
        assert map_vocabulary(target, target) is None
    with pytest.raises(
        PairError, match=r"d.gguf cannot draft for t.gguf: it has 1.6 % of the target's first 320 tokens; .* and 50 % are needed"
    ):
        ps.load(files[0], tmp_path / "d.gguf", **OPTIONS)


@pytest.mark.parametrize("small", ["qwen3", "qwen35"])
def test_a_prefix_cache_has_its_rows(files, tmp_path, small):
    """And its recurrent states."""
    prompt, draft = list(range(30, 230)) * 4, WRITERS[small](tmp_path / "d.gguf", Shape(), "Q8_0", seed=1)
    want = None
    for i in range(2):
        with ps.load(
            files[0], draft, device="CPU", threads=1, n_ctx=1024, chunk=128, draft_width=4, prefix_cache=tmp_path / "cache"
        ) as session:
            text, stats = session.generate(prompt, 30)
            got = text, stats.matched_at, stats.offered_at
            assert want in (None, got) and (stats.reused_tokens > 500) == (i > 0)
            want = got
            session.runner.prefill(PROMPT)
            with closing(session.runner.snapshot()) as kept:
                drafts = session.runner.fused_step().tokens.tolist()
                session.runner.reset()
                session.runner.restore(kept)
                assert session.runner.fused_step().tokens.tolist() == drafts


@native
def test_slots_share_prompts_of_a_recurrent_drafter(files, tmp_path):
    """What a prefix cache, turns and several slots leave in its states is what a prompt computed anew leaves."""
    draft, first = WRITERS["qwen35"](tmp_path / "d.gguf", Shape(), "Q8_0", seed=1), list(range(30, 230))
    with ps.load(files[0], draft, device="CPU", threads=1, n_ctx=1024, draft_width=4) as session:
        with session.concurrent(slots=3) as server:
            texts = [server.submit(first + [40 + i] * i, 30, ignore_end=True).result() for i in range(3)]
            turns = [server.submit([*first, 50 + i], 30, ignore_end=True) for i in range(6)]
            turns = [handle.result() for handle in turns]
            assert sum(stats.reused_tokens for _, stats in (*texts, *turns)) > 500
        for i, (text, stats) in enumerate(texts + turns):
            prompt = first + ([40 + i] * i if i < 3 else [50 + i - 3])
            want, alone = session.generate(prompt, 30, ignore_end=True)
            assert text == want and (stats.matched_at, stats.offered_at) == (alone.matched_at, alone.offered_at), i


@pytest.mark.parametrize("arch, columns", [("qwen3", 512), ("qwen4exp", 1024)])
def test_a_small_model_reads_the_prompts_mask_too(files, tmp_path, monkeypatch, arch, columns):
    """One with an indexer adds the mask to scores of all rows."""
    monkeypatch.setattr(Backend, "narrow_masks", property(lambda self: True, lambda self, value: None), raising=False)
    draft = WRITERS[arch](tmp_path / "d.gguf", Shape(), "Q8_0", seed=1)
    with ps.load(files[0], draft, device="CPU", threads=1, kernels="ggml", n_ctx=1280, chunk=64, draft_width=4) as session:
        graphs = session.runner.graphs
        graph = graphs.build(graphs.key("prefill", 64, 1024)).graph
        nodes = [lib.ggml_graph_node(graph.gf, i) for i in range(graph.n_nodes)]
        assert {node.src[3].ne[0] for node in nodes if text(lib.ggml_op_desc(node)) == "FLASH_ATTN_EXT"} == {columns}


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(WRITERS))
def test_random_models_of_every_architecture_draft(tmp_path, arch):
    target, draft = write_llama(tmp_path / "t.gguf", Shape(), "Q8_0"), WRITERS[arch](tmp_path / "d.gguf", Shape(), "Q8_0", seed=3)
    try:
        session = ps.load(target, draft, **OPTIONS, draft_width=4)
    except ModelError as error:
        assert "do not draft as a whole model here yet" in str(error)
        return
    with session:
        plain, (text, stats) = session.generate(PROMPT, 24, mode="plain")[0], session.generate(PROMPT, 24)
        assert stats.drafted > 0 and stats.nan_drafts == 0
        assert text == plain or not session.batch_invariant


def test_what_is_refused(files, tmp_path):
    with pytest.raises(PairError, match=r"d.gguf drafts as draft-simple, which needs its target on one device: name one with `device`"):
        ps.load(*files, device="CPU,CPU", threads=1, n_ctx=256)
    with pytest.raises(PairError, match="both draft as whole models; name one"):
        ps.load(files[0], [files[1], files[1]], **OPTIONS)


@native
def test_it_stands_beside_an_mtp_layer_and_ngrams(tmp_path):
    target = write_mtp_target(tmp_path / "t.gguf", Shape(), "Q8_0")
    draft = write_gemma4(tmp_path / "d.gguf", Shape(), "Q8_0")
    spec = ["draft-simple", "draft-mtp", "suffix"]
    with ps.load(target, draft, **OPTIONS, spec=spec) as session:
        assert session.methods == tuple(spec)
        engine = session.runner
        engine.prefill(PROMPT)
        tokens = list(PROMPT)
        for i in range(24):  # in turn, with other rows accepted
            result = engine.fused_step(4, drafter=spec[i % 2])
            count = 1 + i % 3
            tokens += result.tokens[:count].tolist()
            engine.accept(count, int(result.ids[count - 1]))
        drafts = {
            method: engine.fused_step(4, drafter=method).tokens.tolist() for method in spec[:2] if engine.rollback(len(tokens)) is None
        }
        last = engine.cursor.last_token
        for method, found in drafts.items():
            engine.reset()
            engine.prefill(tokens)
            engine.choose(last)
            assert engine.fused_step(4, drafter=method).tokens.tolist() == found
        assert session.generate(PROMPT * 3, 40)[0] == session.generate(PROMPT * 3, 40, mode="plain")[0]


def test_inspect_and_doctor_say_what_the_vocabularies_share(files, tmp_path):
    lost = set(range(256, 300))
    draft = other_vocabulary(files[1], tmp_path / "d.gguf", np.arange(320)[::-1], drop=lost)
    words = "it has 86.2 % of the target's first 320 tokens; the most frequent ones that it lacks: '  ', '<filler_0>'"
    done = pyspec("inspect", draft, "--target", files[0], "--no-tensors")
    assert f"as a drafter of {files[0]}: {words}" in done.stdout.decode()
    assert json.loads(pyspec("inspect", draft, "--target", files[0], "--json").stdout)["vocabulary"].startswith(words)
    with GGUFFile(files[0]) as target, GGUFFile(draft) as other, GGUFFile(files[1]) as same:
        check = tokenizer(target, other)
        assert (check.verdict, tokenizer(target, same).verdict) == (WARN, OK) and words in check.found
    report = examine(files[0], files[1], device="CPU", threads=1)
    assert not [check for check in report.checks if check.verdict == FAIL]


def test_bytes_of_tokens_are_libllamas():
    with GGUFFile(DEMO_TARGET) as file, closing(Tokenizer(file)) as tokenizer:
        ours = _tokens(file, file.metadata[TOKENS])
        assert [raw for _, raw in ours] == tokenizer.pieces() and sum(control for control, _ in ours) == len(tokenizer.control_tokens())
