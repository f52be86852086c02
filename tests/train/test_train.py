"""`pyspec train` on a toy target whose text was chosen beforehand: its answers are known, so that a drafter that learns them is right nearly always."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import scripted

torch = pytest.importorskip("torch", reason="training needs the extra `train`: `make test-train` installs it")

import pyggml_spec.train  # noqa: E402
from pyggml_spec.api import load  # noqa: E402
from pyggml_spec.chat import chat_template  # noqa: E402
from pyggml_spec.errors import ModelError, PyspecError, TrainingError  # noqa: E402
from pyggml_spec.gguf_io import GGUFFile  # noqa: E402
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_MTP, DEMO_TARGET  # noqa: E402
from pyggml_spec.models.registry import open_drafter, open_target  # noqa: E402
from pyggml_spec.tools.compare import TEXT as SAMPLE  # noqa: E402
from pyggml_spec.train.blank import Shape, new_drafter  # noqa: E402
from pyggml_spec.train.features import EngineTarget, TorchTarget, agreement  # noqa: E402
from pyggml_spec.train.generate import TURNS, answers  # noqa: E402
from pyggml_spec.train.methods import method_of, simulate  # noqa: E402
from pyggml_spec.train.muon import Muon  # noqa: E402
from pyggml_spec.train.texts import Text, as_line, read_texts  # noqa: E402
from pyggml_spec.train.train import TrainOptions, train  # noqa: E402
from pyggml_spec.train.trainer import Schedule, Score, Trainer  # noqa: E402
from pyggml_spec.train.weights import new_weights, read_weights  # noqa: E402

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps below 7 old trees until the morning comes; a bird sings 3 songs of rain, wind & snow."
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two workers on two cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A target that says TEXT, from wherever the prompt leaves off."""
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    scripted.write(path, [TEXT], None, control=["<|mask|>"])
    return path


@pytest.fixture(scope="module")
def prompts(toy) -> Path:
    path = toy.with_name("prompts.jsonl")
    lines = [{"prompt": TEXT[:n], "category": "even" if n % 2 == 0 else "odd"} for n in range(3, 63, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(prompts: Path, **more) -> TrainOptions:
    usual = {"minutes": 0.2, "answer_tokens": 40, "slots": 4, "context": 64, "batch_tokens": 512, "rate": 5e-3, "torch_device": "cpu"}
    return TrainOptions([prompts], **usual | more)


def until(goal: float) -> dict:
    """Ends a training early: the machine may be busy, and the clock decides."""
    seen = [0.0]
    return {"report": lambda state: seen.append(state.best), "interrupted": lambda: seen[-1] > goal}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_a_drafter_from_noise_drafts_in_the_engine_as_simulated(toy, prompts, tmp_path, method):
    out = tmp_path / "drafter.gguf"
    done = train(toy, out, options(prompts, shape=Shape(method, 1, 8, 64), minutes=1.0), **until(4.5))
    assert done.before.tokens_per_step < 1.5 and done.score.tokens_per_step > 4
    assert {*done.score.categories} <= {"even", "odd"} and "tokens/step" in out.with_suffix(".md").read_text()
    with load(toy, out, draft_width=6) as session:
        _, stats = session.generate(TEXT[:9], 36, ignore_end=True)
    assert 1 + stats.matched / stats.steps == pytest.approx(min(done.score.tokens_per_step, 6.0), rel=0.25)


@pytest.mark.slow
def test_an_interrupted_training_writes_its_best_and_goes_on(toy, prompts, tmp_path):
    out, seen = tmp_path / "drafter.gguf", []
    shape = Shape("dflash", 1, 8, 64)
    first = train(toy, out, options(prompts, shape=shape, minutes=1.0), report=seen.append, interrupted=lambda: len(seen) > 2)
    assert out.exists() and first.seconds < 55
    state = torch.load(tmp_path / "drafter.gguf.train/state.pt", weights_only=True)["state"]
    said: list[str] = []
    again = train(toy, out, options(prompts, shape=shape, minutes=0.1, resume=True), say=said.append)
    assert any("goes on after" in line for line in said) and not any("answers of the target" in line for line in said)
    assert not (tmp_path / "drafter.gguf.train/state.pt").exists()
    assert again.seconds >= state["seconds"] and again.curve[: len(state["curve"])] == [tuple(point) for point in state["curve"]]
    torch.save({"state": state, "values": {}, "optimizer": {}}, tmp_path / "drafter.gguf.train/state.pt")
    with pytest.raises(TrainingError, match="another shape"):
        train(toy, out, options(prompts, shape=shape, resume=True))


def test_torch_and_the_engine_compute_the_same_hidden_states():
    """Of the embedded target, whose layers are delta nets and attention."""
    layers = (1, 4, 8)
    with load(DEMO_TARGET, spec=["none"], kernels="ggml", n_ctx=512) as session, GGUFFile(DEMO_TARGET) as file:
        target = TorchTarget(open_target(file), layers, CPU, torch.float32)
        ids = session.tokenizer.encode(SAMPLE)[:96]
        found = agreement(session, target, ids)
        assert found.greedy >= 0.97 and found.distance < 0.03
        tokens = torch.tensor([ids[:48], ids[48:]])
        ours, theirs = target.states(tokens), EngineTarget(session, open_target(file), layers, CPU, torch.float32).states(tokens)
        for mine, other in zip((ours.hidden, *ours.features), (theirs.hidden, *theirs.features), strict=True):
            assert float((mine - other).norm() / other.norm()) < 0.03


def test_torch_answers_as_the_engine_does(toy, prompts):
    """Greedily, prompts of several lengths at once; sampled answers of a model that is sure of its text are the same."""
    with load(toy, spec=["none"]) as session, GGUFFile(toy) as file:
        target = TorchTarget(open_target(file), (), CPU, torch.float32)
        _, asked = read_texts([prompts], session, chat_template(session)[0], 64)
        ends = [i for i in range(session.target.n_vocab) if session.tokenizer.is_end(i)]
        made = [*answers(target, asked, 24, 64, ends, 0, 1 << 30, lambda: False)]
        assert len(made) == TURNS * len(asked) and sum(text.temperature == 0 for text in made) == len(asked)
        assert len([*answers(target, asked, 24, 64, ends, 0, 100, lambda: False)]) == len(asked)
        for text in made[:8]:
            given = text.tokens[: text.prompt_tokens]
            session.runner.reset()
            out = [token for event in session.steps(given, 24) for token in event.tokens]
            assert [*text.tokens[text.prompt_tokens :]][: len(out)] == out[: len(text.tokens) - text.prompt_tokens]


@pytest.mark.parametrize("path", [DEMO_DRAFTER, DEMO_MTP])
def test_simulated_acceptance_is_the_engines(path):
    with load(
        DEMO_TARGET, path, draft_width=6, kernels="ggml", n_ctx=512, spec=["draft-mtp" if path == DEMO_MTP else "draft-dflash"]
    ) as session:
        ids, stats = session.tokenizer.encode("def mean(values):\n"), session.new_stats()
        out = [token for event in session.steps(ids, 48, ignore_end=True, stats=stats) for token in event.tokens]
    with GGUFFile(DEMO_TARGET) as file, GGUFFile(path) as drafts:
        decoder, drafter = open_target(file), open_drafter(drafts, file)
        drafter.check_pair(decoder)
        values = read_weights(drafter, CPU, torch.float32).values
        method = method_of(drafter, TorchTarget(decoder, drafter.captures, CPU, torch.float32))
        text = Text((*ids, *out), len(ids))
        trainer = Trainer(method, values, [text], [text], Schedule(1), CPU)
        with torch.no_grad():
            matched = method.matched(trainer.batch([text]))[0].numpy()
    steps = simulate(matched, len(ids), len(text.tokens), 5)
    assert 1 + sum(steps) / len(steps) == pytest.approx(1 + stats.matched / stats.steps, rel=0.1)


def test_refusals_name_the_remedy(toy, prompts, tmp_path):
    with GGUFFile(toy) as file, pytest.raises(ModelError, match="dflash or eagle3"):
        new_drafter(open_target(file), Shape("mtp"))
    with pytest.raises(TrainingError, match="name files"):
        train(toy, tmp_path / "a.gguf", options(tmp_path / "nothing.jsonl"))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"tokens": [1, 2, 1000000], "prompt_tokens": 1}\n')
    with pytest.raises(TrainingError, match="of this vocabulary"):
        train(toy, tmp_path / "a.gguf", options(wrong))
    (tmp_path / "there.gguf").touch()
    with pytest.raises(PyspecError, match="exists"):
        train(toy, tmp_path / "there.gguf", options(prompts))


def test_torch_behind_ggml_is_refused(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtorch_cuda.so").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    importlib.reload(pyggml_spec.train)  # torch is there already
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(TrainingError, match="import torch before"):
        importlib.reload(pyggml_spec.train)


def test_texts_that_are_learnt_end_a_training_early(toy, monkeypatch):
    """The best state goes on at a small rate that falls to nothing; where acceptance never rose, the time is used up."""
    with GGUFFile(toy) as file:
        decoder = open_target(file)
        drafter = new_drafter(decoder, Shape("dflash", 1, 8, 64))
        target = TorchTarget(decoder, drafter.captures, CPU, torch.float32)
        values = new_weights(drafter, decoder.weights["output.weight"].value, CPU, 0).values
        text = Text((*range(20),), 4)
        for scores, minutes, early in (([1.0, 1.5, 2.0, 1.9], 0.1, True), ([1.0, 1.02, 1.0], 0.03, False)):
            trainer, left = Trainer(method_of(drafter, target), values, [text], [text], Schedule(minutes, 1e-3), CPU), iter(scores)
            norm = trainer.values["output_norm.weight"]

            def score(texts=None):
                with torch.no_grad():
                    norm.fill_(one := next(left, scores[-1]))  # what was validated
                return Score(one, 1)

            monkeypatch.setattr(trainer, "score", score)
            state = trainer.run(lambda report: None)
            assert (state.annealing is not None) == early == (state.seconds < 50 * minutes) and state.best == max(scores)
            assert norm[0].item() == pytest.approx(max(scores), abs=0.01)


def test_muon_steps_as_torchs_does():
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 24), (24, 8), (8, 24), (16, 16)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    steps = Muon(ours, 0.01, 0.1), torch.optim.Muon(theirs, 0.01, 0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for mine, other in zip(ours, theirs):
            mine.grad = other.grad = torch.randn(mine.shape, generator=generator)
        for optimizer in steps:
            optimizer.step()
    for mine, other, was in zip(ours, theirs, start):
        assert float((mine - other).detach().norm()) < 0.02 * float((other - was).detach().norm())


def test_steps_walk_over_a_text():
    assert simulate([9, 9, 2, 0, 0, 1, 0, 0, 9], 2, 8, 3) == [2, 1]


@pytest.mark.slow
def test_an_mtp_layer_learns_records_and_runs_beside_its_target(pair, tmp_path):
    """Of a random target: its greedy text from several places on, as a server would have kept it."""
    data, out = tmp_path / "records.jsonl", tmp_path / "mtp.gguf"
    with load(pair[0], spec=["none"]) as session:
        made = (7, *(t for event in session.steps([7], 50, ignore_end=True) for t in event.tokens))
    data.write_text("".join(as_line(Text(made, given, "record", 0.0)) for given in range(1, 13)))
    done = train(pair[0], out, options(data, shape=Shape("mtp"), batch_tokens=256, minutes=1.0), **until(1.4))
    assert done.score.tokens_per_step > done.before.tokens_per_step + 0.3
    with load(pair[0], out, spec=["draft-mtp"], draft_width=4) as session:
        _, stats = session.generate([7], 48, ignore_end=True)
    assert stats.matched > 0
