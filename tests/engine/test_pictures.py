"""Prompts with rows of pictures: logits against llama.cpp's over the same rows, drafts, chunk borders, slots and the prefix cache."""

from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf_io.build import Model
from llama_oracle import LlamaDFlash, logits_with_pictures
from pairs import write_pair
from random_gguf.adapter import write_adapter
from random_gguf.archs import WRITERS
from random_gguf.described import write_described
from random_gguf.model import Shape
from random_gguf.mtp import write_mtp_target
from sessions import fails_with

from pyggml_spec.engine.engine import Engine, generate
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.prompt import Picture, Prompt, row_ids
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import ContextError, EngineError
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.models.adapters import Adapters
from pyggml_spec.models.registry import embedded_drafter, open_drafter, open_target
from pyggml_spec.models.weights import Weights
from pyggml_spec.text.tokenizer import Tokenizer

TINY = Shape(n_ff=128)
CODE = "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n    smaller = [item for item in items[1:] if item < pivot]\n"


def picture(seed, across, down, size, by_axis=False, both_ways=False):
    """A random one of ``across`` x ``down`` rows."""
    n = across * down
    rows = np.random.default_rng(seed).standard_normal((n, size), np.float32)
    positions = np.zeros((4, n), np.int64)
    positions[1], positions[2] = np.arange(n) // across, np.arange(n) % across
    places = (positions, max(across, down)) if by_axis else (None, n)
    return Picture(row_ids(b"%d" % seed, n), rows, *places, both_ways)


def text(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def loaded(stack, path, draft=None, kernels="ggml", adapter=None, device="CPU", **options):
    def own(part):
        stack.callback(part.close)
        return part

    backend, file = own(Backend(pick_device(device), 1, kernels)), own(GGUFFile(path))
    target = open_target(file)
    drafter = None
    if draft == path:
        drafter = embedded_drafter(file)
    elif draft is not None:
        drafter = open_drafter(own(GGUFFile(draft)), file)
    for model in (target, drafter) if drafter is not None else (target,):
        if model is not None:
            model.weights = own(Weights(backend, model.file, model.specs(), model.groups(), model.fused_alike()))
    if adapter is not None:
        target.weights.adapters = Adapters(backend, target, [(adapter, 1.0)])
    if drafter is not None:
        drafter.check_pair(target)
    return own(ModelRunner(backend, target, drafter, EngineOptions(**{"n_ctx": 1024, "pictures": True, "width": 8, **options})))


SECTIONS = {"rope.dimension_sections": np.array([8, 12, 12, 0])}
FAMILIES = {  # (writer of a file, positions by axis, rows that see each other)
    "llama": (lambda path, quant: WRITERS["llama"](path, TINY, quant), False, False),
    "gemma3": (lambda path, quant: write_described("gemma3", path, TINY, quant), False, True),
    "gemma4": (lambda path, quant: WRITERS["gemma4"](path, TINY, quant), False, True),
    "qwen3vl": (lambda path, quant: write_described("qwen3vl", path, TINY, quant, keys={"n_deepstack_layers": 2}), True, False),
    "granite": (lambda path, quant: write_described("granite", path, TINY, quant, keys={"embedding_scale": 1.7}), False, False),
    "muse-glimmer": (lambda path, quant: WRITERS["muse-glimmer"](path, TINY, quant), False, False),
    "qwen35": (lambda path, quant: WRITERS["qwen35"](path, TINY, quant), True, False),
    "qwen2vl": (lambda path, quant: write_described("qwen2vl", path, TINY, quant), True, False),
    "glm4": (lambda path, quant: write_described("glm4", path, TINY, quant, keys=SECTIONS), True, False),
    "glm4moe": (lambda path, quant: write_described("glm4moe", path, TINY, quant, keys=SECTIONS), True, False),
    "mistral3": (lambda path, quant: write_described("mistral3", path, TINY, quant), False, False),
}


@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_behind_pictures_equal_llama_cpp(tmp_path, family, quant):
    """Two pictures in text: every row's logits bit for bit, and the greedy text after them."""
    write, by_axis, both_ways = FAMILIES[family]
    path = write(tmp_path / "t.gguf", quant)
    with ExitStack() as stack:
        runner = loaded(stack, path)
        size = runner.target.n_embd * (1 + runner.target.deepstack)
        parts = [text(9), picture(1, 7, 5, size, by_axis, both_ways), text(21, 1), picture(2, 3, 8, size, by_axis, both_ways), text(5, 2)]
        prompt = Prompt(parts)
        expected, ids = logits_with_pictures(path, parts, greedy=8)
        assert np.array_equal(runner.logits(prompt), expected)  # in chunks of llama.cpp's shape, by which ggml's kernels round
        for token in ids:
            assert runner.cursor.last_token == token
            runner.accept(1, int(runner.plain_step().ids[0]))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3vl"])
def test_adapters_change_rows_of_pictures(tmp_path, family):
    write, by_axis, both_ways = FAMILIES[family]
    path = write(tmp_path / "t.gguf", "F32")
    adapter = write_adapter(tmp_path / "a.gguf", path, seed=1)
    with ExitStack() as stack:
        runner = loaded(stack, path, adapter=adapter)
        size = runner.target.n_embd * (1 + runner.target.deepstack)
        parts = [text(9), picture(1, 7, 5, size, by_axis, both_ways), text(21, 1)]
        plain, _ = logits_with_pictures(path, parts)
        expected, _ = logits_with_pictures(path, parts, adapter=adapter)
        runner.slots[0].adapters = ((0, 1.0),)
        assert np.array_equal(runner.logits(Prompt(parts)), expected) and not np.array_equal(plain, expected)


def tokens_of(runner, prompt, n, mode=PLAIN, **more):
    runner.reset()
    return [t for block in generate(runner, prompt, GenerationOptions(n, mode, 8), **more) for t in block]


def mixed(runner, by_axis, both_ways, seed=0):
    size = runner.target.n_embd * (1 + runner.target.deepstack)
    parts = [
        text(9, seed),
        picture(1 + seed, 7, 5, size, by_axis, both_ways),
        text(70, seed + 1),
        picture(2, 6, 6, size, by_axis, both_ways),
    ]
    return Prompt([*parts, text(5, seed + 2)])


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_may_end_within_pictures(tmp_path, family):
    """Whatever the chunk: those that see both ways are never cut, others are."""
    write, by_axis, both_ways = FAMILIES[family]
    path, texts = write(tmp_path / "t.gguf", "Q8_0"), []
    for chunk in (512, 40):
        with ExitStack() as stack:
            runner = loaded(stack, path, kernels="native", chunk=chunk)
            texts.append(tokens_of(runner, mixed(runner, by_axis, both_ways), 24))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("pair", ["qwen35", "mtp", "peagle", "eagle3"])
def test_drafts_after_pictures(tmp_path, pair):
    """Speculative text is plain text, and drafts are those of llama.cpp's DFlash over the same rows."""
    target, draft = write_pair(tmp_path, pair, TINY)
    with ExitStack() as stack:
        runner = loaded(stack, target, draft)
        prompt = mixed(runner, runner.target.by_axis, False)
        first = tokens_of(runner, prompt, 40)
        runner.reset()
        stats = Stats()
        blocks = list(generate(runner, prompt, GenerationOptions(40, SPECULATIVE, 8), stats))
        assert [t for block in blocks for t in block] == first and stats.drafted
        if pair != "qwen35":
            return
        with closing(LlamaDFlash(target, draft, runner.drafter.captures, runner.drafter.hp.mask_token, block=8)) as theirs:
            runner.reset()
            assert runner.prefill(prompt) == theirs.prefill_parts(prompt.parts)
            for _ in range(4):
                out = runner.fused_step(8)
                assert out.tokens[1:].tolist() == theirs.draft(8)
                ids, matched = theirs.verify(out.tokens[1:].tolist())
                assert out.ids.tolist() == ids.tolist()
                runner.accept(matched + 1, int(ids[matched]))


def as_picture(file, tokens):
    """The embeddings of tokens at their own positions as the rows of a picture: what a model makes of it is what it makes of the tokens."""
    info, n = file.tensors["token_embd.weight"], len(tokens)
    with file.read("token_embd.weight") as data:
        rows = np.frombuffer(data, np.uint8).reshape(info.shape[1], -1)[tokens]
    rows = dequantize(rows.view(np.float32) if info.type_name == "f32" else rows, GGMLQuantizationType(info.type))
    positions = np.arange(n) * np.ones((4, 1), np.int64)
    return Picture(row_ids(b"tokens", n), rows.astype(np.float32), positions, n)


def behind_rows_of_tokens(stack, folder, pair, device="CPU"):
    """Text, numbers of drafts and of accepted ones, their shares by position, and rows from the prefix cache: of tokens, of a picture of the same embeddings, and of that one again."""
    target, draft = (DEMO_TARGET, DEMO_DRAFTER) if pair == "embedded" else write_pair(folder, pair, TINY)
    runner = loaded(stack, target, draft, kernels="native" if device == "CPU" else None, device=device, chunk=64, slots=2)
    tokens = text(90) if pair != "embedded" else stack.enter_context(closing(Tokenizer(runner.target.file))).encode(CODE)
    n = len(tokens) // 2
    shown = Prompt([tokens[:9], as_picture(runner.target.file, tokens[9:n]), tokens[n:]])
    engine, seen = Engine(runner, 8, prefix_memory=1 << 26), []
    for prompt in (tokens, shown, shown):
        sequence = engine.submit(prompt, GenerationOptions(60, SPECULATIVE, 8))
        engine.run()
        stats = sequence.stats
        seen.append((sequence.tokens, (stats.drafted, stats.matched, stats.matched_per_position), stats.reused_tokens))
    return seen


@pytest.mark.parametrize("pair", ["qwen35", "mtp", "peagle", "eagle3", "embedded"])
def test_drafts_behind_rows_of_tokens(tmp_path, pair):
    """Tokens, and a picture of the same embeddings: the same text, drafts and acceptance; also with both from the prefix cache."""
    with ExitStack() as stack:
        seen = behind_rows_of_tokens(stack, tmp_path, pair)
    assert seen[0][:2] == seen[1][:2] == seen[2][:2] and seen[0][1][0] > 0 and seen[2][2] > 9
    if pair == "embedded":
        assert seen[0][1][1] > 20


def write_scripted_mtp(folder):
    """A qwen35 target that says one cycle of its tokens, and an MTP layer that reads the next one but one from the state of the row before, for seven of ten tokens."""
    n, rng = 320, np.random.default_rng(4)
    model = Model(write_mtp_target(folder / "random.gguf", replace(TINY, n_embd=n, n_layer=2, every=2)))
    order, near, far = rng.permutation(n), np.zeros((n, n), np.float32), np.zeros((n, n), np.float32)
    near[np.roll(order, -1), order] = 1
    far[np.where(rng.random(n) < 0.7, np.roll(order, -1), 0), order] = 1
    made = {"token_embd": np.eye(n, dtype=np.float32), "output": 60 * near, "blk.2.nextn.eh_proj": np.concatenate([np.eye(n) / 4, far], 1)}
    for name, (shape, kind, _) in model.tensors.items():
        values = made.get(name.removesuffix(".weight"))
        if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            values = np.zeros(shape)
        elif "norm" in name and len(shape) == 1:
            values = np.ones(shape)
        if values is not None:
            assert kind == 0
            model.tensors[name][2] = values.astype(np.float32).tobytes()
    return model.write(folder / "t.gguf")


def test_acceptance_behind_pictures_is_what_it_was_before(tmp_path):
    """Of a scripted pair: behind text, behind a picture, between pictures, and with those from the prefix cache."""
    path, seen = write_scripted_mtp(tmp_path), []
    with ExitStack() as stack:
        engine = Engine(loaded(stack, path, path, kernels="native", chunk=64, slots=2), 8, prefix_memory=1 << 26)
        first, second = picture(1, 7, 9, 320, True), picture(2, 12, 12, 320, True)
        for parts in (
            [text(100), [7]],
            [first, [7]],
            [text(9), first, text(20, 1), second, [7]],
            [text(9), first, text(20, 1), second, [7]],
        ):
            sequence = engine.submit(Prompt(parts), GenerationOptions(100, SPECULATIVE, 8))
            engine.run()
            stats = sequence.stats
            seen.append((sequence.tokens[-100:], stats.drafted, stats.matched))
        assert stats.reused_tokens > 150
    assert seen[0] == seen[1] == seen[2] == seen[3] and 0.2 < seen[0][2] / seen[0][1] < 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_with_and_without_pictures_share_a_buffer(tmp_path, family):
    """The second one was as large as the first."""
    with ExitStack() as stack:
        graphs = loaded(stack, FAMILIES[family][0](tmp_path / "t.gguf", "F32")).graphs
        assert graphs.compute_bytes == graphs.roles["prefill of pictures"].buffer_bytes > graphs.roles["prefill"].buffer_bytes == 0


def test_slots_with_and_without_pictures(tmp_path):
    """Requests with pictures share steps with others, and each gets the text that it gets alone."""
    write, by_axis, both_ways = FAMILIES["qwen3vl"]
    path = write(tmp_path / "t.gguf", "Q8_0")
    with ExitStack() as stack:
        alone = loaded(stack, path, kernels="native")
        prompts = [mixed(alone, by_axis, both_ways, seed) for seed in range(3)] + [Prompt([text(40, 7)]), Prompt([text(100, 8)])]
        expected = [tokens_of(alone, prompt, 20) for prompt in prompts]
        engine = Engine(loaded(stack, path, kernels="native", slots=4), prefix_memory=1 << 26)
        sequences = [engine.submit(prompt, GenerationOptions(20, PLAIN)) for prompt in prompts]
        engine.run()
        assert [s.tokens for s in sequences] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_in_the_prefix_cache(tmp_path, family):
    """The next turn does not compute a picture again, and has the same text; another picture of the same size is not taken for it."""
    write, by_axis, both_ways = FAMILIES[family]
    path = write(tmp_path / "t.gguf", "Q8_0")
    with ExitStack() as stack:
        alone = loaded(stack, path, kernels="native", chunk=64)
        size = alone.target.n_embd * (1 + alone.target.deepstack)
        first, other = (Prompt([text(9), picture(seed, 12, 12, size, by_axis, both_ways), text(60, 4)]) for seed in (1, 3))
        if both_ways:
            first, other = (Prompt([text(9), picture(seed, 8, 8, size, by_axis, both_ways), text(140, 4)]) for seed in (1, 3))
        second, third = Prompt([first, text(30, 5)]), Prompt([other, text(30, 5)])
        engine = Engine(loaded(stack, path, kernels="native", slots=2, chunk=64), prefix_memory=1 << 26)
        for prompt, reused in ((first, 0), (second, 150), (third, 0)):
            sequence = engine.submit(prompt, GenerationOptions(12, PLAIN))
            engine.run()
            assert sequence.tokens == tokens_of(alone, prompt, 12)
            assert sequence.stats.reused_tokens >= reused if reused else sequence.stats.reused_tokens <= 9


def test_refusals(tmp_path):
    path = FAMILIES["gemma3"][0](tmp_path / "t.gguf", "F32")
    with ExitStack() as stack:
        runner = loaded(stack, path, chunk=32)
        size = runner.target.n_embd
        engine = Engine(runner, 1)
        for part, error, words in (
            (picture(1, 7, 5, size, both_ways=True), ContextError, "35 rows that see each other .* raise `chunk` from 32"),
            (picture(1, 2, 2, size + 1), EngineError, "use the encoder that was made for it"),
        ):
            fails_with(error, words, engine.submit, Prompt([text(3), part, text(2)]), GenerationOptions(1, PLAIN))
        broken = Prompt([text(3), picture(1, 2, 2, size), text(2)])
        broken[4] = -5
        fails_with(ContextError, "not those of its pictures", engine.submit, broken, GenerationOptions(1, PLAIN))
        fails_with(ContextError, "outside the vocabulary", engine.submit, [1, -5, 2], GenerationOptions(1, PLAIN))
    with ExitStack() as stack:
        engine = Engine(loaded(stack, path, pictures=False), 1)
        fails_with(
            EngineError,
            "load the model with `mmproj`",
            engine.submit,
            Prompt([text(3), picture(1, 2, 2, size)]),
            GenerationOptions(1, PLAIN),
        )
