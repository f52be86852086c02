#!/usr/bin/env python3
"""Tokens per step by type of the drafter's K/V cache, greedy, on the same prompts. Counts only.

    acceptance_by_cache_type.py [-m target.gguf -md drafter.gguf] [-n 128] [--types f16,q8_0,...] [--width 16] [--prompts FILE.jsonl]

Type unrotated: q8_0 as GPUs with the patched kernels store it by default. The target's rows stay f16, so the text is the same in every run. Last column: change against f16 in standard errors between prompts.
"""

import argparse
import statistics
from pathlib import Path

import pyggml_spec as ps
from pyggml_spec import loading
from pyggml_spec.cache.kv import KVTypes
from pyggml_spec.loading import DEMO, DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.text.template import ChatTemplate
from pyggml_spec.tools.prompts import Prompt, read_prompts

UNROTATED = "unrotated"


def ids_of(session: ps.Session, prompt: Prompt) -> list[int]:
    """Tokens of a text as it is, or of messages through the target's template."""
    if prompt.messages is None:
        return session.prompt_ids(prompt.text)
    return ChatTemplate.from_gguf(session.target.file).encode(session.tokenizer, prompt.messages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=str(DEMO_TARGET))
    parser.add_argument("-md", "--model-draft", default=str(DEMO_DRAFTER))
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("--types", default="f16,bf16,q8_0,q5_0,q4_0")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.jsonl")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts)
    loading.draft_types = lambda *_: KVTypes("q8_0", "q8_0", rotated=False)  # on every device
    base: list | None = None
    for kind in args.types.split(","):
        types = {} if kind == UNROTATED else {"draft_cache_type_k": kind, "draft_cache_type_v": kind}
        with ps.load(
            args.model, args.model_draft, device=args.device, threads=args.threads, n_ctx=2048, draft_width=args.width, **types
        ) as session:
            runs = [session.generate(ids_of(session, prompt), args.tokens, ignore_end=True) for prompt in prompts]
            draft_kv = session.runner.memory()["draft_kv"]
        per_step = [stats.tokens_per_step for _, stats in runs]
        base = base or [(text, value) for (text, _), value in zip(runs, per_step, strict=True)]
        changes = [value - before for value, (_, before) in zip(per_step, base, strict=True)]
        error = statistics.stdev(changes) / len(changes) ** 0.5
        steps, matched = sum(s.steps for _, s in runs), sum(s.matched for _, s in runs)
        same = sum(text == before for (text, _), (before, _) in zip(runs, base, strict=True))
        print(f"{kind:<6} {draft_kv >> 10} KiB, {steps} steps, {matched} accepted, {(steps + matched) / steps:.4f} tokens per step, "
              f"same text on {same} of {len(prompts)}, mean change {statistics.fmean(changes):+.4f} "
              f"({statistics.fmean(changes) / error if error else 0:+.1f} standard errors)", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
