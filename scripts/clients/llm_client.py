# pip: llm
"""The command `llm`, with the model in extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    about = f"- model_id: here\n  model_name: {os.environ['PYSPEC_MODEL']}\n  api_base: {os.environ['PYSPEC_URL']}/v1\n"
    (Path(folder) / "extra-openai-models.yaml").write_text(about)
    command = [str(Path(sys.executable).parent / "llm"), "-m", "here", "--key", "none", "-o", "max_tokens", "12", "Name a colour."]
    done = subprocess.run(command, env={**os.environ, "LLM_USER_PATH": folder}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
