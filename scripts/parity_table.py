#!/usr/bin/env python3
"""Logits of pyspec against llama.cpp's, for every architecture, weight type, cache type and prompt length: the table of docs/parity.md.

    parity_table.py [--device CPU] [--tokens 1,37,300,1500] [--only qwen2,llama] [--all]
    parity_table.py -m model.gguf [--twin model.f32.gguf] [--text file.txt] --device CUDA0 --tokens 37,300

Models are tiny and random, with sliding windows of 24. Each cell is the largest NMSE of all logits; 0 is bit-equality. --all prints a line per case.
Models with a sliding window have another cell for the longest prompt, without a ring. With -m: one model, against a twin in F32
(``make_random_gguf.py --twin``), or perplexity of a text as llama-perplexity computes it. Without -m, exit code 3 if that cell or one without a
wrapped ring is above 1e-10, another above 1e-6, or a row's argmax differs (with a wrapped ring, more than one).
"""

import argparse
import sys
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path

import pyggml_spec as ps

# isort: split
import numpy as np
from random_gguf.archs import WRITERS as ALL
from random_gguf.archs import write_gemma4
from random_gguf.model import Shape

from pyggml_spec.cache.kv import KVCache
from pyggml_spec.engine import resources
from pyggml_spec.ggml.device import pick_device
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.registry import open_target
from pyggml_spec.tools.compare import CHUNK, compare_logits, nmse
from pyggml_spec.tools.reference import LlamaReference

WRITERS = ALL | {"gemma4 routed": lambda *args: write_gemma4(*args, n_per_layer=0, shared=False, routed=True)}
WEIGHTS = ("F32", "Q8_0", "Q4_K")
CACHES = (("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f16", "q8_0"))
RING = 768  # rows of the windowed layers here: the window and a chunk of 512 tokens, padded
TOLERANCE, RING_TOLERANCE = 1e-10, 1e-6


@contextmanager
def every_position():
    """No rings: windowed layers keep all rows, in the order of llama.cpp's."""
    before = resources.KVCache
    resources.KVCache = lambda *args, **types: KVCache(*args[:4], **types)
    try:
        yield
    finally:
        resources.KVCache = before


def ours(path: str, prompts: list[list[int]], args) -> list[np.ndarray]:
    """Our logits after every token of each prompt."""
    n_ctx = max(map(len, prompts))
    with ps.load(path, device=args.device, threads=args.threads, kernels=args.kernels, n_ctx=n_ctx, prefix_memory=0) as session:
        out = []
        for prompt in prompts:
            session.runner.reset()
            out.append(session.runner.logits(prompt))
        return out


def theirs(path: str, prompts: list[list[int]], args) -> list[np.ndarray]:
    """llama.cpp's."""
    out = []
    for prompt in prompts:
        with closing(LlamaReference(path, pick_device(args.device), max(map(len, prompts)), CHUNK, args.threads)) as reference:
            out.append(reference.logits(prompt))
    return out


def loss(logits: np.ndarray, prompt: list[int]) -> float:
    """The mean negative logarithm of what each token of a chunk's second half had been given."""
    first = len(prompt) // 2
    rows = logits[first : len(prompt) - 1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    given = rows[np.arange(len(rows)), prompt[first + 1 :]]
    return float(np.mean(np.log(np.exp(rows).sum(axis=1)) - given))


def of_one_model(args, lengths: list[int]) -> None:
    with ps.load(args.model, device="CPU", threads=args.threads, kernels="ggml", n_ctx=CHUNK, prefix_memory=0) as session:
        n_vocab = session.target.n_vocab
        text = session.tokenizer.encode(args.text.read_text(errors="replace")) if args.text else []
    prompts = [np.random.default_rng(n).integers(0, n_vocab, n).tolist() for n in lengths]
    mine, other = ours(args.model, prompts, args), theirs(args.model, prompts, args)
    exact = ours(args.twin, prompts, args) if args.twin else None
    for i, n in enumerate(lengths):
        line = f"{n} tokens: NMSE of pyspec to llama.cpp {nmse(mine[i], other[i]):.2g}"
        if exact is not None:
            line += f", to the twin in F32: pyspec {nmse(mine[i], exact[i]):.2g}, llama.cpp {nmse(other[i], exact[i]):.2g}"
        print(line, flush=True)
    chunks = [text[at : at + CHUNK] for at in range(0, len(text) - CHUNK + 1, CHUNK)][: args.chunks]
    if args.text and not chunks:
        sys.exit(f"{args.text} has {len(text)} tokens, and a perplexity needs {CHUNK}")
    if chunks:
        losses = [
            [loss(logits, chunk) for logits, chunk in zip(get(args.model, chunks, args), chunks, strict=True)] for get in (ours, theirs)
        ]
        print(f"perplexity of {len(chunks)} chunks of {CHUNK} tokens: " + ", ".join(
            f"{who} {np.exp(np.mean(values)):.4f}" for who, values in zip(("pyspec", "llama.cpp"), losses, strict=True)
        ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", default="1,37,300,1500", help="prompt lengths")
    parser.add_argument("--only", help="these architectures")
    parser.add_argument("--all", action="store_true", help="a line per weight and cache type")
    parser.add_argument("-m", "--model", help="one model instead of tiny ones")
    parser.add_argument("--twin", help="with -m: the same numbers in F32")
    parser.add_argument("--text", type=Path, help="with -m: a text whose perplexity is computed")
    parser.add_argument("--chunks", type=int, default=80, help=f"of {CHUNK} tokens of it at most")
    parser.add_argument("--kernels", choices=("native", "ggml"), help="with -m, of pyspec on a CPU")
    args = parser.parse_args()
    lengths = [int(n) for n in args.tokens.split(",")]
    if args.model:
        of_one_model(args, lengths)
        return
    cases = [(weight, "f16", "f16") for weight in WEIGHTS] + [("F32", *cache) for cache in CACHES]
    failed = 0
    columns = [f"{n} tokens" for n in lengths] + [f"{lengths[-1]}, no ring"]
    short = f"to {lengths[-2] if len(lengths) > 1 else lengths[0]} tokens"
    if args.all:
        print("| architecture | weights | K, V | " + " | ".join(columns) + " |\n|" + "---|" * (3 + len(columns)))
    else:
        heads = [f"{', '.join(WEIGHTS)} weights, {short}", f"bf16 and quantised KV, {short}", f"all, {columns[-2]}", f"all, {columns[-1]}"]
        print("| architecture | " + " | ".join(heads) + " |\n|" + "---|" * 5)
    with tempfile.TemporaryDirectory() as folder:
        for arch, write in WRITERS.items():
            if args.only and arch not in args.only.split(","):
                continue
            largest: dict[str, float] = {}
            for weight, k, v in cases:
                path = write(Path(folder) / "model.gguf", Shape(), weight)
                with GGUFFile(path) as file:
                    one_row = any(shape.latent for shape in open_target(file).kv_shapes())
                if one_row and k != v:
                    continue
                results = [compare_logits(path, n, n, args.device, args.threads, "ggml", k, v) for n in lengths]
                with GGUFFile(path) as file:
                    windowed = open_target(file).window > 0
                wraps = [windowed and n > RING for n in lengths]
                if windowed:
                    with every_position():
                        results.append(compare_logits(path, lengths[-1], lengths[-1], args.device, args.threads, "ggml", k, v))
                    wraps.append(False)
                cells = [f"{r.nmse:.2g}" for r in results] + ["-"] * (len(columns) - len(results))
                if args.all:
                    print(f"| {arch} | {weight} | {k}, {v} | " + " | ".join(cells) + " |", flush=True)
                for i, r in enumerate(results):
                    name = (
                        "no ring"
                        if i >= len(lengths)
                        else "long"
                        if i == len(lengths) - 1
                        else "weights"
                        if (k, v) == ("f16", "f16")
                        else "caches"
                    )
                    largest[name] = max(largest.get(name, 0.0), r.nmse)
                for r, wrapped in zip(results, wraps, strict=True):
                    others = round((1 - r.argmax_agree) * r.tokens)
                    failed += r.nmse > (RING_TOLERANCE if wrapped else TOLERANCE) or others > wrapped
            if not args.all:
                shown = [f"{largest[name]:.2g}" if name in largest else "-" for name in ("weights", "caches", "long", "no ring")]
                print(f"| {arch} | " + " | ".join(shown) + " |", flush=True)
    if failed:
        print(f"{failed} cells are above their limit or differ in an argmax", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
