"""Texts written by the target, with its hidden states."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engine.request import PLAIN, LoopOptions
from ..engine.runner import ModelRunner
from ..engine.scheduler import generate
from ..loading import DEMO

PROMPTS = DEMO / "prompts.jsonl"


@dataclass(frozen=True)
class Passage:
    """A prompt and the target's greedy continuation.

    Attributes:
        tokens: I32 [T], prompt and continuation.
        n_prompt: tokens of the prompt.
        features: F32 [T, n_embd] by target layer: the layer's input.
    """

    tokens: np.ndarray
    n_prompt: int
    features: dict[int, np.ndarray]


def held_out_prompts(count: int, path: Path = PROMPTS) -> list[str]:
    """The first ``count`` held-out prompts of the embedded set."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines][:count]


def write_passages(engine: ModelRunner, prompts: Sequence[Sequence[int]], layers: Sequence[int], tokens: int) -> list[Passage]:
    """Continues each prompt by ``tokens`` tokens (ignoring end tokens), then captures the inputs of ``layers``."""
    return [capture(engine, prompt, continued(engine, prompt, tokens), layers) for prompt in prompts]


def continued(engine: ModelRunner, prompt: Sequence[int], tokens: int) -> list[int]:
    engine.reset(drafting=False)
    return [t for block in generate(engine, prompt, LoopOptions(tokens, PLAIN, ignore_end=True)) for t in block]


def capture(engine: ModelRunner, prompt: Sequence[int], text: Sequence[int], layers: Sequence[int]) -> Passage:
    engine.reset(drafting=False)
    tokens = np.array([*prompt, *text], np.int32)
    _, features = engine.capture(tokens.tolist(), layers)
    return Passage(tokens, len(prompt), dict(zip(layers, features)))
