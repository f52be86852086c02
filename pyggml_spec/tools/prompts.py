"""Prompt files: JSON lines with a text or chat messages, a category and a name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import PyspecError
from ..gguf_io.safetensors import parse_json

INCLUDED = Path(__file__).parent / "prompts.jsonl"
CATEGORIES = ("code", "chat", "reasoning")  # of the included prompts
MAX_FILE = 1 << 24  # bytes


@dataclass(frozen=True)
class Prompt:
    """``text`` is used as is, ``messages`` through the chat template; one of them is None."""

    category: str
    name: str
    text: str | None = None
    messages: tuple[Mapping, ...] | None = None


def read_prompts(path: str | Path) -> list[Prompt]:
    """Reads and parses a prompt file. Raises PyspecError: the file cannot be read, or is invalid."""
    return parse_prompts(prompt_file(path), path)


def prompt_file(path: str | Path) -> bytes:
    """Content of a prompt file, read once because it may be a pipe. Raises PyspecError: it cannot be read, or is too long."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE + 1)
    except (OSError, ValueError) as error:
        raise PyspecError(f"the prompt file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_FILE:
        raise PyspecError(f"the prompt file {path} has more than {MAX_FILE} bytes; split it")
    return data


def parse_prompts(data: bytes, path: str | Path) -> list[Prompt]:
    """Parses prompts. A line is ``{"prompt": TEXT}`` or ``{"messages": [{"role": ..., "content": ...}, ...]}``, with optional ``category``
    (default: "prompts") and ``name`` (default: the line number). Raises PyspecError: no prompts, or an invalid line."""
    prompts = [_prompt(line, i, path) for i, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not prompts:
        raise PyspecError(f'the prompt file {path} is empty; give one JSON object per line, like {{"prompt": "..."}}')
    return prompts


def included_prompts(categories: tuple[str, ...] = CATEGORIES) -> list[Prompt]:
    """The included prompts, six per category."""
    return [prompt for prompt in read_prompts(INCLUDED) if prompt.category in categories]


def _prompt(line: bytes, number: int, path: str | Path) -> Prompt:
    where = f"line {number} of {path}"
    value = parse_json(line, where, MAX_FILE)
    text, messages = value.get("prompt"), value.get("messages")
    category, name = value.get("category", "prompts"), value.get("name", str(number))
    if not all(isinstance(label, str) and label.isprintable() for label in (category, name)):
        raise PyspecError(f"{where} has a category or name that is not printable text")
    turns = messages if isinstance(messages, list) else []
    valid = bool(turns) and all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in turns)
    if not (isinstance(text, str) and text if messages is None else valid and text is None):
        raise PyspecError(f'{where} needs a text "prompt", or "messages" as in the chat APIs: a list of objects with "role" and "content"')
    return Prompt(category, name, text, tuple(turns) or None)
