#!/usr/bin/env python3
"""Profile of a decode step on a CPU: CPU time by class of nodes, and the overhead of Python.

    profile_cpu.py [-m target.gguf -md drafter.gguf] [--kernels native|ggml] [--widths 1,8,16] [--context 200] [--steps 60] [--nodes 12]

Nodes are computed one by one with one thread; a node's time is the minimum over all steps, minus the cost of an empty node. `together`: the step as one
graph. `Python`: the step without launch and wait. `nodes`: those with a barrier when several threads compute. Width 1 is a plain step; others
draft and verify, or verify only without a drafter.
"""

import argparse
import time
from collections import defaultdict
from unittest.mock import patch

import numpy as np

import pyggml_spec as ps
from pyggml_spec.ggml.library import check, ffi, lib, new_err, text
from pyggml_spec.ggml.step_io import StepFields, StepTimes

NOTHING = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE")  # what ggml computes by not computing
CLASSES = {
    "MUL_MAT": "products of ggml",
    "FLASH_ATTN_EXT": "attention of ggml",
    "GATED_DELTA_NET": "delta-net",
    "SSM_CONV": "convolution",
    "RMS_NORM": "norms",
    "NORM": "norms",
    "SET_ROWS": "K/V rows",
    "ROPE": "rope",
    "CONT": "copies",
    "CPY": "copies",
    "DUP": "copies",
    "CONCAT": "copies",
    "GET_ROWS": "rows",
    "ARGMAX": "argmax",
}


def class_of(op: str, name: str) -> str:
    """Own nodes say what they are; what is left is elementwise."""
    return name if name.startswith("native ") else CLASSES.get(op, "elementwise")


def stepper(engine, width: int, drafting: bool):
    if width == 1:
        return engine.plain_step
    return (lambda: engine.fused_step(width)) if drafting else (lambda: engine.verify_step(list(range(7, 6 + width))))


class Watch:
    """Stands in for StepFields.launch: computes node by node, or as a whole, and keeps the least times per graph."""

    def __init__(self, whole) -> None:
        self.whole, self.alone = whole, False
        self.times: dict[int, np.ndarray] = {}
        self.together: dict[int, float] = {}
        self.graphs: dict[int, object] = {}

    def __call__(self, fields) -> None:
        graph, key = fields.graph, id(fields.graph)
        if not self.alone:
            began = time.thread_time()
            self.whole(fields)
            self.together[key] = min(self.together.get(key, 1e9), 1e6 * (time.thread_time() - began))
            return
        home = fields.io.homes[-1]
        lib.ggml_backend_tensor_set(home, ffi.from_buffer(fields.io.mirror), 0, fields._upload_end)
        out, err = np.empty(graph.n_nodes), new_err()
        check(lib.pgs_graph_times(graph.handle, ffi.cast("double *", ffi.from_buffer(out)), err), err)
        start = fields._end if fields._read_start is None else fields._read_start
        if fields._end > start:
            lib.ggml_backend_tensor_get(home, ffi.from_buffer(fields.io.mirror[start:]), start, fields._end - start)
        self.graphs[key] = graph
        self.times[key] = np.minimum(self.times.get(key, out), out)


def measure(engine, width: int, drafting: bool, context: int, steps: int) -> tuple[object, np.ndarray, float, float]:
    """The graph of a step, microseconds of its nodes, of the step at once, and of Python."""
    engine.reset(drafting=drafting and width > 1)
    engine.prefill([100 + 7 * i % 200 for i in range(context)])
    step = stepper(engine, width, drafting)

    def run() -> None:
        engine.accept(1, int(step().ids[0]))

    for _ in range(3):
        run()
    watch = Watch(StepFields.launch)
    with patch.object(StepFields, "launch", lambda fields: watch(fields)):  # noqa: PLW0108  an instance would not be bound
        for i in range(2 * steps):
            watch.alone = i % 2 == 1
            run()
    python = 1e9
    with patch.object(StepFields, "launch", lambda self: None), patch.object(StepFields, "wait", lambda self: StepTimes(0, 0, 0)):
        for _ in range(steps):
            began = time.thread_time()
            run()
            python = min(python, 1e6 * (time.thread_time() - began))
    key = max(watch.times, key=lambda k: watch.times[k].sum())
    return watch.graphs[key], watch.times[key], watch.together[key], python


def shape(tensor) -> str:
    return "x".join(str(n) for n in tensor.ne) if tensor != ffi.NULL else ""


def report(args, graph, times: np.ndarray, together: float, python: float, width: int) -> None:
    nodes = [lib.ggml_graph_node(graph.gf, i) for i in range(graph.n_nodes)]
    ops = [text(lib.ggml_op_desc(node)) for node in nodes]
    alone = min(t for t, op in zip(times, ops, strict=True) if op in NOTHING)
    total, count, each, often = defaultdict(float), defaultdict(int), defaultdict(float), defaultdict(int)
    for node, op, spent in zip(nodes, ops, times, strict=True):
        if op not in NOTHING and spent > 0:
            kind, left = class_of(op, text(lib.ggml_get_name(node))), max(0.0, spent - alone)
            total[kind] += left
            count[kind] += 1
            key = f"{kind} ({op}) {shape(node)}"
            each[key] += left
            often[key] += 1
    whole = sum(total.values())
    print(f"\n{width} rows: {whole:.0f} us in {sum(count.values())} nodes, together {together:.0f} us; Python {python:.0f} us")
    print("| class | us | share | nodes |\n|---|---|---|---|")
    for kind in sorted(total, key=total.__getitem__, reverse=True):
        print(f"| {kind} | {total[kind]:.1f} | {100 * total[kind] / whole:.1f} % | {count[kind]} |")
    for key in sorted(each, key=each.__getitem__, reverse=True)[: args.nodes]:
        print(f"  {each[key]:8.1f} us = {often[key]:3d} x {each[key] / often[key]:8.2f}  {key}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--kernels", choices=("native", "ggml"), default="native")
    parser.add_argument("--widths", default="1,8,16")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=0, help="how many of the dearest nodes to name")
    args = parser.parse_args()
    widths = [int(width) for width in args.widths.split(",")]
    drafting = args.model_draft is not None or args.model is None
    room = args.context + 3 * args.steps + 3 + 2 * max(widths)
    options = {"draft_width": max(2, *widths)} if drafting else {}
    with ps.load(args.model, args.model_draft, device="CPU", threads=1, kernels=args.kernels, n_ctx=room, **options) as session:
        print(f"{session.backend.device.description}, kernels: {session.configuration().kernels}")
        for width in widths:
            report(args, *measure(session.runner, width, drafting, args.context, args.steps), width)


if __name__ == "__main__":
    main()
