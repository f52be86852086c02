#!/usr/bin/env python3
"""Every kernel of a decode step on a CUDA device, counted and timed by CUPTI through PyTorch's profiler (needs PyTorch with CUDA).

profile_kernels.py -m target.gguf -md drafter.gguf [--device CUDA0] [--widths 1,2,16] [--steps 8] [--top 25]
"""

import argparse
from collections import defaultdict

import pyggml_spec as ps  # before torch: its C++ runtime has to be the first one mapped

import torch  # isort: skip
from torch.profiler import ProfilerActivity, profile  # isort: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--widths", default="1,16")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--top", type=int, default=25)
    args = parser.parse_args()
    torch.cuda.init()
    with ps.load(args.model, args.model_draft, device=args.device, n_ctx=1024, draft_width=16 if args.model_draft else None) as session:
        for width in map(int, args.widths.split(",")):
            _report(session, width, args.steps, args.top)


def _report(session, width: int, steps: int, top: int) -> None:
    engine = session.runner
    engine.reset(drafting=width > 1)
    engine.prefill(list(range(1, 33)))

    def step():
        result = engine.plain_step() if width == 1 else engine.fused_step(width)
        engine.accept(1, int(result.ids[0]))

    for _ in range(4):
        step()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    count, micros = defaultdict(int), defaultdict(float)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.replace("void ", "").split("(")[0][:90]
            count[name] += 1
            micros[name] += event.device_time_total if hasattr(event, "device_time_total") else event.cuda_time_total
    layers = session.target.n_layer
    kernels, total = sum(count.values()) / steps, sum(micros.values()) / steps
    print(
        f"width {width}: {kernels:.0f} kernels and copies per step, {kernels / layers:.1f} per target layer, {total / 1000:.2f} ms on the device"
    )
    for name in sorted(micros, key=micros.get, reverse=True)[:top]:
        print(f"  {count[name] / steps:7.1f} x {micros[name] / count[name]:8.2f} us = {micros[name] / steps:8.1f} us  {name}")


if __name__ == "__main__":
    main()
