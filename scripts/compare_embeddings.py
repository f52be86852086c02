"""Embeddings and rankings of `pyspec serve` and of llama-server for the same texts and model: NMSE, and whether all values are equal.

    compare_embeddings.py --llama-server PATH -m MODEL.gguf [--pooling mean] [--threads 1]

With --pooling rank the texts are ranked for the first one. Each text is sent alone: what shares a step may differ in the last bits on both sides. Exit code 1 if any value differs.
"""

import argparse
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import numpy as np

TEXTS = [
    "The quick brown fox jumps over the lazy dog.", "def quicksort(items):\n    return sorted(items)\n", "a cat sat on the mat",
    "A longer text about embeddings: what they are for, which models make them, and why two programs should agree about each of their values. " * 3,
]  # fmt: skip
PORT = 18911


def values(url: str, pooling: str | None) -> list[np.ndarray]:
    with httpx.Client(base_url=url, timeout=600) as client:
        if pooling == "rank":
            found = [
                client.post("/v1/rerank", json={"query": TEXTS[0], "documents": [text]}).json()["results"][0]["relevance_score"]
                for text in TEXTS
            ]
            return [np.array([score], np.float32) for score in found]
        return [np.array(client.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"], np.float32) for text in TEXTS]


def served(command: list[str], port: int, pooling: str | None) -> list[np.ndarray]:
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    return values(f"http://127.0.0.1:{port}", pooling)
            if process.poll() is not None:
                sys.exit(f"{command[0]} ended with status {process.returncode}")
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--pooling", choices=["mean", "cls", "last", "rank"])
    parser.add_argument("--threads", default="1")
    args = parser.parse_args()
    more = ["-m", args.model, "-t", args.threads, *(["--reranking"] if args.pooling == "rank" else ["--embeddings"])]
    more += ["--pooling", args.pooling] if args.pooling not in (None, "rank") else []
    ours = served([sys.executable, "-m", "pyggml_spec", "serve", "--device", "CPU", *more], PORT, args.pooling)
    theirs = served([args.llama_server, "-ub", "2048", "-b", "2048", "-c", "2048", "-ngl", "0", *more], PORT + 1, args.pooling)
    for text, a, b in zip(TEXTS, ours, theirs, strict=True):
        nmse = float(((a - b) ** 2).sum() / (b**2).sum())
        print(f"{a.size:5} values  NMSE {nmse:.3g}  {'equal' if (a == b).all() else 'DIFFER'}  {text[:40]!r}")
    sys.exit(not all((a == b).all() for a, b in zip(ours, theirs)))


if __name__ == "__main__":
    main()
