"""The process that templates are rendered in: its limits hold against single calls too, and cost no other request."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyggml_spec.cancel import Cancelled, cancelled_by
from pyggml_spec.errors import TemplateError
from pyggml_spec.text import renderer
from pyggml_spec.text.renderer import MIB, RENDERER, WouldBlock
from pyggml_spec.text.template import MEMORY_PER_CHARACTER, OWN_CHARACTERS, OWN_MEMORY, SECONDS, ChatTemplate

TALK = [{"role": "user", "content": "x"}]
MEMORY, TIME = f"takes more than {OWN_MEMORY // MIB} MiB of memory", "computes for more than 0.5 s"
# one call each, which no check between calls can interrupt
SINGLE_CALLS = [
    ("{{ '%(a)999999999s' % {'a': 1} }}", MEMORY),
    ("{{ '%(a).999999999f' % {'a': 1} }}", MEMORY),
    ("{{ 1 | round(300000000, 'floor') }}", TIME),
    ("{{ range(9999) | list | tojson(separators=('x' * 1000000, ':')) }}", MEMORY),
    ("{% set ns = namespace(l=[1] * 20000) %}{% for i in range(900) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson(indent=16) }}", f"({MEMORY}|{TIME})"),
    ("{% set ns = namespace(l=[]) %}{% set s = 'x' * 200000 %}{% for i in range(9999) %}{% set ns.l = [ns.l, s ~ i] %}{% endfor %}", f"({MEMORY}|{TIME})"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("source, limit", SINGLE_CALLS)
def test_a_single_call_is_stopped_at_the_limit_that_it_reaches(source, limit):
    with RENDERER.lock:
        RENDERER.stop()  # what the tests before this one computed in it would count here
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(TemplateError, match=f"was stopped: it {limit}; do not trust"):
        ChatTemplate(source, seconds=0.5).render(TALK)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before[1].ru_utime - before[1].ru_stime < 2
    assert after.ru_maxrss < (OWN_MEMORY >> 10) + max(before[0], 100 << 10)  # that of a process counts what it was started from
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[0] < 50 << 10
    assert ChatTemplate("ok").render(TALK) == "ok"


def test_one_process_renders_until_something_ends_it():
    template = ChatTemplate("{% if messages[0].content == 'go' %}{{ 'a' * 10 ** 9 }}{% endif %}ok")
    template.render(TALK)
    first = RENDERER.pid
    assert [template.render(TALK) for _ in range(3)] == ["ok"] * 3 and RENDERER.pid == first
    with pytest.raises(TemplateError, match=MEMORY):
        template.render([{"role": "user", "content": "go"}])
    assert template.render(TALK) == "ok" and RENDERER.pid != first
    os.kill(RENDERER.pid, signal.SIGKILL)  # from outside, between two renderings
    assert template.render(TALK) == "ok"


def test_a_template_is_given_once_and_more_than_are_kept_are_told_apart(monkeypatch):
    """18 KB with each question took 0.2 ms of every chat."""
    templates = [ChatTemplate(f"{n} {{{{ messages[0].content }}}}{{# {'long ' * 2000} #}}") for n in range(renderer.PLACES + 3)]
    for n in (*range(len(templates)), *range(len(templates)), 5, 5, 0, 5):
        assert templates[n].render(TALK) == f"{n} x"
    child, sent = RENDERER.child, []
    monkeypatch.setattr(
        child,
        "socket",
        SimpleNamespace(
            sendall=lambda data: (sent.append(len(data)), ours.sendall(data)), recv=(ours := child.socket).recv, settimeout=ours.settimeout
        ),
    )
    assert templates[5].render(TALK) == "5 x" and sent[0] < 1000
    monkeypatch.setattr(child, "socket", ours)
    os.kill(RENDERER.pid, signal.SIGKILL)
    assert templates[5].render(TALK) == "5 x"  # the next process has none of them


def test_what_a_large_rendering_leaves_is_not_the_next_ones_loss():
    template = ChatTemplate("{{ messages[0].content }}")
    for _ in range(6):
        assert len(template.render([{"role": "user", "content": "é" * 4_000_000}])) == 4_000_000


def test_the_memory_of_the_process_is_watched_where_the_kernel_does_not_bound_it(monkeypatch):
    monkeypatch.setattr(renderer, "WATCHED", True)
    slowly = "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l, 'x' * 100000 ~ i] %}{% endfor %}"
    with pytest.raises(TemplateError, match=MEMORY):
        ChatTemplate(slowly, seconds=20).render(TALK)
    assert ChatTemplate("ok").render(TALK) == "ok"


def test_a_child_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(renderer, "WALL_SECONDS", 0.3)
    template = ChatTemplate("ok")
    os.kill(RENDERER.pid, signal.SIGSTOP)
    with pytest.raises(TemplateError, match="no reply in"):
        template.render(TALK)
    monkeypatch.undo()
    assert template.render(TALK) == "ok"


def test_a_rendering_that_is_cancelled_ends():
    """Its client had gone, and the thread waited for all of the time that a template may take; so did the one whose turn was next."""
    slow = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", seconds=30)
    event, began, ended = threading.Event(), time.monotonic(), []

    def render():
        with cancelled_by(event), pytest.raises(Cancelled):
            slow.render(TALK)
        ended.append(time.monotonic() - began)

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    event.set()
    for thread in threads:
        thread.join(20)
    assert len(ended) == 2 and max(ended) < 10
    assert ChatTemplate("ok").render(TALK) == "ok"


def test_short_conversations_do_not_wait_for_long_ones():
    template = ChatTemplate("{{ messages[0].content }}")
    template.render(TALK)
    with renderer.LARGE_RENDERER.lock:
        assert template.render(TALK) == "x"
    with RENDERER.lock:
        assert len(template.render([{"role": "user", "content": "x" * 2 * renderer.LARGE}])) == 2 * renderer.LARGE


@pytest.mark.slow
def test_a_hurried_rendering_waits_for_nothing():
    slow = ChatTemplate("{% for i in range(99999) %}{% for j in range(9) %}{% endfor %}{% endfor %}slow")
    other = ChatTemplate("{{ messages[0].content }}")
    other.render(TALK)
    with RENDERER.nonblocking(1.0):
        assert other.render(TALK) == "x"
    pid = RENDERER.pid
    with RENDERER.nonblocking(0.01), pytest.raises(WouldBlock):
        slow.render(TALK)
    assert other.render(TALK) == "x" and RENDERER.pid == pid  # no answer to the question before it
    slow.render(TALK)
    with RENDERER.nonblocking(0.01), pytest.raises(WouldBlock):
        other.render(TALK)  # the one before took longer
    endless = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", seconds=0.3)
    other.render(TALK)
    with RENDERER.nonblocking(0.05), pytest.raises(WouldBlock):
        endless.render(TALK)
    assert other.render(TALK) == "x" and RENDERER.pid != pid  # what it owed was its end, and no other caller's loss
    with RENDERER.lock, RENDERER.nonblocking(1.0), pytest.raises(WouldBlock):
        other.render(TALK)
    os.kill(RENDERER.pid, signal.SIGKILL)
    with RENDERER.nonblocking(1.0), pytest.raises(WouldBlock):
        other.render(TALK)
    with RENDERER.nonblocking(1.0), pytest.raises(WouldBlock):
        other.render(TALK)  # a process is not started either
    assert other.render(TALK) == "x"


def test_a_hurried_rendering_returns_no_long_text():
    """66,000 characters were rendered in half a millisecond, and encoded in 170 while no stream of a server went on."""
    template = ChatTemplate("{{ messages[0].content * messages[0].times }}")
    short, long = ([{"role": "user", "content": "x", "times": times}] for times in (renderer.MUCH, renderer.MUCH + 1))
    template.render(short)
    with RENDERER.nonblocking(1.0):
        assert len(template.render(short)) == renderer.MUCH
        with pytest.raises(WouldBlock):
            template.render(long)
        with pytest.raises(WouldBlock):
            template.render(short)  # the one before was long
    assert len(template.render(long)) == renderer.MUCH + 1
    with RENDERER.nonblocking(1.0), pytest.raises(WouldBlock):
        template.render(short)


def test_threads_may_render_at_once():
    told, template = {}, ChatTemplate("{{ messages[0].content }}")

    def many(name):
        told[name] = {template.render([{"role": "user", "content": name}]) for _ in range(30)}

    threads = [threading.Thread(target=many, args=(str(i) * 1000,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 8 and all(texts == {name} for name, texts in told.items())


@pytest.mark.parametrize("python, why", [("/nowhere/python", "cannot be started"), ("/bin/false", "exits at start .exit status 1")])
def test_a_process_that_cannot_be_started_is_a_sentence(monkeypatch, python, why):
    RENDERER.stop()
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(TemplateError, match=why) as error:
        ChatTemplate("ok")
    assert python in str(error.value) and "\n" not in str(error.value)
    monkeypatch.undo()
    assert ChatTemplate("ok").render(TALK) == "ok"


def test_no_descriptor_leaks():
    template = ChatTemplate("{{ 'a' * 10 ** 9 }}")
    counts = set()
    for _ in range(4):
        with pytest.raises(TemplateError):
            template.render(TALK)
        counts.add(len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")))
    assert len(counts) == 1


def script(text: str, **options) -> subprocess.Popen:
    """A Python process that renders templates; TALK and ChatTemplate are there."""
    begin = f"import os, signal, sys, time\nfrom pyggml_spec.text.renderer import RENDERER\nfrom pyggml_spec.text.template import ChatTemplate\nTALK = {TALK}\n"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", begin + text], stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("busy", [False, True])
def test_the_child_ends_with_its_parent(busy):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    do = f"ChatTemplate({loop!r}, seconds=2).render(TALK)" if busy else "time.sleep(60)"
    parent = script(f"ChatTemplate('ok').render(TALK)\nprint(RENDERER.pid, flush=True)\n{do}")
    child = int(parent.stdout.readline())
    assert running(child)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(child)


def test_ctrl_c_and_quiet_ends():
    """It ends the rendering, prints nothing of the child's, and leaves nothing that the next rendering could take for its answer."""
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    parent = script(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a test run in the background inherits that it is ignored
        f"ChatTemplate('ok').render(TALK)\n"
        f"try:\n    print('go', flush=True)\n    ChatTemplate({loop!r}, seconds=30).render(TALK)\n"  # wherever the signal finds a slow machine
        f"except KeyboardInterrupt:\n    print(ChatTemplate('next').render(TALK))"
    )
    assert parent.stdout.readline() == "go\n"
    time.sleep(0.3)
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: the whole group
    assert parent.communicate(timeout=60) == ("next\n", "") and parent.returncode == 0
    parent = script(
        'for source in ("{{ \'a\' * 10 ** 9 }}", "{{ 10 ** (10 ** 10) }}"):\n'
        "    try:\n        ChatTemplate(source, seconds=0.3).render(TALK)\n    except Exception as error:\n        print(type(error).__name__)"
    )
    assert parent.communicate(timeout=60) == ("TemplateError\n" * 2, "")


def test_limits_and_forks():
    parent = script(
        "signal.signal(signal.SIGPROF, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})\n"
        "try:\n    ChatTemplate(\"{{ 1 | round(300000000, 'floor') }}\", seconds=0.3).render(TALK)\nexcept Exception as error:\n    print(error)"
    )
    assert "more than 0.3 s" in parent.communicate(timeout=60)[0]
    parent = script(
        "ask = lambda text: ChatTemplate(text).render(TALK)\nask('before')\nfirst, forked = RENDERER.pid, os.fork()\n"
        "if not forked:\n    ok = RENDERER.pid is None and ask('in the fork') == 'in the fork' and RENDERER.pid != first\n    os._exit(0 if ok else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), ask('after'), RENDERER.pid == first)"
    )
    assert parent.communicate(timeout=60)[0] == "0 after True\n"
    text = " ".join((Path(__file__).parents[2] / "docs" / "chat.md").read_text().split())
    assert f"at {SECONDS:g} s of CPU time, at {OWN_MEMORY // MIB} MiB of memory plus {MEMORY_PER_CHARACTER} bytes per character" in text
    assert f"at {OWN_CHARACTERS:,} characters of output plus four times" in text


@pytest.mark.parametrize(
    "call, text", [("'a bc'|wordwrap(2)", "a\nbc"), ("'<b>a</b>'|striptags", "a"), ("[1]|pprint", "[1]"), ("lipsum(1)|length > 9", "True")]
)
def test_what_jinja_imports_late_is_there(call, text):
    """The process opens no file while it renders: these filters failed on every conversation."""
    RENDERER.start()
    assert ChatTemplate("{{ " + call + " }}").render([]) == text


def test_the_process_can_open_and_write_nothing():
    ChatTemplate("ok").render(TALK)
    if sys.platform == "linux":
        limits = {line[:26].strip(): line[26:].split()[:2] for line in Path(f"/proc/{RENDERER.pid}/limits").read_text().splitlines()}
        assert limits["Max open files"] == limits["Max file size"] == limits["Max core file size"] == ["0", "0"]
        assert int(limits["Max address space"][0]) < OWN_MEMORY + 100 * MIB
