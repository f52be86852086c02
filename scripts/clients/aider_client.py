# pip: aider-chat
"""aider writes the file that the scripted model says."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    options = [
        "--model", "openai/edits", "--edit-format", "whole", "--message", "Say hello.", "--yes-always", "--no-git", "--no-check-update",
        "--no-show-model-warnings", "--no-analytics", "--no-pretty", "hello.py",
    ]  # fmt: skip
    env = {**os.environ, "OPENAI_API_BASE": f"{os.environ['PYSPEC_EDITS']}/v1", "OPENAI_API_KEY": "none", "HOME": folder}
    command = [str(Path(sys.executable).parent / "aider"), *options]
    done = subprocess.run(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300)
    assert Path(folder, "hello.py").read_text().strip() == "print('hello')", done.stdout + done.stderr
