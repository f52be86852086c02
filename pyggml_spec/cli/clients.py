"""What to paste into clients, for `pyspec serve --print-config`."""

from collections.abc import Mapping
from string import Template
from typing import Any

CONFIGS = {
    "claude-code": """\
export ANTHROPIC_BASE_URL=$url ANTHROPIC_AUTH_TOKEN=$key
export ANTHROPIC_MODEL='$model' ANTHROPIC_SMALL_FAST_MODEL='$model'
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude
""",
    "codex": """\
# ~/.codex/config.toml; then: PYSPEC_API_KEY=$key codex
model = "$model"
model_provider = "pyspec"

[model_providers.pyspec]
name = "pyspec"
base_url = "$url/v1"
env_key = "PYSPEC_API_KEY"
wire_api = "responses"
""",
    "opencode": """\
{
  "$$schema": "https://opencode.ai/config.json",
  "provider": {
    "pyspec": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$url/v1", "apiKey": "$key"},
      "models": {"$model": {$limit}}
    }
  },
  "model": "pyspec/$model",
  "small_model": "pyspec/$model"
}
""",
    "aider": """\
export OPENAI_API_BASE=$url/v1 OPENAI_API_KEY=$key
aider --model 'openai/$model'
""",
    "continue": """\
# ~/.continue/config.yaml
name: pyspec
version: 1.0.0
schema: v1
models:
  - name: $model
    provider: openai
    model: $model
    apiBase: $url/v1
    apiKey: $key
    roles: [chat, edit, apply]
""",
    "zed": """\
{
  "language_models": {
    "openai_compatible": {
      "pyspec": {
        "api_url": "$url/v1",
        "available_models": [{"name": "$model", "max_tokens": $context}]
      }
    }
  },
  "agent": {"default_model": {"provider": "pyspec", "model": "$model"}}
}
""",
    "open-webui": """\
export OPENAI_API_BASE_URL=$url/v1 OPENAI_API_KEY=$key ENABLE_OLLAMA_API=false
open-webui serve
""",
}
CONTEXT = 8192  # for clients that have to be told one, where -c is not given


def config(client: str, values: Mapping[str, Any]) -> str:
    """``values``: parameters of `pyspec serve`."""
    host = next((part.strip() for part in values["host"].split(",") if not part.strip().endswith(".sock")), "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    files = [values["target"], values["hf_repo"]]
    several = values["models_dir"] or values["models_preset"] or values["models_cached"]
    names = [
        *(values["alias"] or "").split(","),
        *(path.replace("\\", "/").rpartition("/")[2] if path is files[0] else path for path in files if path),
    ]
    n_ctx = values["n_ctx"]
    return Template(CONFIGS[client]).substitute(
        url=f"http{'s' if values['certificate'] else ''}://{host}:{values['port']}",
        model="any" if several else next((name.strip() for name in names if name.strip()), "any"),
        key=values["api_key"][0].split(",")[0] if values["api_key"] else "none", context=n_ctx or CONTEXT,
        limit=f'"limit": {{"context": {n_ctx}, "output": {n_ctx // 2}}}' if n_ctx else "",
    )  # fmt: skip
