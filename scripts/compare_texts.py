#!/usr/bin/env python3
"""Greedy text of real prompts by pyspec and by llama.cpp through llama-cpp-python: token by token, plain decoding with ggml's kernels.

    compare_texts.py -m model.gguf [-m other.gguf ...] --prompts questions.jsonl [--count 64] [-n 48] [-t 2]

Each line of the file is {"category": ..., "turns": [question, ...]}; the first turn goes through the chat template.
Prompts are taken evenly from the file. Exit code 3 if a text differs.
"""

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path

import llama_cpp

import pyggml_spec as ps
from pyggml_spec.chat import chat_template


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", required=True, action="append")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("-n", type=int, default=48)
    parser.add_argument("-t", type=int, default=2)
    args = parser.parse_args()
    questions = [json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()]
    questions = questions[:: max(1, len(questions) // args.count)][: args.count]
    different = 0
    for path in args.m:
        with (
            ps.load(path, device="CPU", kernels="ggml", threads=args.t, n_ctx=2048, prefix_memory=0, spec=["none"]) as session,
            closing(
                llama_cpp.Llama(path, n_ctx=2048, n_ubatch=512, n_threads=args.t, n_threads_batch=args.t, flash_attn=True, verbose=False)
            ) as llama,
        ):
            template = chat_template(session)[0]
            equal = tokens = 0
            for question in questions:
                ids = template.encode(session.tokenizer, [{"role": "user", "content": question["turns"][0]}])[:1900]
                ours = [t for event in session.steps(ids, args.n) for t in event.tokens]
                llama.reset()
                llama._ctx.kv_cache_clear()
                theirs = []
                for token in llama.generate(ids, temp=0.0):
                    theirs.append(token)
                    if len(theirs) == len(ours):
                        break
                tokens += len(ours)
                if ours == theirs:
                    equal += 1
                else:
                    different += 1
                    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
                    print(f"{question['category']}: token {at} of {len(ours)} is {ours[at]} here and {theirs[at]} in llama.cpp", flush=True)
            print(f"{Path(path).name}: {equal} of {len(questions)} texts equal, {tokens} tokens", flush=True)
    sys.exit(3 if different else 0)


if __name__ == "__main__":
    main()
