"""What the footer says of unusual runs."""

from collections import Counter

import pytest

from pyggml_spec.api import Configuration
from pyggml_spec.cli.report import configuration_line, footer
from pyggml_spec.engine.stats import Stats


def _stats(**more) -> Stats:
    stats = Stats(mode="speculative", device="CPU", **more)
    for _ in range(9):
        stats.add_step(1, 0, False)
    stats.emitted += 1
    stats.seconds["decode"] = 2.0
    return stats


def test_speculation_that_never_drafted_is_not_called_speculative():
    """Width control may take plain steps throughout: their speed is not that of speculation."""
    assert "decoded plainly at 4.5 tok/s" in footer(_stats(), 100.0) and "speedup" not in footer(_stats(), 100.0)


def test_the_speed_of_this_text_is_told_from_plain_decoding_in_general():
    """It said "plain 10.0 tok/s (calibrated) | plain 4.5 tok/s"."""
    stats = _stats()
    stats.mode = "plain"
    assert "plain 10.0 tok/s (calibrated) | decoded plainly at 4.5 tok/s" in footer(stats, 100.0)


def test_no_step_has_no_widths():
    """`-n 0` said "steps: ; plain decoding: 3024 tok/s expected"."""
    assert "steps:" not in footer(Stats(mode="speculative", device="CPU", width_reason="plain decoding: 3 tok/s expected"), None)


def test_a_drafter_that_will_not_draft_is_called_idle():
    """It said "width chosen from 1" where no block width pays."""
    memory = {"weights": 1, "kv": 1, "compute": 1}
    lines = {
        widths: configuration_line(Configuration("t", "d", None, "CPU", 1, 16, widths, 256, "", "f16", "ggml", memory, ()), None)
        for widths in ((1,), (1, 2), ())
    }
    assert "on CPU (1 thread, kernels: ggml) | drafter d unused (no block width is faster" in lines[1,]
    told = configuration_line(Configuration("t", "d", None, "CPU", 1, 16, (1, 2), 256, "", "f16", "ggml", memory, ()), "reference")
    assert "the text is that of --draft-width 16" in told  # and not that of a width chosen while running
    assert "drafter d, width chosen from 1/2" in lines[1, 2] and "drafter d, width 16" in lines[()]


def test_a_busy_machine_is_named():
    """Two threads on two busy cores decode at a seventieth of the speed; without a word the model or the engine would be blamed."""
    busy = footer(_stats(waited_s=1.5, most_threads=2), None)
    assert "other work had the processor for 1.5 of 2.0 s" in busy and "-t 2 keeps all threads" in busy and "leave -t out" in busy
    follows = _stats(waited_s=0.0, most_threads=2, threads_follow=True, threads=Counter({2: 3, 1: 6}), contended_s=1.2)
    assert "threads gave way to it, and come back when it ends: 3 steps by 2 threads, 6 steps by 1 thread" in (
        busy := footer(follows, None)
    )
    assert "other work had the processor, so" in busy and "-t" not in busy
    moment = _stats(waited_s=0.02)
    moment.seconds["decode"] = 0.03
    assert "other work" not in footer(moment, None)  # it said "for 0.0 of 0.0 s"
    for idle in (0.02, 0.0, None):
        assert "other work" not in footer(
            _stats(waited_s=idle, contended_s=0.1, threads=Counter({2: 9}), most_threads=2, threads_follow=True), None
        )


def _drafted(**more) -> Stats:
    drafted = Stats(mode="speculative", device="CPU", width_reason="width 4: 900 tok/s expected, plain decoding would give 800", **more)
    drafted.add_step(4, 3, True)
    drafted.seconds["decode"] = 1.0
    return drafted


def test_a_speedup_over_a_busy_moment_is_not_claimed():
    assert "plain 2.0 tok/s (calibrated)" in (line := footer(_drafted(), 500.0)) and "speedup 1.50x" in line
    for line in (footer(_drafted(), 500.0, True), footer(_drafted(contended_s=0.5), 500.0)):
        assert "plain 2.0" not in line and "speedup" not in line and "expected" not in line
        assert "no speed of plain decoding to compare with: other work had the processor" in line


def test_no_speed_is_printed_that_the_same_run_contradicts():
    """It said "plain 0.4 tok/s (measured on a busy processor) | decoded plainly at 109.0 tok/s"."""
    plainly = _stats()
    for _ in range(40):
        plainly.add_time(1, 10_000_000, 2, True)
    assert plainly.plain_ms == pytest.approx(10) and plainly.threads == {2: 40}
    for ms, shown in ((11.0, True), (9.0, True), (2500.0, False), (4.0, False)):
        line = footer(plainly, ms)
        assert (f"plain {1000 / ms:.1f} tok/s" in line) == shown and "decoded plainly at 4.5 tok/s" in line
        assert ("no speed of plain decoding to compare with" in line) != shown
    drafted = _drafted()
    for n in range(60):
        drafted.add_time(1 if n % 10 else 4, 10_000_000, 2, True)
    assert "speedup" in footer(drafted, 10.0) and "speedup" not in footer(drafted, 30.0)


def test_few_plain_steps_say_nothing_of_what_they_take():
    stats = _stats()
    for _ in range(5):
        for rows in (4, 1, 1, 1, 1):  # the first ones after a block find caches cold
            stats.add_time(rows, 90_000_000, 2, True)
    assert stats.plain_ms is None and "plain 100.0 tok/s" in footer(stats, 10.0)
