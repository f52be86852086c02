# pip: lm-eval[api] httpx
"""lm-eval's loglikelihood over /v1/completions (echo with logprobs), and generation over /v1/chat/completions, on a task of four questions."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]
ROWS = [
    ("The sky is", "blue", "seven"),
    ("Two and two make", "four", "green"),
    ("Snow is", "white", "loud"),
    ("Fish live in", "water", "books"),
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
KINDS = {
    "chosen": ("output_type: multiple_choice\ndoc_to_choice: [\"{{right}}\", \"{{wrong}}\"]\ndoc_to_target: 0\nmetric_list: [{metric: acc}]\n",
               ["--model", "local-completions", "--model_args", f"model={MODEL},base_url={URL}/v1/completions,tokenizer_backend=remote,num_concurrent=2"]),
    "said": ("output_type: generate_until\ndoc_to_target: \"{{right}}\"\ngeneration_kwargs: {until: [\"\\n\"], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n",
             ["--model", "local-chat-completions", "--apply_chat_template", "--model_args", f"model={MODEL},base_url={URL}/v1/chat/completions,tokenizer_backend=None"]),
}  # fmt: skip
# the tokenizer is asked for without a name: of several models the one that is loaded answers
httpx.post(f"{URL}/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1}, timeout=120).raise_for_status()
with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "rows.jsonl")
    data.write_text("".join(json.dumps(dict(zip(("question", "right", "wrong"), row))) + "\n" for row in ROWS))
    for name, (more, arguments) in KINDS.items():
        Path(folder, f"{name}.yaml").write_text(TASK.format(name=name, data=data) + more)
        command = [
            str(Path(sys.executable).parent / "lm_eval"),
            "--include_path",
            folder,
            "--tasks",
            name,
            "--output_path",
            f"{folder}/{name}",
            *arguments,
        ]
        done = subprocess.run(
            command, env={**os.environ, "OPENAI_API_KEY": "none", "HF_HOME": folder, "HF_DATASETS_OFFLINE": "1"}, capture_output=True, text=True, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        results = json.loads(next(Path(folder, name).rglob("results*.json")).read_text())["results"][name]
        print(name, results)
        assert name == "said" or results["acc,none"] >= 0.75, results
