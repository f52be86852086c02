"""Answers of a target by torch, thousands of prompts at once: the engine's slots are made for servers, and a drafter needs millions of tokens."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .features import TorchTarget, free_memory, logits_of
from .ops import Room, caches
from .texts import TEMPERATURES, TOP_K, Text

ROWS, PROMPT_TOKENS = 2048, 1 << 18  # answers at once, and tokens of their prompts
TURNS = 6  # answers to a prompt
SHARE = 0.4  # of the free memory, for keys and values
WARM_UP = 3  # steps before one is captured
ALIGNED = 16  # columns of masks are multiples of it, as attention wants them
LOOK = 16  # steps between looks at which answers have ended


def answers(
    target: TorchTarget, prompts: Sequence[Text], limit: int, most: int, ends: Collection[int], seed: int, budget: int, interrupted: Callable[[], bool],
) -> Iterator[Text]:  # fmt: skip
    """Answers of at most ``limit`` tokens, texts of at most ``most``; every prompt at one temperature, then at the other, then sampled again, until there are ``budget`` tokens of texts.

    Raises NotImplementedError: recurrent layers.
    """
    rng, total = np.random.default_rng(seed), 0
    for turn in range(TURNS):
        order = rng.permutation(len(prompts)).tolist()
        batches = [*_batches(target, [prompts[i] for i in order], limit)]
        rng.shuffle(batches)
        for batch in batches:
            heats = [TEMPERATURES[(turn + hash(text.tokens)) % 2 if turn < 2 else 1] for text in batch]
            limits = [min(limit, most - text.prompt_tokens) for text in batch]
            for text, heat, out in zip(batch, heats, generate(target, [t.tokens for t in batch], limits, heats, ends), strict=True):
                total += len(text.tokens) + len(out)
                if len(out) > 1:
                    yield Text((*text.tokens, *out), text.prompt_tokens, text.category, heat)
            if total >= budget or interrupted():
                return


def _batches(target: TorchTarget, prompts: list[Text], limit: int) -> Iterator[list[Text]]:
    """Of about the same length, as memory allows."""
    each = sum(shape.n_head_kv * (shape.size + shape.size_v) for shape in target.decoder.kv_shapes()) * target.dtype.itemsize
    free, part = free_memory(target.device), list[Text]()
    for text in sorted(prompts, key=lambda t: t.prompt_tokens):
        rows = len(part) + 1
        if part and (rows > ROWS or rows * text.prompt_tokens > PROMPT_TOKENS or rows * (text.prompt_tokens + limit) * each > SHARE * free):
            yield part
            part = []
        part.append(text)
    yield part


@torch.no_grad()
def generate(
    target: TorchTarget, prompts: Sequence[Sequence[int]], limits: Sequence[int], heats: Sequence[float], ends: Collection[int]
) -> list[list[int]]:
    """The tokens that follow each prompt, up to one of ``ends``, which is included, or its limit; sampled from the TOP_K likeliest where a heat is not 0.

    On a GPU a step is a CUDA graph: launching its kernels one by one takes ten times as long as they do.
    """
    d: Any = target.decoder
    if d.recurrent_shape() is not None:
        raise NotImplementedError("recurrent layers")
    device, longest, steps = target.device, max(map(len, prompts)), max(limits)
    most = -(-(longest + steps) // ALIGNED) * ALIGNED
    rows = np.zeros((len(prompts), longest), np.int64)  # padded on the left, so that all answers begin in one column
    for row, prompt in zip(rows, prompts):
        row[longest - len(prompt) :] = prompt
    first = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    heat, stops, limit = (torch.tensor(x, device=device) for x in (heats, [*ends], limits))
    columns, at = torch.arange(longest, device=device), torch.tensor([longest], device=device)
    tokens, out = torch.from_numpy(rows).to(device), torch.zeros(len(prompts), longest + steps + 1, dtype=torch.long, device=device)
    rooms = list[Room]()

    def room(n: int) -> Room:
        rooms.append(Room(torch.zeros(len(prompts), most, n, dtype=target.dtype, device=device), columns))
        return rooms[-1]

    def choose(hidden: Tensor) -> Tensor:
        best = logits_of(d, hidden[:, -1]).float().topk(min(TOP_K, d.n_vocab))
        noise = -torch.empty_like(best.values).exponential_().log()
        return best.indices.gather(1, (best.values + heat[:, None] * noise).argmax(-1, keepdim=True))

    def step() -> None:
        """Computes the last token, and chooses the next."""
        last.copy_(choose(target.forward(last, at, first, kv)))
        at.add_(1)
        out.index_copy_(1, at, last)

    kv = caches(d.kv_shapes(), room)
    last = choose(target.forward(tokens, columns, first, kv))
    out.index_copy_(1, at, last)
    for cache in rooms:
        cache.at = at
    run = step
    for done in range(1, steps):
        if done == WARM_UP and device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        run()
        if done % LOOK == 0:
            answered = out[:, longest : longest + done + 1]
            ended = (answered[..., None] == stops).any(-1).any(-1) | (limit <= done)
            if ended.all():
                break
    return [_cut(row, count, ends) for row, count in zip(out[:, longest:].tolist(), limits)]


def _cut(tokens: list[int], most: int, ends: Collection[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens[:most]) if token in ends), most)
    return tokens[:end]
