"""Replay must be told from launch times, because ggml-cuda counts nothing: a wrong verdict would hide a slow engine or blame a fast one."""

import os
import subprocess
import sys

from pyggml_spec.cli.report import footer
from pyggml_spec.engine.stats import Stats
from pyggml_spec.ggml.step_io import ReplayCounters

NODES = 1800  # a 4B step


def test_the_launch_times_of_a_real_run_are_told_apart():
    """H200, 4B shape: 4.4 and 6.7 ms in the first two calls, 0.16 in the third, then 0.08; 3.2 throughout without CUDA graphs."""
    on, off = ReplayCounters(), ReplayCounters()
    for call, us in enumerate([4400, 6700, 160, 80, 80, 80], 1):
        on.count(call, us, NODES)
        off.count(call, 3200, NODES)
    assert (on.warmup, on.replayed, on.eager) == (2, 4, 0)
    assert (off.warmup, off.replayed, off.eager) == (2, 0, 4)


def test_graphs_too_small_to_tell_are_not_counted():
    counters = ReplayCounters()
    assert not counters.count(3, 1, 10)
    assert counters == ReplayCounters()


def _footer(replayed: int, eager: int) -> str:
    return footer(Stats(cuda_graphs={"warmup": 2, "captured": 1, "replayed": replayed, "eager": eager}), None)


def test_a_low_replay_rate_is_a_warning_with_a_remedy_and_a_high_one_is_not():
    assert "warning" not in _footer(995, 5) and "995 steps replayed" in _footer(995, 5)
    assert "only 50 % of the steps were replayed" in _footer(100, 100)
    assert "CUDA graphs" not in footer(Stats(), None)


def test_replay_cannot_be_switched_off_once_ggml_may_have_read_the_setting():
    code = """
import pyggml_spec as ps
from pyggml_spec.ggml.device import graph_replay_enabled
from pyggml_spec.errors import DeviceError
with ps.load(device="CPU", threads=1, n_ctx=64, draft_width=4):
    assert graph_replay_enabled()
try:
    ps.load(device="CPU", threads=1, n_ctx=64, graphs=False)
except DeviceError as error:
    print(error)
"""
    env = {k: v for k, v in os.environ.items() if k != "GGML_CUDA_DISABLE_GRAPHS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "start a new process" in done.stdout, done.stderr
