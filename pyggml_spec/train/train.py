"""Training from files to file: texts, features, training, export."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..api import Progress, Session, load
from ..chat import chat_template
from ..drafters.base import Drafter
from ..errors import TrainingError
from ..gguf_io import GGUFFile
from ..load_options import LoadOptions
from ..models.registry import open_drafter, open_target
from ..tools.compare import TEXT
from .blank import Shape, new_drafter
from .export import export
from .features import LEAST_AGREEMENT, WORST_DISTANCE, Agreement, EngineTarget, Pool, Target, TorchTarget, agreement
from .generate import TURNS, answers
from .methods import method_of
from .texts import Text, answer, as_line, read_texts, split
from .trainer import Report, Schedule, Score, Trainer
from .weights import new_weights, read_weights

RATE, ADAPTED = 2e-3, 2e-4  # peak learning rates: of new drafters, and of ones that go on
BY_TORCH, BY_ENGINE = 8_000_000, 3_000_000  # tokens of answers, some two and six minutes
BATCH = {"cuda": 16384, "cpu": 1024}  # tokens of a step: fewer do not fill a GPU
REPLAY = 0.2  # share of other texts against forgetting
CONTEXT = 768  # tokens of a text


@dataclass(frozen=True)
class TrainOptions:
    """Attributes:
    data: files and folders of prompts, chats or plain text; ``replay``: the same, mixed in at REPLAY of the texts against forgetting.
    start: drafter to go on from; None for a new one of ``shape``.
    minutes: of training, without answers and validation before it.
    kind: type of the drafter's matrices in the file.
    answer_tokens, answers: limits of one answer, and of all of them together; 0 for BY_TORCH, as far as memory holds their hidden states, or BY_ENGINE.
    slots: answers at once.
    context: tokens of a text.
    rate: peak learning rate; 0 for RATE, or ADAPTED with ``start``.
    batch_tokens: of a step of training; 0 for BATCH.
    features: "torch", "engine", or "auto" for torch where it agrees with the engine.
    torch_device: "cuda" or "cpu"; None for a GPU if torch sees one.
    resume: go on from the state that an interrupted training left.
    """

    data: Sequence[str | Path]
    replay: Sequence[str | Path] = ()
    start: str | Path | None = None
    shape: Shape = field(default_factory=Shape)
    minutes: float = 20.0
    kind: str = "q8_0"
    answer_tokens: int = 256
    answers: int = 0
    slots: int = 64
    context: int = CONTEXT
    rate: float = 0.0
    batch_tokens: int = 0
    features: str = "auto"
    torch_device: str | None = None
    seed: int = 0
    resume: bool = False
    replace: bool = False


@dataclass
class Trained:
    """What was made. ``notes``: sentences; ``curve``: (minutes, tokens per step, loss)."""

    path: str
    nbytes: int
    score: Score
    before: Score
    curve: list[tuple[float, float, float]]
    seconds: float
    tokens_per_second: float
    memory: int
    agreement: Agreement | None
    texts: Counter
    notes: list[str] = field(default_factory=list)


def state_folder(out: Path) -> Path:
    """Where answers and the state of a training are kept until it is complete."""
    return out.with_name(f"{out.name}.train")


def train(
    target: str | Path, out: str | Path, options: TrainOptions, load_options: LoadOptions | None = None, *,
    progress: Progress = lambda what, done, total: None, report: Callable[[Report], None] = lambda report: None,
    say: Callable[[str], None] = lambda text: None, interrupted: Callable[[], bool] = lambda: False,
) -> Trained:  # fmt: skip
    """Trains a drafter for ``target`` and writes it to ``out``, with a card.

    Args:
        report: called after validations, and between them.
        say: called with sentences on what is done.
        interrupted: True ends answers, then training; the best drafter so far is written.

    Raises:
        TrainingError: no texts, a state of another training, or a loss that is not finite; ``out`` exists.
        ModelError, PairError: a method that this target does not have, or a drafter for another one.
        ConvertError: ``out`` cannot be written.
    """
    out, folder, load_options = Path(out), state_folder(Path(out)), load_options or LoadOptions()
    if out.exists() and not (options.resume or options.replace):
        raise TrainingError(f"{out} exists; name another output, or `replace` it")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    device = torch.device(options.torch_device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(options.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, for some 40 ms
    with ExitStack() as stack:
        session = stack.enter_context(
            load(target, options=replace(load_options, spec=["none"], n_ctx=load_options.n_ctx or 2048), progress=progress)
        )
        file = stack.enter_context(GGUFFile(target))
        decoder = open_target(file)
        drafter = new_drafter(decoder, options.shape) if options.start is None else _opened(stack, options.start, file, decoder)
        source, agreed = _features(session, decoder, drafter, options.features, device, say)
        texts = _texts(session, source, options, folder, progress, say, interrupted)
        learnt, held = split(texts)
        values = _weights(drafter, source, options, device)
        rate = options.rate or (RATE if options.start is None else ADAPTED)
        schedule = Schedule(options.minutes, rate, options.batch_tokens or BATCH[device.type])
        began = time.monotonic()
        trainer = Trainer(method_of(drafter, source), values, learnt, held, schedule, device, options.seed, folder / "state.pt")
        if trainer.pooled:
            say(f"hidden states of {sum(len(t.tokens) for t in texts):,} tokens are kept in memory after {time.monotonic() - began:.0f} s")
        if options.resume and (folder / "state.pt").exists():
            trainer.resume()
            say(f"goes on after {trainer.state.seconds / 60:.1f} minutes and {trainer.state.step} steps")
        before = trainer.score()
        if device.type == "cpu":
            say(_estimate(trainer))
        state = trainer.run(report, interrupted)
        score = trainer.score(held)
        speed = state.tokens / max(state.seconds, 1e-9)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        counts = Counter(text.category for text in texts)
        done = Trained(str(out), 0, score, before, state.curve, state.seconds, speed, memory, agreed, counts)
        summary = f"{drafter.method} drafter for {file.path.name}, trained {state.seconds / 60:.1f} minutes on {len(learnt)} texts by pyspec train"
        done.notes = export(out, drafter, values, file, options.kind, summary, replace=True, progress=progress)
        if state.annealing is not None:
            done.notes.append(
                f"acceptance rose no longer after {state.annealing / 60:.1f} minutes, and the best state was annealed: more texts than these {len(learnt)} help, more minutes do not"
            )
        done.nbytes = out.stat().st_size
        out.with_suffix(".md").write_text(card(done, drafter, file, options, learnt, held))
    if not interrupted():
        (folder / "state.pt").unlink(missing_ok=True)
    return done


def _opened(stack: ExitStack, path: str | Path, target: GGUFFile, decoder: Any) -> Drafter:
    drafter = open_drafter(stack.enter_context(GGUFFile(path)), target)
    drafter.check_pair(decoder)
    return drafter


def _weights(drafter: Drafter, target: Target, options: TrainOptions, device: torch.device) -> dict[str, torch.Tensor]:
    if options.start is None:
        return new_weights(drafter, target.decoder.weights["output.weight"].value, device, options.seed).values
    return read_weights(drafter, device, torch.float32).values


def _features(
    session: Session, decoder: Any, drafter: Drafter, wanted: str, device: torch.device, say: Callable[[str], None]
) -> tuple[Target, Agreement | None]:
    """Torch's or the engine's hidden states. Raises TrainingError: torch is asked for, and cannot compute them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if wanted != "engine":
        try:
            target = TorchTarget(decoder, drafter.captures, device, dtype)
            ids = session.tokenizer.encode(TEXT * 4)
            found = agreement(session, target, ids)
            say(
                f"torch and the engine agree on {found.greedy:.2%} of {found.tokens} greedy tokens, logits within {found.distance:.2%} (relative L2)"
            )
            if wanted == "torch" or (found.distance <= WORST_DISTANCE and found.greedy >= LEAST_AGREEMENT):
                return target, found
            say("that is too far apart: hidden states come from the engine")
        except (NotImplementedError, AttributeError, RuntimeError) as error:
            if wanted == "torch":
                raise TrainingError(f"torch cannot compute {decoder.arch} ({error}); use `features` engine") from None
            say(f"torch cannot compute {decoder.arch} ({error}): hidden states come from the engine")
    return EngineTarget(session, decoder, drafter.captures, device, dtype), None


def _texts(
    session: Session, target: Target, options: TrainOptions, folder: Path, progress: Progress, say: Callable[[str], None],
    interrupted: Callable[[], bool],
) -> list[Text]:  # fmt: skip
    """All texts, prompts answered; of an interrupted training the answers are read again."""
    template, origin = chat_template(session)
    kept = folder / "answers.jsonl"
    most = min(options.context, session.runner.options.n_ctx)
    if not options.resume:
        kept.unlink(missing_ok=True)
    done, asked = read_texts(options.data, session, template, most)
    if options.replay:
        others, more = read_texts(options.replay, session, template, most)
        share = REPLAY / (1 - REPLAY)
        done += others[: round(share * len(done))] if done else []
        asked += more[: round(share * len(asked))] if asked else []
    if asked and not (options.resume and kept.exists()):
        began, before, given = time.monotonic(), sum(len(t.tokens) for t in done), len(done)
        with open(kept, "x", encoding="utf-8") as lines:

            def keep(text: Text) -> None:
                lines.write(as_line(text))
                done.append(text)

            if isinstance(target, TorchTarget) and target.device.type == "cuda" and target.decoder.recurrent_shape() is None:
                ends = [i for i in range(session.target.n_vocab) if session.tokenizer.is_end(i)]
                room = Pool.capacity(target, len(target.layers), target.device) - before  # more would have to be computed for every step
                budget = max(1, min(options.answers or BY_TORCH, room))
                for text in answers(target, asked, options.answer_tokens, most, ends, options.seed, budget, interrupted):
                    keep(text)
                    progress("answers", len(done) - given, TURNS * len(asked))
            else:
                answer(
                    session, asked, options.answer_tokens, options.slots, options.seed, most=most, progress=progress, interrupted=interrupted,
                    kept=keep, budget=options.answers or BY_ENGINE,
                )  # fmt: skip
        made, seconds = sum(len(t.tokens) for t in done) - before, time.monotonic() - began
        say(
            f"{len(done)} texts; answers of the target itself with {origin}: {made} tokens with their prompts in {seconds:.0f} s, kept in {kept}"
        )
    elif asked:
        more, _ = read_texts([kept], session, template, most)
        done += more
    return done


def _estimate(trainer: Trainer) -> str:
    began = time.monotonic()
    trainer._step(0.0)
    seconds = time.monotonic() - began
    steps = 60 * trainer.schedule.minutes / max(seconds, 1e-9)
    return f"on this CPU a step takes {seconds:.1f} s: some {steps:.0f} steps in {trainer.schedule.minutes:g} minutes; a GPU makes ten to a hundred times as many"


def card(done: Trained, drafter: Drafter, target: GGUFFile, options: TrainOptions, learnt: list[Text], held: list[Text]) -> str:
    """The card, Markdown."""
    file, rows = target.path.name, [f"| {name} | {value:.2f} |" for name, value in sorted(done.score.categories.items())]
    by = {"text": "texts by others"}
    heats = [f"| {by.get(name, 'answers at temperature ' + name)} | {value:.2f} |" for name, value in sorted(done.score.at.items())]
    tokens = sum(len(t.tokens) for t in learnt)
    licence = target.metadata.get("general.license", "not named in its file")
    texts = ", ".join(f"{count} {name}" for name, count in sorted(done.texts.items()))
    lines = [
        f"# {Path(done.path).name}",
        "",
        f"A {drafter.method.removeprefix('draft-')} drafter for {file} (BLAKE3 `{target.identity()}`; licence of the target: {licence}).",
        "`pyspec run`, `chat` and `serve` take it as the drafter of that file.",
        "",
        f"* Trained for {done.seconds / 60:.1f} minutes ({done.tokens_per_second:,.0f} tokens/s) on {len(learnt)} texts of {tokens:,} tokens: {texts}.",
        "* Prompts were answered by the target itself, greedily and at temperature 0.7.",
        f"* {'New' if options.start is None else f'Continued from {Path(options.start).name}'}; reads the inputs of target layers {list(drafter.captures)}.",
        f"* Validated on {len(held)} texts whose prompts were held out, {done.score.steps} steps of simulated decoding.",
        "",
        "Tokens per step, with the target's own token:",
        "",
        "| | tokens/step |",
        "|---|---|",
        *rows,
        *heats,
        f"| all | {done.score.tokens_per_step:.2f} |",
        f"| all, before | {done.before.tokens_per_step:.2f} |",
        "",
        "Sampled answers are drafted by argmax here; the engine shares the sampler's noise with the drafter, which accepts more.",
        "",
        "| minutes | tokens/step | loss |",
        "|---|---|---|",
        *(f"| {minutes:.1f} | {mean:.2f} | {loss:.3f} |" for minutes, mean, loss in done.curve),
        "",
    ]
    return "\n".join(lines)


def as_json(done: Trained) -> str:
    """One line with everything."""
    score, before = vars(done.score), vars(done.before)
    agreed = vars(done.agreement) if done.agreement is not None else None
    return json.dumps(vars(done) | {"score": score, "before": before, "agreement": agreed, "texts": dict(done.texts)})
