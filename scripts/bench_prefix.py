#!/usr/bin/env python3
"""How much sooner a prompt starts whose beginning an earlier prompt had: time to the first token, with everything that it takes.

    bench_prefix.py -m models/27B-Q4_K-target.gguf -md models/27B-Q4_K-drafter.gguf --device CUDA0

Per round a new random beginning of --shared tokens, then prompts of that beginning and --suffix other tokens: computed from nothing;
again with the rows still in place; after another prompt has overwritten them (from copies on the device); and from files, as a new process
would. Every prompt is also computed from nothing, and text, drafts and acceptance have to be equal.
"""

import argparse
import shutil
import statistics
import sys
import tempfile

import numpy as np

import pyggml_spec as ps

WAYS = ("from nothing", "in place", "from memory", "from files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--device")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    parser.add_argument("--shared", type=int, default=4096)
    parser.add_argument("--suffix", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate behind each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-width", type=int, default=16, help="pinned: width control would choose by the clock")
    parser.add_argument("--folder", help="where the files go; default: a temporary folder")
    args = parser.parse_args()
    width = args.draft_width if args.model is None or args.model_draft else None
    n_ctx = args.shared + args.suffix + args.tokens + 64
    folder = tempfile.mkdtemp(dir=args.folder, prefix="prefix-")
    try:
        with ps.load(
            args.model, args.model_draft, device=args.device, threads=args.threads, n_ctx=n_ctx, draft_width=width, chunk=args.ubatch_size,
            prefix_memory=4 << 30, prefix_cache=folder, prefix_disk=1 << 40,
        ) as session:  # fmt: skip
            sys.exit(run(session, args))
    finally:
        shutil.rmtree(folder)


def run(session: ps.Session, args) -> int:
    rng, right, times = np.random.default_rng(0), True, {way: [] for way in WAYS}
    print(
        f"{session.target.file.path.name} on {session.backend.device.description}, {args.shared} + {args.suffix} tokens, passes of {args.ubatch_size}"
    )
    for number in range(args.rounds + 1):  # the first one builds graphs and is not counted
        shared, other = (rng.integers(0, session.target.n_vocab, args.shared).tolist() for _ in range(2))
        answers = []
        for way in WAYS:
            prompt = shared + rng.integers(0, session.target.n_vocab, args.suffix).tolist()
            if way == "from memory":
                ask(session, other, 1)
            elif way == "from files":
                session.prefix.clear()
            answers.append((way, prompt, *ask(session, prompt, args.tokens)))
        files, session.prefix.files = session.prefix.files, None
        for way, prompt, stats, text in answers:
            if number:
                times[way].append(stats.seconds["prefill"])
                right = report(session, way, prompt, args.tokens, stats, text) and right
        session.prefix.clear()
        session.prefix.files = files
    base = statistics.median(times["from nothing"])
    print("\n| prompt | first token after, ms | sooner |\n|---|---|---|")
    for way, all_times in times.items():
        print(f"| {way} | {1000 * statistics.median(all_times):.1f} | {base / statistics.median(all_times):.1f} x |")
    return 0 if right else 1


def ask(session: ps.Session, prompt: list[int], count: int):
    events = list(session.steps(prompt, count, ignore_end=True))
    return events[-1].stats, [token for event in events for token in event.tokens]


def report(session: ps.Session, way: str, prompt: list[int], count: int, stats, text: list[int]) -> bool:
    """Computes the prompt from nothing and compares."""
    session.prefix.clear()
    fresh, want = ask(session, prompt, count)
    same = text == want and all(getattr(stats, name) == getattr(fresh, name) for name in ("drafted", "matched", "matched_at", "steps"))
    print(
        f"{way:>13}: {1000 * stats.seconds['prefill']:8.1f} ms, {stats.reused_tokens} of {stats.prompt_tokens} tokens reused {stats.reused_from}, "
        f"drafted {stats.drafted}, accepted {stats.matched}; {'the same as' if same else 'DIFFERENT FROM'} from nothing"
        + "".join(f"; {note}" for note in stats.notes)
    )
    return same


if __name__ == "__main__":
    main()
