#!/usr/bin/env python3
"""Draws docs/benchmarks/speed.svg and prints the README's table from the JSON files that bench_vs_llamacpp.py wrote.

draw_benchmarks.py docs/benchmarks/h200-4B-Q4_K.json docs/benchmarks/h200-27B-Q4_K.json --out docs/benchmarks/speed.svg
"""

import argparse
import json
import statistics
from pathlib import Path

TESTS = {"tg128": "plain decoding", "spec": "DFlash, synthetic acceptance 6"}
BAR, GAP, LEFT, WIDTH = 16, 14, 250, 420


def medians(path: Path) -> list[tuple[str, float, float]]:
    """(label, llama.cpp, pyspec) in tokens per second for each test."""
    figures = json.loads(path.read_text())["figures"]
    shape = path.stem.split("-")[1]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [row for path in args.files for row in medians(path)]
    args.out.write_text(svg(rows))
    print("| tokens per second | llama.cpp | pyspec | ratio |\n|---|---|---|---|")
    for label, theirs, ours in rows:
        print(f"| {label} | {theirs:.0f} | {ours:.0f} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
