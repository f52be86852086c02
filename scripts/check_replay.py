#!/usr/bin/env python3
"""Are replayed CUDA graphs and overlapping kernels (GGML_CUDA_PDL) bit-equal to single launches?

    check_replay.py --device CUDA0                                # tiny random models of every architecture, and drafters of every kind
    check_replay.py --device CUDA0 --only drafter                 # those whose names contain a word
    check_replay.py --device CUDA0 --only "large heads" --cache-type q8_0 --prompt 1900
    check_replay.py --device CUDA0 -m target.gguf -md drafter.gguf

Each variant runs in its own process, because ggml-cuda reads its switches once: logits of plain steps (one and two slots), of blocks of every width, and
drafts. Exit code 1 if they differ, or if a device with early capture (patches/0026) captures a graph within a step.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from random_gguf import archs
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape, write_dflash
from random_gguf.mtp import write_mtp_target

import pyggml_spec as ps
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.engine.options import candidate_widths

SINGLE = {"GGML_CUDA_DISABLE_GRAPHS": "1", "GGML_CUDA_PDL": "0"}
WAYS = {"replayed, overlapping": {}, "replayed": {"GGML_CUDA_PDL": "0"}, "overlapping": {"GGML_CUDA_DISABLE_GRAPHS": "1"}}
STEPS = 12
SHAPE = Shape(delta_head=128)  # as published, and as CUDA's kernels for one sequence take it
# likewise: ggml-cuda's attention takes no other rows of one head or of keys longer than values, its indexer no other heads, its scans no other states
MLA = {"n_latent": 512, "n_rot": 64, "head_size": 192, "head_size_v": 128, "n_lora_q": 256, "index_heads": 32, "index_size": 128}
LATENT = {
    "attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512, "attention.key_length_mla": 192,
    "attention.value_length_mla": 128, "attention.q_lora_rank": 256, "rope.dimension_count": 64,
}  # fmt: skip
INDEX = {"attention.indexer.head_count": 32, "attention.indexer.key_length": 128}


def keyed(arch: str, keys: dict[str, int] | None = None, **sizes: int) -> Callable[..., Path]:
    """A writer of the architecture with other keys and sizes."""
    more = {"keys": keys} if keys else {}
    return lambda path, shape, quant, **options: archs.WRITERS[arch](path, replace(shape, **sizes), quant, **more, **options)


LARGE = {  # heads whose quantized rows ggml-cuda reads as they lie, with norms, without, with sinks
    f"{name}, large heads": keyed(name, n_head=16, head_size=size)
    for name, size in (("qwen35", 256), ("qwen3", 128), ("llama", 128), ("gpt-oss", 128))
}
TARGETS = (
    archs.WRITERS
    | {name: keyed(name, **MLA) for name in ("deepseek2", "deepseek32", "glm-dsa", "mistral4")}
    | {name: keyed(name, {"ssm.state_size": 128}) for name in ("falcon-h1", "granitehybrid", "nemotron_h")}
    | {
        "nemotron_h_moe": keyed("nemotron_h_moe", {"ssm.state_size": 128, "moe_latent_size": 256}, n_ff=768),
        "kimi-linear": keyed("kimi-linear", LATENT),
        "kimi-k3": keyed("kimi-k3", LATENT | {"expert_latent_length": 256}),
        "glm5-next": keyed("glm5-next", INDEX),
        "mimo2": keyed("mimo2", {"attention.value_length": 128}, n_head=32, head_size=192),
        # likewise with soft-capped scores: of other head sizes than 128, 256 and 512 its kernel has no code and ends the process
        "gemma2": keyed("gemma2", head_size=128),
        "gemma4, shared K/V": partial(archs.write_gemma4, n_per_layer=256),
        "gemma4": partial(archs.write_gemma4, shared=False, n_per_layer=256),
        "gemma4, routed": partial(archs.write_gemma4, shared=False, n_per_layer=0, routed=True),
    }
    | LARGE
)
DRAFTERS = {
    "dflash2": ("qwen35", lambda path, shape, quant: write_dflash2(path, shape, quant, block=16)),
    "dspark": ("qwen3", lambda path, shape, quant: write_dspark(path, shape, quant, block=15, own=("head",), tokens=200)),
    "eagle3": ("llama", lambda path, shape, quant: write_eagle3(path, shape, quant, tokens=200)),
    "gemma4-assistant": ("gemma4", write_gemma4_assistant),
    "small model": ("qwen3", archs.WRITERS["llama"]),
    "recurrent small model": ("qwen3", archs.WRITERS["qwen35"]),
}
BOTH = "draft-dflash", "draft-mtp"  # two drafters of one target, whose rows wait while the other one drafts


def pairs(args, folder: Path):
    """(name, target, drafter, methods) of the selected tiny pairs, written one by one."""
    if args.model:
        yield Path(args.model).stem, args.model, args.model_draft, None
        return
    blocks, target, drafter = write_dflash(folder / "dflash.gguf", SHAPE), folder / "target.gguf", folder / "drafter.gguf"
    for name, write in TARGETS.items():
        for quant in ("F32", "Q8_0", "Q4_K", *(("MXFP4",) if name == "gpt-oss" else ())):
            if args.only in (title := f"{name}, {quant}"):
                yield title, write(target, SHAPE, quant), blocks, None
    for name, with_blocks, spec in (("mtp drafter", None, BOTH[1:]), ("dflash and mtp drafters", blocks, BOTH)):
        for quant in ("F32", "Q8_0", "Q4_K"):
            if args.only in (title := f"{name}, {quant}"):
                yield title, write_mtp_target(target, SHAPE, quant), with_blocks, spec
    for name, (arch, write) in DRAFTERS.items():
        for quant in ("F32", "Q8_0", "Q4_K"):
            if args.only in (title := f"{name} drafter, {quant}"):
                yield title, TARGETS[arch](target, SHAPE, quant), write(drafter, SHAPE, quant), None


def measure(args) -> None:
    """Writes what every pair gives to ``args.dump``."""
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, target, drafter, spec in pairs(args, Path(folder)):
            width = 16 if drafter or spec else None
            try:
                rows = {"cache_type_k": args.cache_type, "cache_type_v": args.cache_type, "n_ctx": max(512, 2 * args.prompt + 200)}
                loaded = ps.load(target, drafter, device=args.device, threads=args.threads, draft_width=width, spec=spec, **rows)
            except ps.PyspecError as why:
                print(f"{name}: {why}", flush=True)
                if args.all:
                    sys.exit(f"{name} was refused, so nothing of it was compared")
                continue
            with loaded as session:
                engine = session.runner
                tokens = np.random.default_rng(3).integers(0, min(256, session.target.n_vocab), args.prompt + STEPS + 16).tolist()
                for width in (1, *(w for w in candidate_widths(engine.options.width) if w > 1)):
                    out[f"{name}|{width}"] = logits(engine, tokens, width, args.prompt)
                out[f"{name}|two slots"] = slots(session, tokens, args.prompt)
                if session.drafter is not None:
                    out[f"{name}|drafts"] = drafts(engine, tokens, args.prompt)
                    out[f"{name}|drafts, two slots"] = drafts_of_slots(session, tokens, args.prompt)
                replay = engine.io.replay
                if replay is not None and replay.ahead and replay.inside:
                    sys.exit(
                        f"{name}: {replay.inside} graphs were captured within a step, {replay.ahead} before their first one: all should be"
                    )
    np.savez(args.dump, **out)


def logits(engine, tokens: list[int], width: int, prompt: int) -> np.ndarray:
    """F32 [STEPS, width, n_vocab] after a fixed text, one accepted token per step."""
    engine.reset()
    engine.read_candidates(None)
    engine.prefill(tokens[:prompt])
    out = []
    for at in range(prompt, prompt + STEPS):
        engine.cursor.advance(0, tokens[at])
        engine.plain_step() if width == 1 else engine.verify_step(tokens[at + 1 : at + width])
        out.append(np.stack([engine.candidates(row)[1] for row in range(width)]))
        engine.accept(1, 0)
    engine.read_candidates(0)
    return np.stack(out)


def feed(engine, prompts: dict[int, list[int]]) -> None:
    """Prompts of slots, as long as each other, in the same steps."""
    chunk = engine.options.chunk // len(prompts)
    for at in range(0, len(next(iter(prompts.values()))), chunk):
        engine.step({slot: Prefill(tokens[at : at + chunk]) for slot, tokens in prompts.items()})


def slots(session, tokens: list[int], prompt: int) -> np.ndarray:
    """F32 [STEPS, 2, n_vocab]: plain steps of two slots at once."""
    with session.batch(2) as scheduler:
        engine = scheduler.runner
        both = [engine.admit(drafting=False, candidates=None) for _ in range(2)]
        for slot in both:
            feed(engine, {slot: tokens[slot:prompt]})  # the second is shorter
        out = []
        for at in range(prompt, prompt + STEPS):
            for slot in both:
                engine.choose(tokens[at + slot], slot)
            engine.step({slot: Verify() for slot in both})
            out.append(np.stack([engine.candidates(0, slot)[1] for slot in both]))
            for slot in both:
                engine.accept(1, 0, slot)
    return np.stack(out)


def drafts(engine, tokens: list[int], prompt: int) -> np.ndarray:
    """I32 [STEPS, width]: blocks of the drafters in turn, every other one after a plain token."""
    engine.reset()
    engine.prefill(tokens[:prompt])
    out = []
    for at in range(prompt, prompt + STEPS):
        if len(methods := [member.method for member in engine.drafter.methods]) > 1 and at % 2:
            engine.plain_step()
            engine.accept(1, tokens[at])
        out.append(engine.fused_step(drafter=methods[at // 2 % len(methods)]).tokens.copy())
        engine.accept(1, tokens[at + 1])
    return np.stack(out)


def drafts_of_slots(session, tokens: list[int], prompt: int) -> np.ndarray:
    """I32 [STEPS, 2, width]: blocks of two slots at once."""
    with session.batch(2) as scheduler:
        engine = scheduler.runner
        both = [engine.admit() for _ in range(2)]
        feed(engine, {slot: tokens[slot : slot + prompt - 10] for slot in both})
        out = []
        for at in range(prompt, prompt + STEPS):
            method = engine.drafter.methods[at // 2 % len(engine.drafter.methods)].method
            done = engine.step({slot: Draft(engine.options.width, drafter=method) for slot in both})
            out.append(np.stack([done[slot].tokens for slot in both]))
            for slot in both:
                engine.accept(1 + slot, tokens[at + slot], slot)
    return np.stack(out)


def run(argv: list[str], folder: Path, name: str, switches: dict[str, str]) -> dict[str, np.ndarray]:
    env = {key: value for key, value in os.environ.items() if key not in SINGLE} | switches
    dump = folder / f"{name}.npz"
    done = subprocess.run([sys.executable, __file__, *argv, "--dump", str(dump)], check=False, env=env)
    if done.returncode:
        sys.exit(f"the run with {switches or 'no switches'} ended with {done.returncode}")
    return dict(np.load(dump))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--only", default="", metavar="WORD", help="pairs whose names contain it")
    parser.add_argument("--all", action="store_true", help="a pair that the device refuses fails")
    parser.add_argument("--cache-type", default="f16", help="of K and V rows")
    parser.add_argument("--prompt", type=int, default=40, help="tokens before the steps")
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dump:
        measure(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base, failed = run(sys.argv[1:], Path(folder), "single", SINGLE), 0
        if not base:
            sys.exit(f"nothing was compared: no pair's name contains '{args.only}', or each was refused")
        for way, switches in WAYS.items():
            other = run(sys.argv[1:], Path(folder), way, switches)
            wrong = [key for key in base if not np.array_equal(base[key], other[key])]
            failed += len(wrong)
            print(f"{way}: {len(base) - len(wrong)} of {len(base)} the same bit for bit as single launches", flush=True)
            for key in wrong:
                off = np.abs(base[key].astype(float) - other[key]).reshape(STEPS, -1).max(1)
                print(f"  {key.replace('|', ', rows ')}: {(off > 0).sum()} of {STEPS} steps differ, by {off.max():.2g} at most")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
