#!/usr/bin/env python3
"""Precision of prompts on a CUDA device, with patches/ and with their products of many rows and chunked delta-nets switched off.

    compare_twins.py logits -m model.gguf --twin model.f32.gguf [--tokens 300,2000]   NMSE of the logits of the last 64 positions to the twin's
    compare_twins.py delta-net [--tokens 64,300,2048,4096]                            relative error of outputs and states to float64

A twin is written by ``make_random_gguf.py --twin``; it is computed without TF32, and its delta-nets token by token. Each leg is a process of its own.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from bench_small_batch import Leaves, compute, get, put

import pyggml_spec as ps
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.tools.compare import nmse

LAST = 64
BY_TOKENS = {"GGML_CUDA_DELTA_CHUNKS": "0"}
LEGS = {
    "patches": {},
    "delta-nets by tokens": BY_TOKENS,
    "switched off": BY_TOKENS | {"GGML_CUDA_LARGE_BATCH": "0", "GGML_CUDA_LARGE_BATCH_EXPERTS": "0"},
}
HEADS, SIZE = 4, 128


def logits(path: str, lengths: list[int], device: str) -> list[np.ndarray]:
    out = []
    with ps.load(path, device=device, n_ctx=max(lengths) + 64, chunk=2048, prefix_memory=0) as session:
        for n in lengths:
            session.runner.reset()
            out.append(session.runner.logits(np.random.default_rng(n).integers(0, session.target.n_vocab, n).tolist())[-LAST:])
    return out


def inputs(tokens: int) -> list[np.ndarray]:
    """q, k, v, g, beta and state as models have them: unit keys and queries, decays below one."""
    rng = np.random.default_rng(tokens)
    q, k, v = (rng.standard_normal((tokens, HEADS, SIZE)) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g, beta = -np.exp(rng.uniform(-6, 0, (tokens, HEADS, 1))), rng.uniform(0.1, 1, (tokens, HEADS, 1))
    return [x.astype(np.float32) for x in (q, k, v, g, beta, rng.standard_normal((HEADS, SIZE, SIZE)) / 10)]


def exact(tokens: int) -> list[np.ndarray]:
    """Outputs [tokens, heads, size] and the last states [heads, size of v, size of k], in float64."""
    q, k, v, g, beta, state = (x.astype(np.float64) for x in inputs(tokens))
    out = np.empty(v.shape)
    for t in range(tokens):
        state *= np.exp(g[t])[:, :, None]
        delta = (v[t] - np.einsum("hji,hi->hj", state, k[t])) * beta[t]
        state += delta[:, :, None] * k[t][:, None, :]
        out[t] = np.einsum("hji,hi->hj", state, q[t]) * SIZE**-0.5
    return [out, state]


def delta_nets(lengths: list[int], device: str) -> list[np.ndarray]:
    """Outputs and states of ggml_gated_delta_net for each number of tokens."""
    mapped = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libggml-base" in line)
    function = ctypes.CDLL(mapped).ggml_gated_delta_net
    function.argtypes, function.restype = [ctypes.c_void_p] * 7 + [ctypes.c_int64], ctypes.c_void_p
    backend, found = Backend(pick_device(device), threads=2), []
    for tokens in lengths:
        values, kind = inputs(tokens), lib.GGML_TYPE_F32
        rows = (kind, SIZE, HEADS, tokens, 1)
        leaves = Leaves(backend, rows, rows, rows, *[(kind, 1, HEADS, tokens, 1)] * 2, (kind, SIZE, SIZE, HEADS, 1))
        for tensor, value in zip(leaves.tensors, values, strict=True):
            put(tensor, value)
        allocator = GraphAllocator(backend, "delta-net")
        graph = Graph(allocator)
        address = [int(ffi.cast("uintptr_t", tensor)) for tensor in (graph.ctx, *leaves.tensors)]
        node = ffi.cast("struct ggml_tensor *", function(*address, 1))
        graph.keep_output(node)
        graph.plan()
        compute(backend, graph)
        flat = get(node).reshape(-1)
        split = tokens * HEADS * SIZE
        found += [flat[:split].reshape(tokens, HEADS, SIZE), flat[split:].reshape(HEADS, SIZE, SIZE)]
        graph.close()
        allocator.close()
        leaves.close()
    return found


def leg(what: str, path: str | None, args, env: dict[str, str]) -> list[np.ndarray]:
    """The arrays of a process with these switches."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.npz"
        command = [sys.executable, __file__, what, "--tokens", args.tokens, "--device", args.device, "--dump", str(out)]
        subprocess.run(command + (["-m", path] if path else []), check=True, env=os.environ | env)
        with np.load(out) as arrays:
            return [arrays[name] for name in arrays.files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("logits", "delta-net"))
    parser.add_argument("-m", "--model")
    parser.add_argument("--twin")
    parser.add_argument("--tokens")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--dump", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.tokens = args.tokens or ("300,2000" if args.what == "logits" else "64,300,2048,4096")
    lengths = [int(n) for n in args.tokens.split(",")]
    if args.dump:
        np.savez(args.dump, *(logits(args.model, lengths, args.device) if args.what == "logits" else delta_nets(lengths, args.device)))
        return
    if args.what == "logits":
        twin = leg("logits", args.twin, args, BY_TOKENS | {"NVIDIA_TF32_OVERRIDE": "0"})
        for name, env in LEGS.items():
            found = leg("logits", args.model, args, env)
            told = ", ".join(f"{n} tokens {nmse(ours, right):.2e}" for n, ours, right in zip(lengths, found, twin, strict=True))
            print(f"{name:22} NMSE to {Path(args.twin).name}, last {LAST} positions: {told}", flush=True)
        return
    right = [array for n in lengths for array in exact(n)]
    for name, env in (("patches", {}), ("by tokens", BY_TOKENS)):
        errors = [np.linalg.norm(ours - to) / np.linalg.norm(to) for ours, to in zip(leg("delta-net", None, args, env), right, strict=True)]
        told = ", ".join(f"{n} tokens {out:.1e} {state:.1e}" for n, out, state in zip(lengths, errors[::2], errors[1::2], strict=True))
        print(f"{name:22} relative error of outputs and last state to float64: {told}", flush=True)


if __name__ == "__main__":
    main()
