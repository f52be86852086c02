#!/usr/bin/env python3
"""Every kernel of a step on a CUDA device under its roofs: operations and bytes of device memory as Nsight Compute counts them, and a picture.

    roofline.py -m target.gguf -md drafter.gguf [--rows 1,16,2048] --out docs/benchmarks/roofline.json
    roofline.py --draw docs/benchmarks/roofline.json

One step for each number of rows (1: plain; up to the drafter's block: draft, verify, commit; more: a chunk of a prompt), launched kernel by kernel. The roofs are
measured in the same run, by a copy and by a product of halfs. Writes FILE.json and FILE.svg. Needs ncu, and PyTorch for the roofs.
"""

import argparse
import csv
import ctypes
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

TIME, BYTES = "gpu__time_duration.sum", "dram__bytes.sum"
OPS = {  # by event; a multiplication with its addition is two
    "sm__ops_path_tensor_src_fp16.sum": 1,
    "sm__ops_path_tensor_src_tf32_dst_fp32.sum": 1,
    "sm__ops_path_tensor_src_int8.sum": 1,
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": 2,
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": 1,
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum": 1,
}
FIELDS = ("launches", "seconds", "bytes", "ops")
WIDTH, HEIGHT, LEFT, TOP = 760, 460, 70, 40
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed")


def work(args) -> None:
    """What ncu watches: one step between cuProfilerStart and Stop, behind one like it."""
    import pyggml_spec as ps

    rows = int(args.rows)
    chunk, driver = max(512, rows), ctypes.CDLL("libcuda.so.1")
    with ps.load(
        args.model, args.model_draft, device=args.device, n_ctx=2 * chunk + 1024, chunk=chunk, graphs=False, prefix_memory=0
    ) as session:
        runner = session.runner
        block = runner.options.width
        runner.reset(drafting=1 < rows <= block)
        runner.prefill(list(range(10, 42)))
        for measured in (False, True):
            runner.resources.synchronize()
            if measured:
                driver.cuProfilerStart()
            if rows > block:
                runner.prefill([10 + i % 1000 for i in range(rows)])
            else:
                result = runner.fused_step(rows) if rows > 1 else runner.plain_step()
                runner.accept(1, int(result.ids[0]))
            runner.resources.synchronize()
        driver.cuProfilerStop()


def roofs() -> dict:
    """The card, bytes per second of a copy (read and written), and operations per second of a product of halfs."""
    import torch

    def seconds(call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            call()
        start.record()
        for _ in range(10):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 10000

    a, b = (torch.randn(1 << 28, device="cuda") for _ in range(2))
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    copied, multiplied = seconds(lambda: a.copy_(b)), seconds(lambda: torch.mm(x, y))
    return {"card": torch.cuda.get_device_name(), "bytes_per_s": 2 * a.nbytes / copied, "ops_per_s": 2 * 8192**3 / multiplied}


def count(args, rows: str) -> dict[str, dict[str, float]]:
    """Kernels of a step by name."""
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--metrics", ",".join([TIME, BYTES, *OPS]), sys.executable, __file__, *sys.argv[1:], "--rows", rows, "--work"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | {"GGML_CUDA_DISABLE_GRAPHS": "1"})
    out = done.stdout
    table = [line for line in out.splitlines() if line.startswith('"')]
    if len(table) < 3:
        raise RuntimeError(f"ncu counted nothing: {out[-1500:]} {done.stderr[-1500:]}")
    kernels: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(FIELDS, 0.0))
    for row in list(csv.DictReader(table))[1:]:  # behind the units

        def of(name: str, row: dict = row) -> float:
            text = (row.get(name) or "").replace(",", "")
            return float(text) if text.replace(".", "").replace("e+", "").isdigit() else 0.0

        name = row["Kernel Name"].removeprefix("void ").split("(")[0].split("<")[0]
        more = 1.0, of(TIME) / 1e9, of(BYTES), sum(by * of(op) for op, by in OPS.items())
        for field, value in zip(FIELDS, more, strict=True):
            kernels[name][field] += value
    return dict(kernels)


def svg(found: dict) -> str:
    """Operations per byte against operations per second, both logarithmic; a kernel's area is its share of the step's time."""
    bandwidth, top = found["bytes_per_s"], found["ops_per_s"]
    x_of = lambda intensity: LEFT + WIDTH * (math.log10(intensity) + 2) / 6  # noqa: E731 - 0.01 to 10,000
    y_of = lambda ops: TOP + HEIGHT * (15.2 - math.log10(ops)) / 6.2  # noqa: E731 - 1e9 to 1.6e15
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{TOP + HEIGHT + 80}" font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="{LEFT}" y="18" font-size="14">{found["title"]}</text>',
    ]
    for power in range(-2, 5):
        out.append(f'<line x1="{x_of(10**power):.0f}" y1="{TOP}" x2="{x_of(10**power):.0f}" y2="{TOP + HEIGHT}" stroke="#e5e7eb"/>')
        out.append(f'<text x="{x_of(10**power):.0f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(9, 16):
        out.append(f'<line x1="{LEFT}" y1="{y_of(10**power):.0f}" x2="{LEFT + WIDTH}" y2="{y_of(10**power):.0f}" stroke="#e5e7eb"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y_of(10**power) + 4:.0f}" text-anchor="end">{10.0 ** (power - 12):g}</text>')
    ridge = top / bandwidth
    line = f"{x_of(0.01):.0f},{y_of(0.01 * bandwidth):.0f} {x_of(ridge):.0f},{y_of(top):.0f} {x_of(10000):.0f},{y_of(top):.0f}"
    out.append(f'<polyline points="{line}" fill="none" stroke="#111827" stroke-width="2"/>')
    out.append(
        f'<text x="{x_of(ridge) - 8:.0f}" y="{y_of(top):.0f}" text-anchor="end">{top / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s</text>'
    )
    out.append(f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">operations per byte of device memory</text>')
    out.append(f'<text x="16" y="{TOP - 8}">TFLOP/s</text>')
    for i, (rows, kernels) in enumerate(found["steps"].items()):
        colour, whole = COLOURS[i % len(COLOURS)], sum(one["seconds"] for one in kernels.values())
        out.append(
            f'<text x="{LEFT + 180 * i}" y="{TOP + HEIGHT + 60}" fill="{colour}">{rows} row{"s" * (rows != "1")}, {1000 * whole:.2f} ms</text>'
        )
        for name, one in kernels.items():
            share = one["seconds"] / whole
            if share < 0.004 or not one["bytes"] or one["ops"] < 1:
                continue
            x, y = x_of(min(max(one["ops"] / one["bytes"], 0.01), 9999)), y_of(max(one["ops"] / one["seconds"], 1e9))
            out.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 + 22 * share**0.5:.1f}" fill="{colour}" fill-opacity="0.45"><title>{name}</title></circle>'
            )
            if share > 0.04:
                out.append(f'<text x="{x + 6:.1f}" y="{y - 6:.1f}" font-size="10">{name.split("::")[-1]} {100 * share:.0f} %</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--rows", default="1,16,2048")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, metavar="FILE.json", help="only the picture, again")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    if args.draw:
        args.draw.with_suffix(".svg").write_text(svg(json.loads(args.draw.read_text())))
        return
    found = roofs() | {"command": sys.argv, "steps": {}}
    found["title"] = f"{Path(args.model).stem} on one {found['card']}: kernels of a step"
    for rows in args.rows.split(","):
        found["steps"][rows] = kernels = count(args, rows)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_suffix(".svg").write_text(svg(found))
        whole = sum(one["seconds"] for one in kernels.values())
        print(f"{rows} rows: {1000 * whole:.3f} ms in {sum(one['launches'] for one in kernels.values()):.0f} kernels", flush=True)
        for name, one in sorted(kernels.items(), key=lambda item: -item[1]["seconds"])[:16]:
            roof = max(one["bytes"] / found["bytes_per_s"], one["ops"] / found["ops_per_s"]) / one["seconds"]
            print(
                f"  {1e6 * one['seconds']:9.1f} us {one['launches']:5.0f} x {one['bytes'] / one['seconds'] / 1e12:6.2f} TB/s {one['ops'] / one['seconds'] / 1e12:8.2f} TFLOP/s "
                f"{100 * roof:4.0f} % of its roof  {name}",
                flush=True,
            )


if __name__ == "__main__":
    main()
