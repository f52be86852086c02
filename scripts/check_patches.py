#!/usr/bin/env python3
"""What the patches change in llama-server: greedy text stays, and each property is violated before and holds after.

    check_patches.py --before DIR/bin --after DIR/bin [--out DIR]
    check_patches.py --counters 0001=DIR/bin 0003=DIR/bin ...

Runs on the CPU with the embedded pair and random models, one thread. --before: an unpatched tree, or one with the first patches. Exit code 1 if a
text differs, a property is violated after, or holds before. --counters prints the contexts' counters per tree instead.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from llama_server import LlamaServer, ServerEnded
from random_gguf.archs import write_gemma4
from random_gguf.model import Shape, write_dflash

from pyggml_spec.loading import DEMO

PROMPTS = [json.loads(line)["prompt"] for line in (DEMO / "prompts.jsonl").read_text().splitlines()][:8]
TOKENS = 72
DRAFT = ("--spec-type", "draft-dflash", "--spec-draft-n-max", 15)
Tools = Path


class Run:
    """llama-server on a pair, with what it answered to prompts sent ``slots`` at a time."""

    def __init__(self, tools: Tools, work: Path, *options: object, slots: int = 1, drafter: bool = True, env: dict[str, str] | None = None):
        self.slots = slots
        options = ("-m", DEMO / "target.gguf", *(("-md", DEMO / "drafter.gguf", *DRAFT) if drafter else ()), *options)
        options = ("--metrics", "-np", slots, "-c", 1024 * slots, "-t", 1, "-td", 1, *options)
        self.server = LlamaServer(tools, work / "server.log", *options, env=env)

    def __enter__(self) -> Self:
        self.server.wait()
        return self

    def __exit__(self, *_) -> None:
        self.server.close()

    def texts(self, prompts: list[str] = PROMPTS, **body: object) -> list[tuple]:
        """(tokens, drafted, accepted) of each prompt. The prompts of one request start in the same step: the run is repeatable."""
        found = []
        for i in range(0, len(prompts), self.slots):
            asked = prompts[i] if self.slots == 1 else prompts[i : i + self.slots]
            got = self.server.post("/completion", **{"prompt": asked, "n_predict": TOKENS, "temperature": 0, "return_tokens": True, **body})
            for one in got if isinstance(got, list) else [got]:
                found.append((one["tokens"], one["timings"].get("draft_n"), one["timings"].get("draft_n_accepted")))
        return found

    def counters(self) -> dict[str, float]:
        return self.server.counters()

    def metric(self, name: str) -> float:
        return float(re.search(rf"^llamacpp:{name} (\S+)$", self.server.get("/metrics"), re.MULTILINE)[1])


def moved(before: dict[str, float], after: dict[str, float], name: str) -> int | None:
    """How far a counter went; None: a server without counters."""
    return int(after[name] - before.get(name, 0)) if name in after else None


def greedy_texts(tools: Tools, work: Path) -> dict[str, list[tuple]]:
    """The texts that must not change, by mode and number of slots."""
    found = {}
    for mode in ("plain", "draft-dflash"):
        for slots in (1, 4):
            with Run(tools, work, slots=slots, drafter=mode != "plain") as run:
                found[f"{mode}, -np {slots}"] = run.texts()
    with Run(tools, work, "--spec-draft-p-min", 0.3, slots=2, env={"LLAMA_SPEC_FIXED_WIDTH": "1"}) as run:
        found["draft-dflash, unequal drafts, -np 2"] = run.texts()  # at 3 and more the unpatched server moves states wrongly (0002)
    return found


def draft_graphs(tools: Tools, work: Path) -> tuple[bool, str]:
    with Run(tools, work) as run:
        run.texts()
        built, reused = (moved({}, run.counters(), f"draft.graphs_{kind}_total") for kind in ("built", "reused"))
    return built is not None and reused > built, f"draft context: {built} graphs built, {reused} reused"


def greedy_rows(tools: Tools, work: Path) -> tuple[bool, str]:
    with Run(tools, work, drafter=False) as run:
        run.texts(PROMPTS[:1])  # the counters of /metrics appear with the first step
        before = run.counters()
        tokens = sum(len(text) for text, *_ in run.texts())
        read = moved(before, run.counters(), "target.tensor_bytes_read_total")
    return read == 4 * tokens, f"{tokens} tokens, {read} bytes read"


def fixed_width(tools: Tools, work: Path) -> tuple[bool, str]:
    with Run(tools, work, "--spec-draft-p-min", 0.3, slots=4, env={"LLAMA_SPEC_FIXED_WIDTH": "1"}) as run:
        # prompts of one length: others are cut into an ubatch each
        prompts = [run.server.post("/tokenize", content=text)["tokens"][:48] for text in PROMPTS]
        run.texts(prompts[:1] * 4)
        before, steps = run.counters(), run.metric("n_decode_total")
        run.texts(prompts)
        steps = run.metric("n_decode_total") - steps
        built, reused = (moved(before, run.counters(), f"target.graphs_{kind}_total") for kind in ("built", "reused"))
    # towards the end of a group slots 0 and 2 may be busy without 1: streams of K/V apart from each other take two ubatches
    return (
        built is not None and built + reused <= 1.3 * steps,
        f"{steps:.0f} decodes, {built} ubatches with a new graph, {reused} with the old one",
    )


def device_features(tools: Tools, work: Path) -> tuple[bool, str]:
    with Run(tools, work) as run:
        tokens = sum(len(text) for text, *_ in run.texts())
        written = moved({}, run.counters(), "draft.tensor_bytes_written_total")
    return written is not None and written < 1000 * tokens, f"{tokens} tokens, {written} bytes written into the draft context"


def gemma4_scale(tools: Tools, work: Path) -> tuple[bool, str]:
    shape = Shape(n_layer=4, n_embd=256, target_layers=(1, 3))
    target = write_gemma4(work / "gemma4.gguf", shape)
    drafts = {}
    for name, scale in (("given", shape.n_embd**0.5), ("derived", 0.0)):
        drafter = write_dflash(work / f"{name}.gguf", replace(shape, embedding_scale=scale))
        options = ("-m", target, "-md", drafter, *DRAFT, "--spec-draft-p-min", 1e-9, "-lv", 5)
        with Run(tools, work, *options, drafter=False) as run:
            run.texts(PROMPTS[:1], n_predict=17, ignore_eos=True)
        drafts[name] = re.findall(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+)", (work / "server.log").read_text(errors="replace"))[:15]
    same = sum(a == b for a, b in zip(drafts["given"], drafts["derived"], strict=True))
    return same == len(drafts["given"]) > 0, f"{same} of {len(drafts['given'])} drafts as with the key in the file"


def slot_drafter(tools: Tools, work: Path) -> tuple[bool, str]:
    first, second = PROMPTS[0], PROMPTS[1]
    with Run(tools, work, "--slot-save-path", work) as run:

        def slot(action: str) -> None:
            run.server.post(f"/slots/0?action={action}", filename="first.bin")

        text = run.server.post("/completion", prompt=first, n_predict=TOKENS, temperature=0)["content"]
        slot("save")
        longer = first + text + "\n"
        expected = run.texts([longer])
        run.texts([second])
        slot("restore")
        try:
            restored = run.texts([longer])
        except OSError as error:
            return False, f"the request after a restore fails: {error}"
        accepted = [one[0][2] for one in (expected, restored)]
        if expected != restored:
            return False, f"accepted drafts {accepted[0]} had the slot stayed, {accepted[1]} after a restore"
        file = work / "first.bin.draft"
        alone = []
        for keep in (file.stat().st_size // 2, 0):
            file.write_bytes(file.read_bytes()[:keep])
            run.texts([second])
            slot("restore")
            alone += run.texts([longer])
    same = all(text == expected[0][0] for text, *_ in alone)
    return (
        same,
        f"accepted drafts {accepted[0]} and {accepted[1]}; {alone[0][2]} and {alone[1][2]} with half of the drafter's file and an empty one",
    )


def conv_snapshots(tools: Tools, work: Path) -> tuple[bool, str]:
    """The graph of a hybrid must not grow with the rows that can be rolled back: a copy (three nodes) per row and recurrent layer before."""
    nodes = {}
    for drafts in (3, 15):
        with Run(tools, work, "--spec-draft-n-max", drafts, "-lv", 4):
            pass
        # the target's context is the first to say it; one figure stands for both where they are equal
        prompt, token = re.search(r"graph.*: nodes = (\d+)(?: / (\d+))?,", (work / "server.log").read_text(errors="replace")).groups()
        nodes[drafts] = prompt, token or prompt
    few, many = (f"{' and '.join(found)} with {drafts} drafts" for drafts, found in nodes.items())
    return nodes[3] == nodes[15], f"nodes of the target's graphs for a prompt and for one token: {few}, {many}"


def replay(tools: Tools, work: Path) -> tuple[bool, str]:
    """A slot that can be rolled back keeps as many recurrent states as one that cannot: one."""
    states, memory = {}, {}
    for drafter in (False, True):
        with Run(tools, work, "-lv", 4, drafter=drafter):
            pass
        # the target's context is the first to say it
        log = (work / "server.log").read_text(errors="replace")
        states[drafter] = re.search(r"rs_seq\).* S \(f32\): +([\d.]+) MiB", log)[1]
        memory[drafter] = re.search(r"RS buffer size = +([\d.]+) MiB", log)[1]
    found = f"MiB of recurrent memory {memory[True]}, of states {states[True]}; without a drafter {memory[False]}, {states[False]}"
    return states[True] == states[False], found


CHECKS: dict[str, Callable[[Tools, Path], tuple[bool, str]]] = {
    "0003 draft graphs": draft_graphs,
    "0004 greedy rows": greedy_rows,
    "0005 fixed width": fixed_width,
    "0006 device features": device_features,
    "0008 gemma4 scale": gemma4_scale,
    "0009 slot drafter": slot_drafter,
    "0010 conv snapshots": conv_snapshots,
    "0007 replay": replay,
}


COLUMNS = {
    "ubatches": ("target.graphs_built_total", "target.graphs_reused_total"),
    "built": ("target.graphs_built_total",),
    "plans": ("target.memory_plans_total",),
    "waits": ("target.scheduler_syncs_total",),
    "bytes read": ("target.tensor_bytes_read_total",),
    "decodes": ("draft.graphs_built_total", "draft.graphs_reused_total"),
    "built ": ("draft.graphs_built_total",),
    "plans ": ("draft.memory_plans_total",),
    "waits ": ("draft.scheduler_syncs_total",),
    "bytes written": ("draft.tensor_bytes_written_total",),
}


def counter_tables(trees: dict[str, Tools], work: Path) -> None:
    for slots, p_min in ((1, 0), (1, 0.3), (4, 0), (4, 0.3)):
        print(f"\n`-np {slots} --spec-draft-p-min {p_min}`, target then draft context:\n\n| with | " + " | ".join(COLUMNS) + " |")
        print("|---" * (len(COLUMNS) + 1) + "|")
        for name, tools in trees.items():
            with Run(tools, work, "--spec-draft-p-min", p_min, slots=slots, env={"LLAMA_SPEC_FIXED_WIDTH": "1"}) as run:
                run.texts()
                found = run.counters()
            print(f"| {name} | " + " | ".join(f"{sum(found[part] for part in parts):.0f}" for parts in COLUMNS.values()) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path)
    parser.add_argument("--counters", nargs="+", metavar="NAME=DIR/bin", help="trees with patch 0001 at least")
    parser.add_argument("--out", type=Path, help="keeps the server's logs and the random models")
    parser.add_argument("--only", default="", help="checks whose name contains this, and no texts")
    args = parser.parse_args()
    if not args.counters and not (args.before and args.after):
        parser.error("--before and --after, or --counters")

    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        work = args.out or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        if args.counters:
            return counter_tables({name: Path(tools) for name, tools in (one.split("=", 1) for one in args.counters)}, work)
        if not args.only:
            before, after = greedy_texts(args.before, work), greedy_texts(args.after, work)
            for mode, texts in before.items():
                same = [text for text, *_ in texts] == [text for text, *_ in after[mode]]
                failed += not same
                print(f"{'same' if same else 'DIFFERENT':<10} {mode}: {sum(len(text) for text, *_ in texts)} tokens, "
                      f"{sum(n or 0 for *_, n in texts)} and {sum(n or 0 for *_, n in after[mode])} drafts accepted", flush=True)  # fmt: skip
        for name, check in CHECKS.items():
            if args.only in name:
                (was, old), (now, new) = check(args.before, work), check(args.after, work)
                failed += was or not now
                verdict = "FAILS" if not now else "proves nothing" if was else "fails before, passes after"
                print(f"{verdict}: {name}\n    before: {old}\n    after:  {new}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    try:
        main()
    except ServerEnded as why:
        sys.exit(str(why))
