#!/usr/bin/env python3
"""Attention of few rows over a long K/V cache on a CUDA device: accuracy, and microseconds and bytes per second by type of cache.

    bench_attention.py check                                       error against float64
    bench_attention.py steps -m TARGET [-md DRAFTER] [--depths 131072] [--rows 1,16]   milliseconds per step, and memory, by type of cache;
                       [--window 2048]                             of all layers of a DFlash drafter but the last, whatever its file says
                       [--chunk 256]                               of prompts
                       [--drafter-only]                            the target's rows stay f16; `--types f16,q8_0,default`: what a drafter has by default
                       [--target-only]                             the drafter's rows are of the type that it has by default
                       [--rounds 5]                                sessions of all types at once, which take turns
    bench_attention.py time [--depths 1024,8192,32768,131072] [--rows 1,2,4,8,16,512] [--shapes 4B,8B,27B] [--out FILE.json]

patches/0037 reads q8_0 and q4_0 as they lie; GGML_CUDA_QUANTIZED_KV=0 copies them to f16 first. `time` replays a CUDA graph over 400 MB of caches per case.
`check` exits with the number of wrong cases.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from bench_small_batch import Leaves, compute, error, put, rows_of

import pyggml_spec as ps
from pyggml_spec.drafters.dflash import Hparams
from pyggml_spec.engine.batch import StepOutput
from pyggml_spec.engine.options import AtMost
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.tools.quants import dequantise, quantise, type_id

SHAPES = {"4B": (256, 4, 4), "8B": (128, 8, 4), "27B": (256, 4, 6), "gqa8": (128, 4, 8)}  # head size, K/V heads, heads for each
TYPES = ("f16", "q8_0", "q4_0")
WORST = 1.5e-3  # relative L2 error against float64 over the same quantised values: f16 products and weights
WORST_VECTOR = {
    "f16": WORST,
    "q8_0": 1e-2,
    "q4_0": 2.5e-2,
}  # of the vector kernel, one and two rows below 1,024 positions: it rounds queries to 8 bits and their sums to halfs
SWITCH = "GGML_CUDA_QUANTIZED_KV"


def cache(rng, name: str, size: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of random rows, and their values; long ones repeat 1,024 rows."""
    values = rng.standard_normal((min(rows, 1024), size), np.float32)
    if name == "f16":
        raw = values.astype(np.float16)
        return np.tile(raw, (-(-rows // len(raw)), 1))[:rows], np.tile(raw.astype(np.float64), (-(-rows // len(raw)), 1))[:rows]
    raw = quantise(values, type_id(name))
    exact = dequantise(raw.tobytes(), type_id(name), values.size).reshape(values.shape).astype(np.float64)
    return np.tile(raw, (-(-rows // len(raw)), 1))[:rows], np.tile(exact, (-(-rows // len(raw)), 1))[:rows]


class Attention:
    """A graph of ``copies`` attentions, each over caches of its own."""

    def __init__(
        self, backend: Backend, name: str, shape: tuple[int, int, int], rows: int, depth: int, copies: int = 1, seed: int = 1
    ) -> None:
        size, heads, group = shape
        kind, rng = type_id(name), np.random.default_rng(seed)
        self.leaves = Leaves(
            backend,
            (lib.GGML_TYPE_F32, size, heads * group, rows),
            (lib.GGML_TYPE_F16, depth, rows, 1, 1),
            *[(kind, size * heads, depth, 1)] * 2 * copies,
        )
        q, mask, *caches = self.leaves.tensors
        self.q = rng.standard_normal((rows, heads * group, size)).astype(np.float32)
        last = depth - max(rows, depth // 7) + np.arange(rows)  # padding behind the last row that is seen
        self.mask = np.where(np.arange(depth)[None] <= last[:, None], 0.0, -np.inf)
        (raw_k, self.k), (raw_v, self.v) = (cache(rng, name, size * heads, depth) for _ in range(2))
        put(q, self.q)
        put(mask, self.mask.astype(np.float16))
        for i, tensor in enumerate(caches):
            put(tensor, raw_v if i % 2 else raw_k)
        self.backend, self.allocator = backend, GraphAllocator(backend, "attention")
        g = self.graph = Graph(self.allocator)
        self.scale, self.bytes = size**-0.5, 2 * raw_k.nbytes
        for k, v in zip(caches[::2], caches[1::2]):
            self.out = g.flash_attention(q, k, v, mask, heads, depth, self.scale)
            g.keep_output(self.out)
        g.plan()

    def run(self) -> None:
        compute(self.backend, self.graph)

    def result(self) -> np.ndarray:
        """[rows, heads, size]."""
        out = np.empty(self.q.shape, np.float32)
        lib.ggml_backend_tensor_get(self.out, ffi.from_buffer(out, require_writable=True), 0, out.nbytes)
        return out

    def expected(self) -> np.ndarray:
        rows, count, size = self.q.shape
        heads = self.k.shape[1] // size
        k, v = (x.reshape(len(x), heads, size).transpose(1, 0, 2) for x in (self.k, self.v))
        q = self.q.astype(np.float64).reshape(rows, heads, count // heads, size).transpose(1, 2, 0, 3)
        scores = q @ k.transpose(0, 2, 1)[:, None] * self.scale + self.mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = weights / weights.sum(-1, keepdims=True) @ v[:, None]
        return out.transpose(2, 0, 1, 3).reshape(self.q.shape)

    def close(self) -> None:
        self.graph.close()
        self.allocator.close()
        self.leaves.close()


def check(backend: Backend) -> int:
    wrong, worst = 0, dict.fromkeys(TYPES, 0.0)
    for name in TYPES:
        for shape, of in SHAPES.items():
            for rows in (1, 2, 3, 5, 16, 70):
                for depth in (256, 1024, 2304):
                    one = Attention(backend, name, of, rows, depth)
                    for _ in range(3):
                        one.run()
                    out = one.result()
                    one.run()
                    off = error(out, one.expected()) if np.array_equal(out, one.result()) else 1.0
                    one.close()
                    worst[name] = max(worst[name], off)
                    if not off <= (WORST_VECTOR[name] if rows <= 2 and depth < 1024 else WORST):
                        wrong += 1
                        print(f"WRONG: {name} {shape} {rows} rows {depth}: relative error {off:.2g}")
    print("worst relative error:", ", ".join(f"{name} {off:.2g}" for name, off in worst.items()))
    return wrong


def measure(backend: Backend, name: str, shape: tuple[int, int, int], rows: int, depth: int) -> tuple[float, float, int]:
    """Microseconds of one attention, its terabytes per second, and bytes of the graph's buffer."""
    row_bytes = lib.ggml_row_size(type_id(name), shape[0] * shape[1])
    one = Attention(backend, name, shape, rows, depth, max(1, min(64, 400_000_000 // (2 * depth * row_bytes))))
    copies = (len(one.leaves.tensors) - 2) // 2
    for _ in range(4):
        one.run()
    took = []
    while len(took) < 7:
        began = time.perf_counter()
        one.run()
        took.append(time.perf_counter() - began)
    micros = 1e6 * statistics.median(took) / copies
    out = micros, one.bytes / micros / 1e6, one.allocator.buffer_bytes
    one.close()
    return out


def steps(args) -> list[dict]:
    """Steps of a pair behind a long context."""
    found = []
    if args.window:
        Hparams._windows = staticmethod(lambda file, arch, n_layer: (args.window,) * (n_layer - 1) + (0,))
    kinds = args.types.split(",")
    for depth in rows_of(args.depths):
        for together in [kinds] if args.rounds > 1 else [[kind] for kind in kinds]:
            found += steps_at(args, depth, together)
    return found


def step(runner: ModelRunner, width: int) -> StepOutput:
    """Of drafts where there is a drafter, of given tokens elsewhere."""
    if width == 1:
        return runner.plain_step()
    return runner.verify_step(range(width - 1)) if runner.drafter is None else runner.fused_step(width)


def steps_at(args, depth: int, kinds: list[str]) -> list[dict]:
    """Steps of sessions that take turns, one per type of cache."""
    files, widths = [args.model, *([args.model_draft] if args.model_draft else [])], rows_of(args.rows)
    rows = () if args.target_only else ("draft_cache_type_k", "draft_cache_type_v")
    rows += () if args.drafter_only else ("cache_type_k", "cache_type_v")
    width = AtMost(max(widths)) if max(widths) > 1 else None  # which a target alone takes too
    with ExitStack() as stack:
        runners, filled = [], []
        for kind in kinds:
            options = dict.fromkeys(rows if kind != "default" else (), kind) | {"chunk": args.chunk, "draft_width": width}
            runners.append(stack.enter_context(ps.load(*files, device=args.device, n_ctx=depth + 1024, **options)).runner)
            runners[-1].reset(drafting=max(widths) > 1)
            began = time.perf_counter()
            runners[-1].prefill((np.arange(max(depth, 32)) % 1000).tolist())
            filled.append(time.perf_counter() - began)
        medians: list[dict[int, list[float]]] = [{width: [] for width in widths} for _ in kinds]
        for _ in range(args.rounds):
            for width in widths:
                for runner, took in zip(runners, medians, strict=True):
                    each = []
                    for _ in range(args.steps):
                        began = time.perf_counter()
                        result = step(runner, width)
                        runner.accept(1, int(result.ids[0]))
                        each.append(1000 * (time.perf_counter() - began))
                    took[width].append(statistics.median(each[8:]))
        found = []
        for kind, runner, took, seconds in zip(kinds, runners, medians, filled, strict=True):
            memory = {name: n >> 20 for name, n in runner.memory().items()}
            cached = sum(n for name, n in memory.items() if "weights" not in name)
            ms = {width: statistics.median(each) for width, each in took.items()}
            extremes = {width: (min(each), max(each)) for width, each in took.items()} if args.rounds > 1 else {}
            found.append({"depth": depth, "type": kind, "ms": ms, "extremes": extremes, "fill_s": seconds, "MiB": memory})
            cells = ", ".join(
                f"{width}: {value:.3f}" + (" ({:.3f} to {:.3f})".format(*extremes[width]) if extremes else "")
                for width, value in ms.items()
            )
            print(f"{depth:7} {kind:5} ms per step {cells}; filled in {seconds:.2f} s, without weights {cached} MiB: {memory}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "steps", "time"))
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--depths", default="1024,4096,8192,32768,131072")
    parser.add_argument("--rows", default="1,2,4,8,16,512")
    parser.add_argument("--shapes", default="4B,8B,27B")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--window", type=int)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--drafter-only", action="store_true")
    parser.add_argument("--target-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40, help="of a round, of which the first eight are left out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "steps":
        found = steps(args)
        if args.out:
            args.out.write_text(json.dumps({"switch": os.environ.get(SWITCH, "1"), "cases": found}))
        return
    backend = Backend(pick_device(args.device), threads=1)
    if args.what == "check":
        sys.exit(check(backend))
    found = []
    for shape in args.shapes.split(","):
        for depth in rows_of(args.depths):
            for rows in rows_of(args.rows):
                cells = {name: measure(backend, name, SHAPES[shape], rows, depth) for name in args.types.split(",")}
                found.append({"shape": shape, "depth": depth, "rows": rows, "us_tbs_buffer": cells})
                text = "; ".join(f"{name} {us:8.1f} us {tbs:5.2f} TB/s {mib >> 20:5} MiB" for name, (us, tbs, mib) in cells.items())
                print(f"{shape:5} {depth:7} {rows:4} rows: {text}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"switch": os.environ.get(SWITCH, "1"), "cases": found}))


if __name__ == "__main__":
    main()
