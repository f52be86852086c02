"""How many threads compute: the rule on machines that are simulated, quotas and readings of files that are written here, and one real busy machine."""

import itertools
import math
import os
import random
import subprocess
import sys

import pytest

import pyggml_spec as ps
from pyggml_spec.ggml import cores
from pyggml_spec.ggml.cores import POLL_S, CoreMonitor, CpuUsage, ThreadRule
from pyggml_spec.ggml.library import lib

READ = cores.read  # before the tests' own takes its place


class Machine:
    """CoreMonitor that a process and others share fairly; the process spins on as many threads as its rule says."""

    def __init__(self, rule: ThreadRule, count: int) -> None:
        self.rule, self.count, self.at, self.idle, self.nice, self.own = rule, count, 0.0, 0.0, 0.0, 0.0

    def reading(self) -> CpuUsage:
        return CpuUsage(self.at, self.idle, self.nice, self.own, self.count, 1)

    def runs(self, seconds: float, busy: float = 0.0, nice: float = 0.0) -> list[int]:
        """Others want ``busy`` cores meanwhile, and those that give way ``nice``; the threads that computed, by looks."""
        seen = []
        for _ in range(round(seconds / POLL_S)):
            before, mine = self.reading(), min(self.rule.threads, self.count)
            share = min(1.0, self.count / (mine + busy + nice / 3))
            own, others = mine * share, busy * share
            giving_way = min(nice, self.count - own - others)
            self.at, self.own, self.nice = self.at + POLL_S, self.own + own * POLL_S, self.nice + giving_way * POLL_S
            self.idle += max(0.0, self.count - own - others - giving_way) * POLL_S
            seen.append(self.rule.update(before, self.reading()))
        return seen


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("busy", [1, 2, 4, 8, 40])
def test_threads_leave_the_cores_that_others_want_and_come_back(count, busy):
    """Two threads on two cores, one of which is shared, decoded at a hundredth of what one thread does."""
    machine = Machine(ThreadRule(count), count)
    assert set(machine.runs(1)) == {count}
    seen = machine.runs(2, busy)
    assert seen[2:] == [max(1, count - busy)] * len(seen[2:])
    assert machine.runs(1)[-7:] == [count] * 7  # within three looks
    assert not machine.rule.busy


@pytest.mark.parametrize("seed", range(5))
def test_background_load_of_an_idle_machine_takes_no_thread(seed):
    rng, machine = random.Random(seed), Machine(ThreadRule(2), 2)
    assert {threads for _ in range(100) for threads in machine.runs(POLL_S, rng.random() * 0.3)} == {2}


def test_threads_stay_where_they_should():
    """A nice process has a core for itself where one thread computes, and a part of it where two do: they took turns for ever."""
    machine = Machine(ThreadRule(2), 2)
    seen = machine.runs(20, nice=6)
    assert seen.count(2) <= 9 and machine.runs(1)[-6:] == [2] * 6
    idle = Machine(ThreadRule(2), 2)
    idle.runs(1, busy=2)
    assert idle.runs(2, nice=0.9)[-10:] == [2] * 10  # what gives way indeed keeps no thread away
    machine = Machine(ThreadRule(2), 2)
    seen = [machine.runs(POLL_S, busy=2 * (n % 2))[0] for n in range(100)]
    assert sum(a < b for a, b in itertools.pairwise(seen)) <= 1
    slower = [threads for n in range(20) for threads in machine.runs(0.4, busy=2 * (n % 2))]
    assert sum(a < b for a, b in itertools.pairwise(slower)) <= 10
    machine = Machine(ThreadRule(2, adapts=False), 2)
    assert set(machine.runs(1, busy=4)) == {2} and machine.rule.busy
    machine.runs(1)
    assert not machine.rule.busy


def test_looks_are_seldom_and_cost_little_of_the_time():
    at, told, looks = [0.0], [], []

    def reader() -> CpuUsage:
        looks.append(at[0])
        at[0] += cost
        return CpuUsage(at[0] - cost, 0.0, 0.0, at[0], 2, 7)

    cost, rule = 0.0, ThreadRule(2)
    known = CoreMonitor(reader, lambda: at[0])
    known.add(rule, told.append)
    for _ in range(1000):
        at[0] += 0.001
        known.poll()
    assert (
        8 <= len(looks) <= 11 and known.polls == len(looks) - 1 and told == [1]
    )  # one core's time was this process's, and the other's idle
    cost = 0.01  # seconds per look, on a machine with hundreds of cores
    looks.clear()
    for _ in range(10000):
        at[0] += 0.001
        known.poll()
    assert len(looks) <= 12
    known.remove(rule)
    looks.clear()
    at[0] += 100
    known.poll()
    assert not looks


def test_times_of_forks_and_cores(tmp_path):
    readings = iter([CpuUsage(0.0, 0.0, 0.0, 50.0, 2, 1), CpuUsage(1.0, 0.0, 0.0, 0.1, 2, 2), CpuUsage(2.0, 0.0, 0.0, 2.1, 2, 2)])
    at, rule = [0.0], ThreadRule(2)
    known = CoreMonitor(lambda: next(readings), lambda: at[0])
    known.add(rule, lambda threads: None)
    for at[0] in (1.0, 2.0):
        known.poll()
    assert rule.threads == 2 and known.polls == 1
    stat, second = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    stat.write_text(STAT.format(all="111 22 6 447 11 0 2 0 0 0"))
    every, some = READ(None, stat), READ({0, 2}, stat)
    assert (every.idle * second, every.cores) == (pytest.approx(458), 3) and (some.idle * second, some.cores) == (pytest.approx(412), 2)
    assert every.nice_s * second == pytest.approx(22 if os.getpriority(os.PRIO_PROCESS, 0) <= 0 else 0)
    assert every.own > 0 and every.process == os.getpid()


STAT = "cpu  {all}\ncpu0 100 20 3 400 5 0 1 0 0 0\ncpu1 10 2 3 40 6 0 1 0 0 0\ncpu2 1 0 0 7 0 0 0 0 0 0\nintr 5 0 1\nctxt 9\n"


@pytest.mark.parametrize("text", ["", "cpu  0 0 0 0 0 0\ncpu0 0 0 0 0 0 0\n", "cpu  1 2\ncpu0 1 2\n", "nothing\n", None])
def test_a_system_that_does_not_say_leaves_threads_alone(tmp_path, text):
    """A sandbox shows a file of zeros: others would have all the time there is."""
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert READ(None, tmp_path / "stat") is None
    known, rule = CoreMonitor(lambda: None, lambda: math.inf), ThreadRule(4)
    known.add(rule, pytest.fail)
    known.poll()
    assert rule.threads == 4 and known.polls == 0


def _tree(tmp_path, own: str, **limits: str):
    groups = tmp_path / "groups"
    for path, text in limits.items():
        file = groups / path.replace("__", "/").replace("_max", ".max").replace("cfs", "cpu.cfs")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    cores.own_groups.cache_clear()
    return cores.quota(groups, tmp_path / "own")


@pytest.mark.parametrize("own, limits, most", [
    ("0::/\n", {"cpu_max": "200000 100000"}, 2),
    ("0::/a/b\n", {"a__cpu_max": "150000 100000", "a__b__cpu_max": "max 100000", "cpu_max": "max 100000"}, 1.5),
    ("0::/a/b\n", {"a__cpu_max": "400000 100000", "a__b__cpu_max": "300000 100000"}, 3),
    ("0::/x\n", {"cpu_max": "50000 100000"}, 0.5),  # a container sees its own group as the top one
    ("4:cpu,cpuacct:/a\n", {"cpu,cpuacct__a__cfs_quota_us": "250000", "cpu,cpuacct__a__cfs_period_us": "100000"}, 2.5),
    ("4:cpuacct,cpu:/a\n", {"cpu__cfs_quota_us": "100000", "cpu__cfs_period_us": "50000", "cpu__a__cfs_quota_us": "-1", "cpu__a__cfs_period_us": "50000"}, 2),
    ("2:cpuacct:/\n1:cpu:/\n0::/\n", {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}, math.inf),
    ("1:cpu:/\n0::/g\n", {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000", "unified__g__cpu_max": "100000 100000"}, 1),
    ("0::/\n", {"cpu_max": "max 100000"}, math.inf),
    ("0::/\n", {"cpu_max": "what"}, math.inf),
    ("0::/\n", {"cpu_max": "100000 0"}, math.inf),
    ("", {}, math.inf),
])  # fmt: skip
def test_a_quota_counts_as_cores(tmp_path, own, limits, most):
    """`docker run --cpus 2` on a machine of 64 cores was given 16 threads."""
    assert _tree(tmp_path, own, **limits) == most


@pytest.mark.parametrize("mine, limit, threads", [(8, math.inf, 8), (64, math.inf, 16), (64, 2, 2), (8, 1.5, 2), (8, 0.2, 1), (2, 6.5, 2)])
def test_threads_by_default(monkeypatch, mine, limit, threads):
    monkeypatch.setattr(cores, "allowed", lambda: frozenset(range(mine)))
    monkeypatch.setattr(cores, "quota", lambda: limit)
    assert cores.default_threads() == threads


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "ggml"])
def test_bits_do_not_depend_on_how_many_threads_other_work_leaves(pair, kernels):
    try:
        session = ps.load(*pair, device="CPU", kernels=kernels, n_ctx=1024, draft_width=4, prefix_memory=0)
    except ps.PyspecError:
        pytest.skip("this processor has no kernels of our own")
    with session:
        rule, seen = session.backend.rule, {}
        if rule.most < 2:
            pytest.skip("one core")
        for threads in (rule.most, 1):
            rule.threads = threads
            lib.pgs_threads_now(session.backend.handle, threads)
            for mode, behind in itertools.product(("plain", "speculative"), (20, 700)):
                events = session.steps(
                    [n % 50 + 1 for n in range(behind)], 12, mode=mode, sampling=ps.Sampling(temperature=0, logprobs=5), ignore_end=True
                )
                seen.setdefault((mode, behind), []).append([[(p.token, p.logprob, p.top) for p in event.logprobs] for event in events])
                session.runner.reset()
        assert all(few == many for many, few in seen.values())


REAL = """
import subprocess, sys, time
import pyggml_spec as ps

def speed(session, seconds):
    began, tokens = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for event in session.steps("import os", 16, mode="plain", ignore_end=True):
            tokens += len(event.tokens)
            if time.perf_counter() - began > seconds:
                break
    return tokens / (time.perf_counter() - began)

with ps.load(device="CPU", threads=1, n_ctx=256) as one, ps.load(device="CPU", n_ctx=256) as every:
    if "keep" in sys.argv:
        every.backend.rule.adapts = False
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        time.sleep(0.3)
        speed(every, 0.4)
        rounds = [(speed(one, 0.5), speed(every, 0.5)) for _ in range(3)]
    finally:
        for other in others:
            other.kill()
    print(sum(b for _, b in rounds) / sum(a for a, _ in rounds))
"""


@pytest.mark.slow
@pytest.mark.skipif(READ(cores.allowed()) is None or len(cores.allowed() or ()) < 2, reason="one core, or nothing is known of others")
def test_busy_processes_do_not_stop_decoding():
    """With as many threads as cores it took 20 to 100 times as long as one thread."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, env=env, check=True, timeout=120)
    assert float(done.stdout) > 0.4
