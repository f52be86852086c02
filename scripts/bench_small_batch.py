#!/usr/bin/env python3
"""Matrix products of quantised weights with few or many rows on a CUDA device: accuracy and speed against ggml's kernels.

    bench_small_batch.py check [--types q4_K,q6_K] [--rows 1-64]        error against float64; single rows against batches; replays
    bench_small_batch.py time  [--types ...] [--shapes ...] [--rows 1,8,16,32,64] [--before LIBRARIES] [--out FILE.json]

Kernels of patches/0020 and later (disabled by GGML_CUDA_SMALL_BATCH=0; GGML_CUDA_SMALL_BATCH_TMA=0 loads as before Hopper), most types by 0036
(GGML_CUDA_SMALL_BATCH_TYPES=0), from 65 rows on those of patches/0031 (GGML_CUDA_LARGE_BATCH=0). `time` alternates one process per side, each replaying
a CUDA graph over 1 GB of weights per shape, and prints medians; --before compares with another build.
`check` exits with the number of wrong cases.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
from random_gguf.model import quantise

from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.library import check, ffi, lib, new_err
from pyggml_spec.tools.quants import dequantise, type_id

LARGE = ("q4_K", "q5_K", "q6_K", "q8_0", "q4_0", "iq4_xs", "mxfp4")  # many rows
TYPES = (*LARGE[:-1], "q4_1", "q5_0", "q5_1", "iq4_nl", "q2_K", "q3_K", "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m")
BLOCKS_OF_32 = ("q8_0", "q4_0", "iq4_xs", "q4_1", "q5_0", "q5_1", "iq4_nl")  # and what unpacks like them: by cp.async from 8 rows on
SHAPES = {  # n_in, n_out
    "27B gate+up": (5120, 34816),
    "27B down": (17408, 5120),
    "27B in": (5120, 16480),
    "27B out": (6144, 5120),
    "4B gate+up": (2560, 18432),
    "4B down": (9216, 2560),
    "4B in": (2560, 12352),
    "4B out": (4096, 2560),
    "head": (5120, 248320),
}
EXPERTS = {
    "35B-A3B gate": (2048, 512, 256, 8),
    "35B-A3B down": (512, 2048, 256, 8),
    "gpt-oss-20b gate": (2880, 2880, 32, 4),
}  # n_in, n_out, experts, used
CHECKED = ((5120, 1000), (512, 1), (256, 63), (768, 520), (2560, 12352), (17408, 640), (9216, 2560), (5120, 15400))
OF_MXFP4 = (2880, 1016)  # rows that end within a super-block
SMALL = 64  # most rows of the kernels for few
BY_CUBLAS = 256  # rows from which on other types are unpacked for cuBLAS
WORST = 1e-3  # relative L2 error; ggml's own kernels, which round activations to 8 bits, are at 1e-2
WORST_SWIGLU = 2.5e-3  # of SwiGLU to its own size besides; a single output, which rounded activations alone move by up to 2.8e-3, has only the bound by slopes


class Leaves:
    """Tensors in a buffer of their own."""

    def __init__(self, backend: Backend, *specs: tuple):
        self.ctx = lib.ggml_init(
            ffi.new("struct ggml_init_params *", {"mem_size": lib.ggml_tensor_overhead() * (len(specs) + 1), "no_alloc": True})[0]
        )
        self.tensors = [lib.ggml_new_tensor(self.ctx, kind, len(shape), ffi.new("int64_t[]", shape)) for kind, *shape in specs]
        self.buffer = backend.allocate(self.ctx)
        if self.buffer == ffi.NULL:
            sys.exit("the device has no memory for these weights")

    def close(self) -> None:
        lib.ggml_backend_buffer_free(self.buffer)
        lib.ggml_free(self.ctx)


def put(tensor, values: np.ndarray) -> None:
    data = np.ascontiguousarray(values)
    lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, data.nbytes)


def get(tensor) -> np.ndarray:
    out = np.empty((int(tensor.ne[2]), int(tensor.ne[1]), int(tensor.ne[0])), np.float32)
    lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(out, require_writable=True), 0, out.nbytes)
    return out if out.shape[0] > 1 else out[0]


def compute(backend: Backend, graph: Graph) -> None:
    err = new_err()
    check(lib.pgs_graph_compute(graph.handle, err), err)
    backend.synchronize()


def weights(rng, kind: int, n_in: int, rows: int) -> np.ndarray:
    """Bytes of a random matrix [rows, row bytes]; large ones repeat 256 rows. Types of grids, whose search takes minutes, get random bits."""
    n, name = min(rows, 256), lib.ggml_type_name(kind)
    if not ffi.string(name).startswith((b"iq1", b"iq2", b"iq3")):
        block = quantise(rng.standard_normal((n, n_in), np.float32) / n_in**0.5, kind)
    else:
        bits = rng.integers(0, 256, (n * (n_in // 256), lib.ggml_type_size(kind)), np.uint8)
        words = bits.view(np.uint16)

        def scale_by(d: float) -> None:
            half = int(np.float16(d).view(np.uint16))
            if ffi.string(name) == b"iq1_m":
                words[:, 24:] = (words[:, 24:] & 0x0FFF) | np.array([(half << 12 - 4 * i & 0xF000) for i in range(4)], np.uint16)
            else:
                words[:, 0] = half

        scale_by(1.0)
        usual = np.linalg.norm(dequantise(bits[0].tobytes(), kind, 256)) / 16
        scale_by(1 / usual / n_in**0.5)
        block = bits.reshape(n, -1)
    return np.tile(block, (-(-rows // len(block)), 1))[:rows]


@dataclass
class Case:
    """The product for weights a, b [n_out, n_in], activations x [rows, n_in] and an addend z [rows, n_out]."""

    name: str
    build: object
    expect: object  # of float64


def silu(v):
    return v / (1 + np.exp(-v))


CASES = (
    Case("product", lambda g, a, b, x, z: g.matmul(a, x), lambda a, b, x, z: x @ a.T),
    Case("product + residual", lambda g, a, b, x, z: g.add(g.matmul(a, x), z), lambda a, b, x, z: x @ a.T + z),
    Case(
        "SwiGLU of two",
        lambda g, a, b, x, z: g.gated("swiglu", g.matmul(a, x), g.matmul(b, x)),
        lambda a, b, x, z: silu(x @ a.T) * (x @ b.T),
    ),
    Case(
        "SwiGLU of halves",
        lambda g, a, b, x, z: g.gated_halves("swiglu", g.matmul(a, x)),
        lambda a, b, x, z: silu(x @ a[: len(a) // 2].T) * (x @ a[len(a) // 2 :].T),
    ),
)


def swiglu_size(a: np.ndarray, b: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """How large errors of silu(a) * b are, by row, where those of a and b are as large as ``usual``: one output may be far below them."""
    s = 1 / (1 + np.exp(-a))
    off = usual * np.linalg.norm(np.abs(s * (1 + a * (1 - s)) * b) + np.abs(a * s), axis=-1)
    return off / a.shape[-1] ** 0.5


def rows_of(text: str) -> list[int]:
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def error(got: np.ndarray, expected: np.ndarray, usual: float = 0.0) -> float:
    """Relative L2 error; ``usual`` is the size of outputs that do not happen to cancel."""
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), usual * expected.size**0.5, 1e-30))


def patched(name: str, n_in: int, n_out: int, rows: int) -> bool:
    """Whether the patch's kernels compute these products; ggml's have an error of 1e-2."""
    if rows > SMALL or name not in TYPES:
        return n_out % 8 == 0 if name in LARGE else rows >= BY_CUBLAS and n_out >= 256
    tma = os.environ.get("GGML_CUDA_SMALL_BATCH_TMA") != "0" and lib.ggml_row_size(type_id(name), n_in) % 4 == 0
    if tma:
        size = lib.ggml_row_size(type_id(name), n_in) * n_out
        return rows >= (4 if name in ("iq4_xs", "iq4_nl") and size < 40_000_000 else 2 if name == "iq1_s" and size < 30_000_000 else 1)
    return (8 if name in BLOCKS_OF_32 else 4) <= rows <= 16


def nan_spreads(backend: Backend, x, a, values: np.ndarray, count: int = 16, bad: int = 3) -> bool:
    """Whether a NaN in one row of activations spreads to another row, or disappears."""
    allocator = GraphAllocator(backend, "check")
    g = Graph(allocator)
    out = g.matmul(a, lib.ggml_view_2d(g.ctx, x, x.ne[0], count, x.nb[1], 0))
    g.keep_output(out)
    g.plan()
    compute(backend, g)
    before = get(out)
    broken = values.copy()
    broken[bad, 7] = np.nan
    put(x, broken)
    compute(backend, g)
    after = get(out)
    put(x, values)
    g.close()
    allocator.close()
    others = [row for row in range(count) if row != bad]
    wrong = not np.array_equal(before[others], after[others]) or not np.isnan(after[bad]).all()
    if wrong:
        print("  WRONG: a NaN in one row of activations reaches other rows, or does not reach all of its own outputs")
    return wrong


def check_type(backend: Backend, name: str, rows: list[int], shapes) -> tuple[int, dict]:
    """Number of wrong cases, and the worst error."""
    kind, rng, wrong, worst, variant = type_id(name), np.random.default_rng(1), 0, 0.0, 0
    for n_in, n_out in shapes:
        leaves = Leaves(backend, (kind, n_in, n_out), (kind, n_in, n_out), *((lib.GGML_TYPE_F32, n, max(rows)) for n in (n_in, n_out)))
        a, b, x, z = leaves.tensors
        raw = [weights(rng, kind, n_in, n_out) for _ in range(2)]
        exact = [dequantise(w.tobytes(), kind, n_in * n_out).reshape(n_out, n_in).astype(np.float64) for w in raw]
        values = rng.standard_normal((max(rows), n_in)).astype(np.float32)
        values[::7] *= 1e5 ** rng.random((len(values[::7]), 1), np.float32)  # outliers, which real activations have
        addend = rng.standard_normal((max(rows), n_out)).astype(np.float32)
        for tensor, data in ((a, raw[0]), (b, raw[1]), (x, values), (z, addend)):
            put(tensor, data)
        for case in CASES:
            if case.name.endswith("halves") and n_out % 2:
                continue
            with np.errstate(over="ignore"):
                expected = case.expect(*exact, values.astype(np.float64), addend.astype(np.float64))
            usual = np.linalg.norm(values, axis=1) / n_in**0.5  # of a product; weights are normal, of size n_in ** -0.5
            own, usual_own = not case.name.startswith("product") and expected.shape[1] > 1, 0.3 * np.minimum(usual, 1) * usual
            if not case.name.startswith("product"):
                x64, half = values.astype(np.float64), n_out // 2
                pair = (exact[0][:half], exact[0][half:]) if case.name.endswith("halves") else exact
                with np.errstate(over="ignore"):
                    usual = swiglu_size(x64 @ pair[0].T, x64 @ pair[1].T, usual)
            alone, changed = None, []
            for count in (count for count in rows if patched(name, n_in, n_out, count)):
                allocator = GraphAllocator(backend, "check")
                g = Graph(allocator)
                part = lib.ggml_view_2d(g.ctx, x, n_in, count, x.nb[1], 0)
                out = case.build(g, a, b, part, lib.ggml_view_2d(g.ctx, z, n_out, count, z.nb[1], 0))
                g.keep_output(out)
                g.plan()
                compute(backend, g)
                first = get(out)
                for _ in range(2):  # the third is a replay
                    put(out, np.full(first.shape, np.nan, np.float32))
                    compute(backend, g)
                    again = get(out)
                e = max(error(first[r], expected[r], usual[r]) for r in range(count))
                worst = max(worst, e)
                to_own = max(error(first[r], expected[r], usual_own[r]) for r in range(count)) if own else 0.0
                if not e < WORST or not to_own < WORST_SWIGLU or not np.array_equal(first, again):
                    wrong += 1
                    print(
                        f"  WRONG {name} {n_in} -> {n_out}, {case.name}, {count} rows: error {e:.2e}, to its own size {to_own:.2e}, replay equal {np.array_equal(first, again)}"
                    )
                alone = first[0] if alone is None else alone
                if not np.array_equal(first[0], alone):
                    changed.append(count)
                g.close()
                allocator.close()
            for count in {16, max(rows)} & set(rows):
                if case.name == "product" and name in (*TYPES, *LARGE) and patched(name, n_in, n_out, count):
                    wrong += nan_spreads(backend, x, a, values, count)
            if changed:
                variant += 1
                print(f"  {name} {n_in} -> {n_out}, {case.name}: row 0 changes from {rows[0]} rows to {changed[:8]}")
        leaves.close()
    return wrong, {"worst_error": worst, "cases_whose_row_depends_on_others": variant}


def check_experts(backend: Backend, name: str) -> int:
    """Routed products, gate and up with SwiGLU, and rows that do not depend on what other tokens chose; from 65 tokens on the kernels of patches/0034."""
    kind, rng, wrong = type_id(name), np.random.default_rng(2), 0
    shapes = ((512, 520, 16, 4), (2048, 512, 64, 8), (256, 64, 8, 2), *(((*OF_MXFP4, 8, 4),) if name == "mxfp4" else ()))
    for n_in, n_out, n_expert, used in shapes:
        tokens = 450
        leaves = Leaves(
            backend,
            *[(kind, n_in, n_out, n_expert)] * 2,
            (lib.GGML_TYPE_F32, n_in, 1, tokens),
            (lib.GGML_TYPE_F32, n_in, used, tokens),
            (lib.GGML_TYPE_I32, used, tokens),
        )
        a, b, x, own, ids = leaves.tensors
        raw = [weights(rng, kind, n_in, n_out * n_expert) for _ in range(2)]
        exact = [dequantise(w.tobytes(), kind, n_in * n_out * n_expert).reshape(n_expert, n_out, n_in).astype(np.float64) for w in raw]
        values = rng.standard_normal((tokens, n_in)).astype(np.float32)
        values_own = rng.standard_normal((tokens, used, n_in)).astype(np.float32)  # of each pair, as before the down product
        chosen = np.stack([rng.permutation(n_expert)[:used] for _ in range(tokens)]).astype(np.int32)
        chosen[5] = chosen[4]
        chosen[64:] = np.stack([rng.permutation(n_expert - 1)[:used] for _ in range(tokens - 64)])
        chosen[64:300, 0] = n_expert - 1  # an expert of many tokens, and below 64 tokens and after 300 of few or none
        for tensor, data in ((a, raw[0]), (b, raw[1]), (x, values), (own, values_own), (ids, chosen)):
            put(tensor, data)
        for case in ("product", "product of pairs", "SwiGLU"):
            alone = None
            source, tensor = (
                (values_own, own) if case == "product of pairs" else (np.broadcast_to(values[:, None], (tokens, used, n_in)), x)
            )
            products = []
            for e in exact[: 2 if case == "SwiGLU" else 1]:
                products.append(np.empty((tokens, used, n_out)))
                for expert in range(n_expert):
                    products[-1][chosen == expert] = source[chosen == expert] @ e[expert].T
            every, usual = products[0], np.zeros((tokens, used))
            if case == "SwiGLU":
                every = silu(products[0]) * products[1]
                usual = swiglu_size(*products, np.linalg.norm(source, axis=-1) / n_in**0.5)
            few, many = (9, 16, 17, 33, 64) if name in TYPES else (), (65, 129, 300, 450) if name in LARGE else ()
            for count in (*few, *many):  # others are ggml's own kernels
                allocator = GraphAllocator(backend, "check")
                g = Graph(allocator)
                xs = lib.ggml_view_3d(g.ctx, tensor, n_in, tensor.ne[1], count, tensor.nb[1], tensor.nb[2], 0)
                choice = lib.ggml_view_2d(g.ctx, ids, used, count, ids.nb[1], 0)
                out = g.matmul_experts(a, xs, choice)
                out = g.gated("swiglu", out, g.matmul_experts(b, xs, choice)) if case == "SwiGLU" else out
                g.keep_output(out)
                g.plan()
                compute(backend, g)
                first = get(out)
                for _ in range(2):
                    put(out, np.full(first.shape, np.nan, np.float32))
                    compute(backend, g)
                    got = get(out)
                e = max(error(got[t], every[t], float(np.linalg.norm(usual[t]) / used**0.5)) for t in range(count))
                to_own, most = max(error(got[t], every[t]) for t in range(count)), WORST if count <= SMALL else WORST_SWIGLU
                alone = got[0] if alone is None or count == SMALL + 1 else alone  # other bits from there on
                same = np.array_equal(got[0], alone)
                if not e < WORST or not to_own < most or not same or not np.array_equal(first, got):
                    wrong += 1
                    print(
                        f"  WRONG {name} experts {n_in} -> {n_out}, {count} tokens, {case}: error {e:.2e}, to its own size {to_own:.2e}, token 0 as alone {same}, "
                        f"replay equal {np.array_equal(first, got)}"
                    )
                g.close()
                allocator.close()
        leaves.close()
    return wrong


def time_shape(backend: Backend, kind: int, shape: tuple[int, ...], rows: list[int], repeats: int) -> dict[int, float]:
    """Microseconds per product by rows, in a replayed graph."""
    rng, (n_in, n_out, *routed) = np.random.default_rng(3), shape
    dims = (kind, n_in, n_out, *routed[:1])
    size = lib.ggml_row_size(kind, n_in) * n_out * (routed[0] if routed else 1)
    distinct = max(1, -(-(1 << 30) // size))
    count = max(distinct, -(-32 // distinct) * distinct)
    used, most = routed[1] if routed else 1, max(rows)
    activations = (lib.GGML_TYPE_F32, n_in, 1, most) if routed else (lib.GGML_TYPE_F32, n_in, most)
    # in turn, because products that follow each other with the same activations convert them once
    leaves = Leaves(backend, *[dims] * distinct, activations, activations, (lib.GGML_TYPE_I32, used, most))
    *matrices, x, x2, ids = leaves.tensors
    data = weights(rng, kind, n_in, n_out * (routed[0] if routed else 1))
    for matrix in matrices:
        put(matrix, data)
    put(x, rng.standard_normal((most, n_in)).astype(np.float32))
    put(x2, rng.standard_normal((most, n_in)).astype(np.float32))
    put(ids, np.stack([rng.permutation(routed[0] if routed else 1)[:used] for _ in range(most)]).astype(np.int32))
    times = {}
    for n in rows:
        allocator = GraphAllocator(backend, "time")
        g = Graph(allocator)
        for i in range(count):
            source = (x, x2)[i % 2]
            if routed:
                xs = lib.ggml_view_3d(g.ctx, source, n_in, 1, n, x.nb[1], x.nb[2], 0)
                g.expand(g.matmul_experts(matrices[i % distinct], xs, lib.ggml_view_2d(g.ctx, ids, used, n, ids.nb[1], 0)))
            else:
                g.expand(g.matmul(matrices[i % distinct], lib.ggml_view_2d(g.ctx, source, n_in, n, x.nb[1], 0)))
        g.plan()
        for _ in range(3):
            compute(backend, g)
        taken = []
        for _ in range(repeats):
            started = time.perf_counter()
            compute(backend, g)
            taken.append((time.perf_counter() - started) / count * 1e6)
        times[n] = statistics.median(taken)
        g.close()
        allocator.close()
    leaves.close()
    return times


def leg(args) -> None:
    """One side of `time`: takes shapes from its input, one a line, and answers with times."""
    backend = Backend(pick_device(args.device))
    for line in sys.stdin:
        name, shape = json.loads(line)
        shapes = {**SHAPES, **EXPERTS}
        print(json.dumps(time_shape(backend, type_id(name), shapes[shape], rows_of(args.rows), args.repeats)), flush=True)


def compare(args) -> None:
    shapes = {**SHAPES, **EXPERTS}
    chosen = [s for s in shapes if any(part in s for part in args.shapes.split(","))] if args.shapes else list(shapes)
    first = "before" if args.before else "ggml"
    sides = {first: {"GGML_CUDA_SMALL_BATCH": "0", "GGML_CUDA_LARGE_BATCH": "0"}, "small batch": {}}
    if args.before:
        sides[first] = {"LLAMA_CPP_LIB_PATH": args.before, "LD_LIBRARY_PATH": args.before}
    command = [sys.executable, __file__, "leg", "--rows", args.rows, "--device", args.device, "--repeats", str(args.repeats)]
    run = {
        side: subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for side, variables in sides.items()
    }
    results = []
    print(f"microseconds per product, {first} / small batch (% of {args.bandwidth:.0f} GB/s)")
    for name in args.types.split(","):
        for shape in chosen:
            times = {}
            for side, process in run.items():
                process.stdin.write(json.dumps((name, shape)) + "\n")
                process.stdin.flush()
                times[side] = json.loads(process.stdout.readline())
            n_in, n_out, *routed = shapes[shape]
            size = lib.ggml_row_size(type_id(name), n_in) * n_out
            results.append({"type": name, "shape": shape, "n_in": n_in, "n_out": n_out, "routed": routed, "us": times})
            cells = [
                f"{rows}: {times[first][rows]:7.1f} / {us:6.1f}" + ("" if routed else f" ({size / us / 1e3 / args.bandwidth * 100:2.0f})")
                for rows, us in times["small batch"].items()
            ]
            print(f"{name:7s} {shape:14s} " + " | ".join(cells), flush=True)
    for process in run.values():
        process.stdin.close()
        process.wait()
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"device": pick_device(args.device).description, "results": results}, file, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time", "leg"))
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--shapes", default="", help="parts of names, by default all")
    parser.add_argument("--rows", help="for example 1-64 or 1,8,16; by default 1-64 (check), 1,8,16,32,64 (time)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bandwidth", type=float, default=4547, help="GB/s that the device reads at (one H200: 4547)")
    parser.add_argument("--before", help="folder with the libraries of another build, whose times come first")
    parser.add_argument("--out")
    args = parser.parse_args()
    args.rows = args.rows or ("1-64" if args.what == "check" else "1,8,16,32,64")
    if args.what != "check":
        return (leg if args.what == "leg" else compare)(args)
    backend, wrong = Backend(pick_device(args.device)), 0
    for name in args.types.split(","):
        failed, found = check_type(backend, name, rows_of(args.rows), (*CHECKED, OF_MXFP4) if name == "mxfp4" else CHECKED)
        failed += check_experts(backend, name) if name in (*TYPES, *LARGE) else 0
        print(f"{name}: {failed} wrong; {json.dumps(found)}", flush=True)
        wrong += failed
    sys.exit(min(wrong, 100))


if __name__ == "__main__":
    main()
