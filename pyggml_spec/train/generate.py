"""Answers of a target by torch, thousands of prompts at once: the engine's slots are made for servers, and a drafter needs millions of tokens."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .features import TorchTarget, logits_of
from .ops import caches
from .texts import TEMPERATURES, TOP_K, Text

ROWS, PROMPT_TOKENS = 2048, 1 << 18  # answers at once, and tokens of their prompts
SHARE = 0.4  # of the free memory, for keys and values
LOOK = 16  # steps between looks at which answers have ended


def answers(
    target: TorchTarget, prompts: Sequence[Text], limit: int, most: int, ends: Collection[int], seed: int, budget: int, interrupted: Callable[[], bool],
) -> Iterator[Text]:  # fmt: skip
    """Answers of at most ``limit`` tokens, texts of at most ``most``; every prompt at one temperature, then at the other, until ``budget`` tokens are there.

    Raises NotImplementedError: recurrent layers.
    """
    rng, total = np.random.default_rng(seed), 0
    generator = torch.Generator(target.device).manual_seed(seed)
    for turn in range(len(TEMPERATURES)):
        order = rng.permutation(len(prompts)).tolist()
        batches = [*_batches(target, [prompts[i] for i in order], limit)]
        rng.shuffle(batches)
        for batch in batches:
            heats = [TEMPERATURES[(turn + hash(text.tokens)) % len(TEMPERATURES)] for text in batch]
            limits = [min(limit, most - text.prompt_tokens) for text in batch]
            for text, heat, out in zip(
                batch, heats, generate(target, [t.tokens for t in batch], limits, heats, ends, generator), strict=True
            ):
                total += len(out)
                if len(out) > 1:
                    yield Text((*text.tokens, *out), text.prompt_tokens, text.category, heat)
            if total >= budget or interrupted():
                return


def _batches(target: TorchTarget, prompts: list[Text], limit: int) -> Iterator[list[Text]]:
    """Of about the same length, as memory allows."""
    each = sum(shape.n_head_kv * (shape.size + shape.size_v) for shape in target.decoder.kv_shapes()) * target.dtype.itemsize
    free = torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else 1 << 30
    part = list[Text]()
    for text in sorted(prompts, key=lambda t: t.prompt_tokens):
        rows = len(part) + 1
        if part and (rows > ROWS or rows * text.prompt_tokens > PROMPT_TOKENS or rows * (text.prompt_tokens + limit) * each > SHARE * free):
            yield part
            part = []
        part.append(text)
    yield part


@torch.no_grad()
def generate(
    target: TorchTarget, prompts: Sequence[Sequence[int]], limits: Sequence[int], heats: Sequence[float], ends: Collection[int], generator: torch.Generator,
) -> list[list[int]]:  # fmt: skip
    """The tokens that follow each prompt, up to one of ``ends``, which is included, or its limit; sampled from the TOP_K likeliest where a heat is not 0."""
    d: Any = target.decoder
    if d.recurrent_shape() is not None:
        raise NotImplementedError("recurrent layers")
    device, longest, steps = target.device, max(map(len, prompts)), max(limits)
    rows = np.zeros((len(prompts), longest), np.int64)  # padded on the left, so that all answers begin in one column
    for row, prompt in zip(rows, prompts):
        row[longest - len(prompt) :] = prompt
    first = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    heat, stops, limit = (torch.tensor(x, device=device) for x in (heats, [*ends], limits))
    kv = caches(d.kv_shapes(), len(prompts), torch.empty(0, device=device, dtype=target.dtype), longest + steps)
    tokens, column = torch.from_numpy(rows).to(device), 0
    out, live = tokens.new_zeros(len(prompts), steps), torch.ones(len(prompts), dtype=torch.bool, device=device)
    for step in range(steps):
        hidden = target.forward(tokens, column, first, kv)
        best = logits_of(d, hidden[:, -1]).float().topk(min(TOP_K, d.n_vocab))
        noise = -torch.empty_like(best.values).exponential_(generator=generator).log()
        tokens = best.indices.gather(1, (best.values + heat[:, None] * noise).argmax(-1, keepdim=True))
        out[:, step], column = tokens[:, 0], longest + step
        live &= ~torch.isin(tokens[:, 0], stops) & (limit > step + 1)
        if step % LOOK == LOOK - 1 and not live.any():
            break
    return [_cut(row, most, ends) for row, most in zip(out.tolist(), limits)]


def _cut(tokens: list[int], most: int, ends: Collection[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens[:most]) if token in ends), most)
    return tokens[:end]
