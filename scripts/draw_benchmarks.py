#!/usr/bin/env python3
"""Draws the charts of docs/benchmarks/ and prints a table: speed from files of bench_vs_llamacpp.py, speed-up on CPUs, or a step by class of kernel.

draw_benchmarks.py docs/benchmarks/h200-kernels-4B-Q4_K.json docs/benchmarks/h200-kernels-27B-Q4_K.json --out docs/benchmarks/speed.svg
draw_benchmarks.py --cpu docs/benchmarks/cpu-speedup.json --out docs/benchmarks/cpu.svg
draw_benchmarks.py --step docs/benchmarks/h200-step-27B-Q4_K.json --out docs/benchmarks/step.svg
"""

import argparse
import json
import statistics
from pathlib import Path

TESTS = {"tg128": "plain decoding", "spec": "DFlash, synthetic acceptance 6"}
BAR, GAP, LEFT, WIDTH = 16, 14, 250, 420
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2", "#65a30d", "#6b7280")


def medians(path: Path) -> list[tuple[str, float, float]]:
    """(label, llama.cpp, pyspec) in tokens per second for each test."""
    figures = json.loads(path.read_text())["figures"]
    shape = path.stem.removeprefix("h200-").removeprefix("kernels-").split("-")[0]
    return [
        (f"{shape}, {name}", *(statistics.median(figures[who][test]) for who in ("llama.cpp", "pyspec"))) for test, name in TESTS.items()
    ]


def svg(rows: list[tuple[str, float, float]]) -> str:
    scale = WIDTH / max(max(a, b) for _, a, b in rows)
    height = len(rows) * (2 * BAR + GAP) + 2 * GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 130}" height="{height}" font-family="sans-serif" font-size="13">'
    ]
    out.append('<rect width="100%" height="100%" fill="#ffffff"/><title>Tokens per second, pyspec against llama.cpp</title>')
    for i, (label, theirs, ours) in enumerate(rows):
        y = GAP + i * (2 * BAR + GAP)
        out.append(f'<text x="{LEFT - 8}" y="{y + BAR + 4}" text-anchor="end">{label}</text>')
        for j, (value, colour, who) in enumerate(((theirs, "#9aa5b1", "llama.cpp"), (ours, "#2563eb", f"pyspec, {ours / theirs:.2f}x"))):
            top = y + j * BAR
            out.append(f'<rect x="{LEFT}" y="{top}" width="{value * scale:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            out.append(f'<text x="{LEFT + value * scale + 6:.1f}" y="{top + BAR - 4}" font-size="11">{value:.0f}  {who}</text>')
    return "\n".join([*out, "</svg>", ""])


def cpu_svg(data: dict) -> str:
    """One bar per machine, from the lowest to the highest mean of the 20 prompts; the line is plain decoding."""
    left, scale = LEFT, WIDTH / max(row["high"] for row in data["rows"])
    height = len(data["rows"]) * (BAR + GAP) + 3 * GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 190}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><title>{data["title"]}</title>',
    ]
    for i, row in enumerate(data["rows"]):
        y = GAP + i * (BAR + GAP)
        mean = f"{row['low']:.2f}" if row["low"] == row["high"] else f"{row['low']:.2f} to {row['high']:.2f}"
        out.append(f'<text x="{left - 8}" y="{y + BAR - 3}" text-anchor="end">{row["machine"]}</text>')
        for value, colour in ((row["high"], "#93c5fd"), (row["low"], "#2563eb")):
            out.append(f'<rect x="{left}" y="{y}" width="{value * scale:.1f}" height="{BAR}" fill="{colour}"/>')
        out.append(
            f'<text x="{left + row["high"] * scale + 6:.1f}" y="{y + BAR - 3}" font-size="11">{mean}, lowest prompt {row["worst"]:.2f}</text>'
        )
    x = left + scale
    out.append(f'<line x1="{x:.1f}" y1="{GAP / 2}" x2="{x:.1f}" y2="{height - 2 * GAP}" stroke="#111827" stroke-dasharray="4 3"/>')
    out.append(f'<text x="{x:.1f}" y="{height - GAP / 2}" text-anchor="middle" font-size="11">plain decoding</text>')
    return "\n".join([*out, "</svg>", ""])


def step_svg(step: dict) -> str:
    """One bar per side, cut by class of kernel; ``step["bars"]``: side -> class -> milliseconds."""
    bars, left = step["bars"], 150
    classes = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    scale = (LEFT + WIDTH - left) / max(sum(parts.values()) for parts in bars.values())
    top = 2 * GAP + BAR
    legend = top + len(bars) * (2 * BAR + GAP)
    height = legend + (len(classes) + 1) // 2 * (BAR + 4) + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 130}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="{GAP}" y="{GAP + BAR - 4}">{step["title"]}</text>',
    ]
    for i, (side, parts) in enumerate(bars.items()):
        x, y = float(left), top + i * (2 * BAR + GAP)
        out.append(f'<text x="{left - 8}" y="{y + BAR + 4}" text-anchor="end">{side}</text>')
        for name, ms in parts.items():
            colour = COLOURS[classes.index(name) % len(COLOURS)]
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{ms * scale:.1f}" height="{2 * BAR}" fill="{colour}"/>')
            x += ms * scale
        out.append(f'<text x="{x + 6:.1f}" y="{y + BAR + 4}">{sum(parts.values()):.1f} ms</text>')
    for i, name in enumerate(classes):
        x, y = GAP + i % 2 * 380, legend + i // 2 * (BAR + 4)
        out.append(f'<rect x="{x}" y="{y}" width="{BAR - 4}" height="{BAR - 4}" fill="{COLOURS[i % len(COLOURS)]}"/>')
        values = ", ".join(f"{parts.get(name, 0):.2f}" for parts in bars.values())
        out.append(f'<text x="{x + BAR + 4}" y="{y + BAR - 5}" font-size="12">{name}: {values}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--cpu", type=Path, help="speed-up by machine")
    parser.add_argument("--step", type=Path, help="milliseconds by class of kernel")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.cpu:
        args.out.write_text(cpu_svg(json.loads(args.cpu.read_text())))
        return
    if args.step:
        args.out.write_text(step_svg(json.loads(args.step.read_text())))
        return
    rows = [row for path in args.files for row in medians(path)]
    args.out.write_text(svg(rows))
    print("| tokens per second | llama.cpp | pyspec | ratio |\n|---|---|---|---|")
    for label, theirs, ours in rows:
        print(f"| {label} | {theirs:.0f} | {ours:.0f} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
