#!/usr/bin/env python3
"""Three recorded texts, a file copied with small edits, a JSON list continued, and prose: plainly, with each way of drafting alone, and with both.

    bench_workloads.py                                                        # the embedded pair: its DFlash drafter, suffix drafts, both
    bench_workloads.py --device CUDA0 -m target.gguf [-md drafter.gguf]

The text is the recorded one, in tokens of the target's own vocabulary, whatever the target would choose, so that every way of decoding is given the same work: all steps are
computed as ever, and drafts are right where the recorded text goes on with them. Ways run by turns, PIECE tokens of the text each: what else the machine
does, it does to all of them. What is printed of each:

* tokens per second, each piece by its median round, and of a round what its milliseconds were: what the host does between steps of the engine (choices,
  drafts that are looked up, statistics), what steps took longer than others of their kind and way because a graph of theirs was new to the device, what
  building graphs took, within steps and between them, and what drafters took to catch up and commits between blocks of different rows;
* over all rounds the time that its steps are worth at what each kind of step takes in its faster runs, of whichever way: that depends on choices
  alone, not on how busy the machine was; and at what they take in its own: a drafter beside them makes steps dearer, too;
* the kinds of steps, graphs launched per step (one, and those between blocks of different widths, and those that catch up), distinct graphs.

Last, the best of plain, drafter and suffix over both: 1 or more is no loss.
"""

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pyggml_spec as ps
from pyggml_spec.engine import scheduler, sequence, state
from pyggml_spec.engine.batch import Draft, Prefill
from pyggml_spec.engine.sequence import GenerationOptions
from pyggml_spec.engine.stats import Stats
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.speculation import calibrate, verify
from pyggml_spec.text.tokenizer import Tokenizer

clock = SimpleNamespace(perf_counter=time.perf_counter, perf_counter_ns=time.perf_counter_ns)
TEXTS = Path(__file__).parent.parent / "tests" / "speculation" / "workloads"
NAMES = "copy", "json", "prose"
WAYS = "plain", "suffix", "drafter", "both"
PIECE = 100  # tokens


class Recorded:
    """What comes out, whatever the target would choose."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.done = tokens, 0

    def first(self, choices, prompt, limits, sampler) -> int:
        return self._next(limits)

    def block(self, choices, drafts, limits, sampler=None, imposed=False) -> list[int]:
        out: list[int] = []
        for draft in [*drafts, None]:
            out.append(self._next(limits))
            if limits.reason or out[-1] != draft:
                break
        return out

    def _next(self, limits) -> int:
        token = self.tokens[self.done]
        self.done += 1
        limits.take([token])
        return token


class Watched:
    """Keeps what every decoding step of an engine took, by kind: of all rounds in ``took``, and in ``first`` where a graph was new to the device."""

    def __init__(self, engine):
        self.engine, self.forward, self.took, self.first = engine, engine.forward, defaultdict(list), defaultdict(list)
        self.get, self.commit = engine.graphs.get, engine.state._commit
        self.begin()
        engine.forward, engine.graphs.get, engine.state._commit = self, self._built, self._committed

    def begin(self) -> None:
        """A round."""
        self.taken, self.spent, self.launches, self.new = Counter(), 0.0, 0, []
        self.built, self.building = Counter(), 0.0
        self.commits, self.committing, self.caught_up = 0, 0.0, self.engine.state.catch_up_us

    def _committed(self, *asked) -> None:
        began = clock.perf_counter()
        self.commit(*asked)
        self.commits += 1
        self.committing += 1000 * (clock.perf_counter() - began)

    @property
    def catching_up(self) -> float:
        """Milliseconds of this round."""
        return 1e-3 * (self.engine.state.catch_up_us - self.caught_up)

    def _built(self, key):
        before, began = self.engine.graphs.changes, clock.perf_counter()
        out = self.get(key)
        if self.engine.graphs.changes > before:
            self.built[self.engine.graphs.role(key), key.verify_len] += 1
            self.building += 1000 * (clock.perf_counter() - began)
        return out

    def _first_calls(self) -> int:
        """Of graphs that the device does not replay yet."""
        replay = self.engine.io.replay
        return replay.warmup + replay.captured + replay.eager if replay is not None else self.engine.graphs.changes

    def __call__(self, batch, meanwhile=None):
        launches, first_calls, began = self.engine.io.uploads, self._first_calls(), clock.perf_counter()
        out = self.forward(batch, meanwhile)
        milliseconds, item = 1000 * (clock.perf_counter() - began), batch.items[0]
        if not isinstance(item, Prefill):
            kind = (item.drafter or "first", item.verify_len, item.padded_len) if isinstance(item, Draft) else ("", item.rows, 0)
            self.taken[kind] += 1
            self.spent += milliseconds
            self.launches += self.engine.io.uploads - launches
            if self._first_calls() == first_calls:
                self.took[kind].append(milliseconds)
            else:
                self.new.append((kind, milliseconds))
                self.first[kind].append(milliseconds)
        return out


def count_processor_time() -> None:
    """From now on times are those that the thread has had its core for; to the controls, too."""
    clock.perf_counter, clock.perf_counter_ns = time.thread_time, time.thread_time_ns
    for module in (calibrate, scheduler, sequence, state):
        module.time = clock


class Running:
    """A way through the text, of one round, as far as it has come.

    Attributes:
        seconds: of each piece of the text.
    """

    def __init__(self, session, watched: Watched, prompt: list[int], answer: list[int], mode: str):
        self.text, self.stats, self.watched, self.seconds = Recorded(answer), Stats(), watched, list[float]()
        watched.begin()
        session.runner.reset()
        self._chooses()
        self._blocks = iter(session.engine.submit(prompt, GenerationOptions(len(answer), mode, ignore_end=True), self.stats, slot=0))
        next(self._blocks)

    def _chooses(self) -> None:
        verify.choose_tokens, verify.first_token = self.text.block, self.text.first

    def go_on(self) -> bool:
        """One piece more; False where there is none."""
        if self.text.done == len(self.text.tokens):
            return False
        self._chooses()
        end, began = min(PIECE * (1 + len(self.seconds)), len(self.text.tokens)), clock.perf_counter()
        while self.text.done < end:
            next(self._blocks)
        if end == len(self.text.tokens):
            next(self._blocks, None)
        self.seconds.append(clock.perf_counter() - began)
        return True


def typical(rounds: Sequence[Sequence[float]]) -> float:
    """Seconds of the text, each piece by its median round."""
    return sum(statistics.median(piece) for piece in zip(*rounds))


def quarter(took: list[float]) -> float:
    return sorted(took)[len(took) // 4]


def step_costs(watched: Iterable[Watched]) -> dict[tuple, float]:
    """Milliseconds of each kind of step in its faster runs, of whichever way; of kinds that only ran in new graphs, in those."""
    took, first = defaultdict(list), defaultdict(list)
    for one in watched:
        for out, of in ((took, one.took), (first, one.first)):
            for kind, milliseconds in of.items():
                out[kind] += milliseconds
    return {kind: quarter(milliseconds) for kind, milliseconds in (first | took).items()}


class Round(NamedTuple):
    """Seconds of decoding, steps, and what was watched."""

    took: float
    steps: int
    spent: float
    launches: int
    new: list[tuple[tuple, float]]
    built: Counter
    building: float
    catching_up: float
    commits: int
    committing: float

    def in_words(self, costs: dict[tuple, float]) -> str:
        """What its milliseconds were."""
        more = sum(ms - costs.get(kind, ms) for kind, ms in self.new)
        between = 1e6 * (self.took - 1e-3 * self.spent) / self.steps
        built = f", {self.building:.1f} for building {self.built.total()} graphs" if self.built else ""
        late = f", {self.catching_up:.1f} for catching up" if self.catching_up else ""
        return (
            f"{1000 * self.took:.1f} ms, {more:.1f} of them for {len(self.new)} calls of new graphs{built}{late}, {self.committing:.1f} for {self.commits} commits, {between:.0f} us between steps, "
            f"{self.launches / self.steps:.2f} launches a step"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-m", "--model", default=str(DEMO_TARGET))
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="of the one thread, on a CPU that other work has, too")
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("-n", "--tokens", type=int, default=2000)
    parser.add_argument("--texts", type=Path, default=TEXTS, help="folder of the recorded texts")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    if args.processor_time:
        if args.device != "CPU" or args.threads != 1:
            parser.error("--processor-time is that of one thread: it needs `--device CPU` and `-t 1`")
        count_processor_time()
    draft = args.model_draft or (str(DEMO_DRAFTER) if args.model == str(DEMO_TARGET) else None)
    texts = {}
    with GGUFFile(Path(args.model)) as file:
        tokenizer = Tokenizer(file)
        for name in args.only:
            parts = (args.texts / f"{name}.txt").read_text().split("\n=====\n")
            prompt, answer = (tokenizer.encode(part) for part in parts)
            texts[name] = list(prompt), list(answer)[: args.tokens]
        tokenizer.close()
    n_ctx = max(len(prompt) + len(answer) for prompt, answer in texts.values()) + 64
    specs = {"plain": ["suffix"], "suffix": ["suffix"]}
    if draft:
        specs |= {"drafter": ["draft-dflash"], "both": ["draft-dflash", "suffix"]}
    specs = {way: spec for way, spec in specs.items() if way in args.ways}
    for name, (prompt, answer) in texts.items():
        with ExitStack() as stack:  # another session for each text: what one taught is not what the next one begins with
            ways = {}
            for way, spec in specs.items():
                files = (args.model, draft if "draft-dflash" in spec else None)
                session = stack.enter_context(ps.load(*files, spec=spec, device=args.device, threads=args.threads, n_ctx=n_ctx))
                ways[way] = session, Watched(session.runner)
            seconds, steps, drafted, rounds = defaultdict(list), defaultdict(Counter), {}, defaultdict(list)
            for _ in range(args.rounds):
                running = {}
                for way, (session, watched) in ways.items():
                    if session.lookup is not None:  # every round is the first one: nothing that has ended is there to be copied
                        session.engine.ngram = session.lookup.for_slots()
                    session.engine.policy = session.new_policy()
                    running[way] = Running(session, watched, prompt, answer, "plain" if way == "plain" else "speculative")
                while any(list(map(Running.go_on, running.values()))):
                    pass
                for way, one in running.items():
                    w, kinds, took = one.watched, one.watched.taken, sum(one.seconds)
                    seconds[way].append(one.seconds)
                    steps[way] += kinds
                    rounds[way].append(
                        Round(took, kinds.total(), w.spent, w.launches, w.new, w.built, w.building, w.catching_up, w.commits, w.committing)
                    )
                    drafted[way] = {who: tuple(counts) for who, counts in one.stats.drafters.items()}
            costs = step_costs(watched for _, watched in ways.values())
            own = {way: costs | {kind: quarter(took) for kind, took in watched.took.items()} for way, (_, watched) in ways.items()}
            worth = {way: sum(count * costs[kind] for kind, count in kinds.items()) / args.rounds for way, kinds in steps.items()}
            print(f"{name}: {len(prompt)} tokens of prompt, {len(answer)} of text")
            for way in ways:
                kinds = ", ".join(f"{who or 'given'} {rows}{f' in {more}' if more else ''}: {n // args.rounds}" for (who, rows, more), n in sorted(steps[way].items()))  # fmt: skip
                print(
                    f"  {way}: {len(answer) / typical(seconds[way]):.1f} tok/s, worth {worth[way]:.1f} ms, at its own steps "
                    f"{sum(count * own[way][kind] for kind, count in steps[way].items()) / args.rounds:.1f}; steps {kinds}; {drafted[way]}"
                )
                print(f"    rounds: {'; '.join(each.in_words(own[way]) for each in rounds[way])}")
            alone = [way for way in ways if way != "both"]
            if "both" in ways and alone:
                by_clock = min(typical(seconds[way]) for way in alone) / typical(seconds["both"])
                print(
                    f"  both over the best alone: by the clock {by_clock:.3f}, by what its steps are worth {min(worth[way] for way in alone) / worth['both']:.3f}"
                )
            if {"plain", "suffix"} <= ways.keys():
                print(
                    f"  suffix over plain: by the clock {typical(seconds['plain']) / typical(seconds['suffix']):.2f}, by worth {worth['plain'] / worth['suffix']:.2f}"
                )
            for way in ways:
                print(
                    f"  ms of steps, {way}: { ({' '.join(map(str, kind)): round(own[way][kind], 3) for kind in sorted(steps[way])}) }",
                    flush=True,
                )


if __name__ == "__main__":
    main()
