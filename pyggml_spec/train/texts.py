"""What a drafter is trained on: the target's own answers to prompts, chats as they are, and plain text."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ..api import Progress, Session
from ..concurrent import End
from ..errors import TrainingError
from ..events import StepEvent
from ..gguf_io.safetensors import parse_json
from ..sampling.sampler import Sampling
from ..text.template import ChatTemplate
from ..tools.prompts import Prompt, parse_prompts

MAX_FILE = 1 << 30  # bytes
HELD_OUT = 20  # one prompt of so many is for validation
TEMPERATURES = (0.0, 0.7)  # of answers, in turn
TOP_K = 40  # of sampled answers: a step of many slots reads so many logits of each, and not the whole vocabulary's
PIECES = (64, 96, 160, 256)  # tokens of plain text that are continued, in turn
RAW = 8  # one piece of plain text of so many is learnt as it is


@dataclass(frozen=True)
class Text:
    """``tokens``, of which the first ``prompt_tokens`` were given. ``temperature``: of the answer, None for a text by others."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    category: str = "texts"
    temperature: float | None = None

    @property
    def held_out(self) -> bool:
        """By the prompt alone, so that all answers to a prompt are on one side."""
        prompt = np.asarray(self.tokens[: self.prompt_tokens], np.uint32).tobytes()
        return int.from_bytes(blake2b(prompt, digest_size=4).digest(), "big") % HELD_OUT == 0


def files_of(paths: Iterable[str | Path]) -> list[Path]:
    """The files among ``paths``, and those inside its folders. Raises TrainingError: there are none."""
    out: list[Path] = []
    for path in map(Path, paths):
        found = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")) if path.is_dir() else [path]
        if not found or not found[0].exists():
            raise TrainingError(
                f"{path} {'is an empty folder' if path.is_dir() else 'does not exist'}; name files of prompts or texts with `data`"
            )
        out += found
    return out


def read_texts(paths: Iterable[str | Path], session: Session, template: ChatTemplate, most: int) -> tuple[list[Text], list[Text]]:
    """Texts that are complete, and prompts to answer; neither has more than ``most`` tokens.

    A file *.jsonl has a "prompt", "messages" or "tokens" per line (tokens are what `serve --record` and an earlier training keep); messages that end with an
    answer are complete. Other files are plain text: the target continues most pieces of it.

    Raises:
        TrainingError: a file cannot be read, or is neither.
    """
    done, asked = list[Text](), list[Text]()
    for path in files_of(paths):
        data = _content(path)
        if path.suffix == ".jsonl":
            for text, complete in _lines(data, path, session, template):
                if 0 < text.prompt_tokens < most - 8:
                    (done if complete else asked).append(Text(text.tokens[:most], text.prompt_tokens, text.category, text.temperature))
        else:
            pieces = [*_pieces(session.tokenizer.encode(data), most)]
            category = path.suffix.removeprefix(".") or "texts"
            for i, piece in enumerate(pieces):
                length = min(PIECES[i % len(PIECES)], len(piece) // 2)
                if i % RAW == RAW - 1:
                    done.append(Text(piece, min(8, length), category))
                else:
                    asked.append(Text(piece[:length], length, category))
    return done, asked


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE:
            raise TrainingError(f"{path} has more than {MAX_FILE >> 20} MiB; split it")
        return path.read_bytes()
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror}") from None


def _pieces(tokens: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    for at in range(0, len(tokens), most):
        if len(piece := tuple(tokens[at : at + most])) >= 32:
            yield piece


def _lines(data: bytes, path: Path, session: Session, template: ChatTemplate) -> Iterator[tuple[Text, bool]]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        if b'"tokens"' in line:
            yield _of_tokens(line, f"line {number} of {path}", session.target.n_vocab), True
            continue
        (prompt,) = parse_prompts(line, f"line {number} of {path}")
        yield _of_prompt(prompt, session, template)


def _of_tokens(line: bytes, where: str, n_vocab: int) -> Text:
    value = parse_json(line, where, len(line))
    tokens, given, temperature = value.get("tokens"), value.get("prompt_tokens"), value.get("temperature")
    if (
        not isinstance(tokens, list)
        or not all(type(t) is int and 0 <= t < n_vocab for t in tokens)
        or not isinstance(given, int)
        or not 0 <= given <= len(tokens)
        or not isinstance(temperature, (int, float, type(None)))
    ):
        raise TrainingError(
            f'{where} needs "tokens" of this vocabulary (0 to {n_vocab - 1}) and "prompt_tokens", how many of them were given'
        )
    return Text(tuple(tokens), given, str(value.get("category", "texts")), temperature)


def _of_prompt(prompt: Prompt, session: Session, template: ChatTemplate) -> tuple[Text, bool]:
    if prompt.text is not None:
        ids = tuple(session.tokenizer.encode(prompt.text))
        return Text(ids, len(ids), prompt.category), False
    messages = list(prompt.messages or ())
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    ids = tuple(template.encode(session.tokenizer, asked))
    if asked is messages or not asked:
        return Text(ids, len(ids), prompt.category), False
    answer = session.tokenizer.encode(messages[-1]["content"], bos=False)
    return Text((*ids, *answer), len(ids), prompt.category), True


def answer(
    session: Session, prompts: Sequence[Text], limit: int, slots: int, seed: int, *, most: int, progress: Progress, interrupted: Callable[[], bool],
    kept: Callable[[Text], None], budget: int = 1 << 62,
) -> None:  # fmt: skip
    """The target's answers of at most ``limit`` tokens, by turns greedy and sampled, handed to ``kept`` as they end; until ``budget`` tokens are there.

    ``most``: tokens of a text.
    """
    rng = np.random.default_rng(seed)
    order, total = rng.permutation(len(prompts)), 0
    with session.concurrent(min(slots, len(prompts)), most + 1) as server:
        waiting: dict[Future, tuple] = {}

        def submit(i: int, turn: int) -> None:
            prompt, heat = prompts[i], TEMPERATURES[turn % len(TEMPERATURES)]
            sampling = Sampling(temperature=heat, seed=int(rng.integers(1 << 31)), top_k=TOP_K, top_p=1.0, min_p=0.0) if heat else None
            out, done = list[int](), Future[None]()

            def sink(event: StepEvent | End) -> None:
                if isinstance(event, End):
                    done.set_exception(event.error) if event.error else done.set_result(None)
                else:
                    out.extend(event.tokens)

            count = min(limit, most - prompt.prompt_tokens)
            waiting[done] = prompt, heat, out
            server.submit(list(prompt.tokens), count, mode="plain", sampling=sampling, reuse=False, sink=sink)

        left = iter(enumerate(order.tolist()))
        for _ in range(2 * slots):
            if (one := next(left, None)) is not None:
                submit(one[1], one[0])
        finished = 0
        while waiting and total < budget and not interrupted():
            for future in wait(waiting, timeout=1, return_when=FIRST_COMPLETED).done:
                prompt, heat, out = waiting.pop(future)
                future.result()
                finished, total = finished + 1, total + len(out)
                progress("answers", finished, len(prompts))
                if len(out) > 1:
                    kept(Text((*prompt.tokens, *out), prompt.prompt_tokens, prompt.category, heat))
                if (one := next(left, None)) is not None:
                    submit(one[1], one[0])


def as_line(text: Text) -> str:
    """A line of JSON that ``read_texts`` reads."""
    return json.dumps(asdict(text), separators=(",", ":")) + "\n"


def split(texts: Iterable[Text]) -> tuple[list[Text], list[Text]]:
    """(to train on, held out by prompt). Raises TrainingError: too few texts for both."""
    held, train = list[Text](), list[Text]()
    for text in texts:
        if len(text.tokens) - text.prompt_tokens >= 4:
            (held if text.held_out else train).append(text)
    if not held and len(train) > 1:  # few texts
        held.append(train.pop())
    if not held or not train:
        raise TrainingError(f"{len(held) + len(train)} texts are too few to train on and to validate with: give more with `data`")
    return train, held
