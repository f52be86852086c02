"""A model on one device runs without any module of ``multi_device``."""

import subprocess
import sys

SCRIPT = """
import sys
import pyggml_spec as ps

with ps.load(device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
    text, stats = session.generate("def f(", 12, ignore_end=True)
    with session.concurrent(slots=2, prefix_memory=0) as server:
        assert server.submit("def f(", 12, ignore_end=True).result(60)[0] == text
assert stats.emitted == 12
print([name for name in sys.modules if name.startswith("pyggml_spec.multi_device")])
"""


def test_one_device_imports_no_module_of_several():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
