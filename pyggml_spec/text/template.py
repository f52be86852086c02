"""Chat templates of GGUF files: messages to token ids.

Only the template's own text becomes control tokens. Control-token text inside messages is split by a private-use mark before rendering and
encoded without the mark as plain text. Messages without such text are encoded exactly as llama.cpp encodes the rendered text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..cancel import check
from ..errors import TemplateError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray, brief
from .formats import Format, format_of
from .messages import TemplateSupport, adapt, plain
from .renderer import LARGE, LARGE_RENDERER, MIB, RENDERER, Stopped
from .tokenizer import Tokenizer

MAX_TEMPLATE = 1 << 18  # characters; real ones have up to 20,000
SECONDS = 5.0  # CPU time per rendering
OWN_MEMORY, MEMORY_PER_CHARACTER = 256 * MIB, 32  # memory besides the messages, and per character of them
OWN_CHARACTERS = 1 << 18  # output besides four times the messages
KEY = "tokenizer.chat_template"
DEFAULT, TOOL_USE = "default", "tool_use"  # names of a file's templates
NAME = re.compile(r"[\w.-]+")
_KEEPS = ("preserve_thinking",)  # names of template options that keep or drop the reasoning of earlier turns
_DROPS = ("clear_thinking", "truncate_history_thinking", "drop_thinking")
_PROBED = datetime(2000, 1, 1, tzinfo=UTC)
_SENTENCES = {  # by the failure that sandbox.py reports
    "syntax": "is wrong in line {line} ({what}); use another model file",
    "compile": "cannot be compiled ({what}); use another model file",
    "security": "does what templates must not do: {what}; do not trust this model file",
    "refuses": "refuses this conversation: {what}; change the messages",
    "undefined": "needs what this conversation lacks: {what}; change the messages",
    "long": "was stopped: {what}; do not trust this model file",
    "fails": "fails on this conversation ({what}); change the messages or use another model file",
}


def templates(file: GGUFFile) -> dict[str, str]:
    """The non-empty templates of a model file by name. Raises TemplateError: one of them is not text."""
    out: dict[str, str] = {}
    for key, value in file.metadata.items():
        if key == KEY or key.startswith(f"{KEY}."):
            if not isinstance(value, str):
                too_long = isinstance(value, StringArray) and len(value) == 1 and len(value.raw(0)) > MAX_TEMPLATE
                what = f"of more than {MAX_TEMPLATE} characters" if too_long else f"{brief(value)}, which is no text"
                raise TemplateError(f"{file.path} has a chat template {what} ({key}); convert it again, or give one as `chat_template`")
            if value.strip():
                out[key[len(KEY) + 1 :] or DEFAULT] = value
    return out


class ChatTemplate:
    """A compiled template. ``can_think``: it knows ``enable_thinking``.

    Raises:
        TemplateError: too long, or invalid.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "", seconds: float = SECONDS) -> None:
        if len(source) > MAX_TEMPLATE:
            raise TemplateError(
                f"the chat template has {len(source)} characters (at most {MAX_TEMPLATE} are allowed); use another model file"
            )
        self.source, self.seconds = source, seconds
        self.can_think = "enable_thinking" in source
        self.form: Format = format_of(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._supports = TemplateSupport(self._probe)
        self._names: tuple[Tokenizer, _Names] | None = None
        self._text(self._request({"source": source}, 0))

    @classmethod
    def from_gguf(cls, file: GGUFFile, source: str | None = None) -> "ChatTemplate":
        """The template of a model file, or ``source`` with its special tokens.

        Raises:
            TemplateError: there is none, or it is invalid.
        """
        source = templates(file).get(DEFAULT) if source is None else source
        if not source:
            raise TemplateError(f"{file.path} has no chat template; give one as `chat_template`, or whole prompts to `pyspec run`")
        tokens = file.metadata.get("tokenizer.ggml.tokens")

        def token(name: str) -> str:
            i = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
            return tokens[i] if isinstance(tokens, StringArray) and type(i) is int and 0 <= i < len(tokens) else ""

        return cls(source, token("bos"), token("eos"))

    def render(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        tools: Sequence[Mapping] | None = None,
        variables: Mapping | None = None,
        now: datetime | None = None,
    ) -> str:
        """The text of a conversation, for display; ``encode`` returns its tokens.

        Args:
            messages: mappings with "role" and "content", as in the chat APIs. Without support for system messages, their text is put at the
                start of the next one.
            add_generation_prompt: open the assistant's turn at the end.
            thinking: sets ``enable_thinking``; None is True, as in llama-server.
            tools: function descriptions, for templates that use them.
            variables: further template variables: "documents", "functions", "reasoning_effort", ...
            now: date of ``strftime_now``, ``date_string`` and ``datetime``; None is today.

        Raises:
            TemplateError: the template refuses the conversation, fails, or exceeds a limit.
        """
        messages, told = plain(messages), plain(tools) if tools else []
        given = {"enable_thinking": thinking is not False, "add_generation_prompt": add_generation_prompt, **plain(variables or {})}
        if "messages" in given:
            raise TemplateError("the variables of a chat template name its messages; pass them as such")
        adapted = adapt(messages, self._supports, "<|channel|>" in self.source)
        return self._text(self._answer(adapted, told, given, now or datetime.now().astimezone()))

    def _probe(self, messages: list[dict], tools: list[dict]) -> tuple[str, bool]:
        answer = self._answer(messages, tools, {"enable_thinking": True, "add_generation_prompt": True}, _PROBED)
        return answer.get("text", ""), answer.get("failed") == "refuses"

    def _answer(self, messages: list[dict], tools: list[dict], given: dict, now: datetime) -> dict:
        keep = given.get("preserve_reasoning", True) is True
        values = {
            **self._tokens,
            "date_string": now.strftime("%d %b %Y"),
            "datetime": now.strftime("%b %d %Y"),
            **dict.fromkeys(_KEEPS, keep),
            **dict.fromkeys(_DROPS, not keep),
            **({"reasoning_strength": given["reasoning_effort"]} if "reasoning_effort" in given else {}),
            **({"tools": tools, "functions": json.dumps(tools, ensure_ascii=False)} if tools else {}),
            **given,
            "messages": messages,
        }
        return self._request({"source": self.source, "values": values, "now": now.isoformat()}, _length(values))

    def _request(self, request: dict, length: int) -> dict:
        limits = {"memory": OWN_MEMORY + MEMORY_PER_CHARACTER * length, "characters": OWN_CHARACTERS + 4 * length}
        try:
            return (LARGE_RENDERER if length > LARGE else RENDERER).render(request, seconds=self.seconds, **limits)
        except Stopped as stopped:
            raise TemplateError(f"the chat template was stopped: {stopped}; do not trust this model file") from None

    @staticmethod
    def _text(answer: dict) -> str:
        if "text" in answer:
            return answer["text"]
        sentence = _SENTENCES[answer["failed"]].format(line=answer["line"], what=brief(answer["what"], 300))
        raise TemplateError(f"the chat template {sentence}")

    @property
    def thinking(self) -> tuple[str, str]:
        """Start of reasoning in an answer, and the text between reasoning and content, as the template writes it."""
        begin, end = self.form.thinking
        between = self._supports.between
        return begin, between if between is not None and self.form.think[1] in between else end

    def prepare(self, tokenizer: Tokenizer) -> None:
        """Builds what the first ``encode`` with this vocabulary needs; a second for 6,000 control tokens."""
        self.control_names(tokenizer)

    def control_names(self, tokenizer: Tokenizer) -> "_Names":
        """Patterns of the control tokens, cached per tokenizer."""
        if self._names is None or self._names[0] is not tokenizer:
            self._names = tokenizer, _Names({**tokenizer.control_tokens(), **tokenizer.exposed_tokens})
        return self._names[1]

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping], fits: Callable[[str], object] | None = None, **options: Any
    ) -> list[int]:
        """Token ids of a conversation; ``options`` as for ``render``. Control tokens come from the template only.
        ``fits`` is called with the text before encoding, and raises if it is too long.

        Raises:
            TemplateError: as ``render``.
        """
        return self.encode_around("", tokenizer, messages, fits, **options)[0]

    def encode_around(
        self, mark: str, tokenizer: Tokenizer, messages: Sequence[Mapping], fits: Callable[[str], object] | None = None, **options: Any
    ) -> list[list[int]]:
        """As ``encode``, of each part of the rendered text between ``mark``, a character; "" for none."""
        given = {name: plain(options[name]) for name in ("tools", "variables") if options.get(name)}
        messages = plain(messages)
        names = self.control_names(tokenizer)
        guard = _Guard(names, self.source, messages, *given.values())
        options |= {name: guard.split(value) for name, value in given.items()}
        text = self.render(guard.split(messages), **options)
        if fits is not None:
            fits(text)
        parts = [self._encode(tokenizer, names, guard.mark, part) if part else [] for part in (text.split(mark) if mark else [text])]
        bos = tokenizer.bos
        if bos is not None and parts[0][:1] != [bos]:
            parts[0].insert(0, bos)
        return parts

    @staticmethod
    def _encode(tokenizer: Tokenizer, names: "_Names", mark: str, text: str) -> list[int]:
        """Token ids of a text with the guard's ``mark``."""
        if mark not in text:
            return tokenizer.encode(text, special=True, bos=False)
        control, exposed, ids = {**tokenizer.control_tokens(), **tokenizer.exposed_tokens}, tokenizer.exposed_tokens, list[int]()
        for i, part in enumerate(names.pattern.split(text)):
            if i % 2:
                ids.append(control[part])
                continue
            whole = part.replace(mark, "")
            for piece in part.split(mark) if any(name in whole for name in exposed) else [whole]:
                ids += tokenizer.encode(piece, special=False, bos=False) if piece else []
        return ids


class _Names:
    """Patterns of control-token texts, for ``_Guard``."""

    def __init__(self, control: Mapping[str, int]) -> None:
        names = sorted((name for name in control if len(name) > 1), key=len, reverse=True)
        either = "|".join(map(re.escape, names)) or r"(?!)"
        self.pattern = re.compile(f"({either})")
        self.inside = re.compile(f"(?=({either}))")
        self.heads = {name[:n] for name in names for n in range(1, len(name))}
        self.tails = {name[n:] for name in names for n in range(1, len(name))}
        self.longest = max(map(len, names), default=0)


class _Guard:
    """Inserts ``mark`` into control-token texts of messages, and at edges that could complete one with adjacent text."""

    def __init__(self, names: _Names, *texts: Any) -> None:
        taken = set(json.dumps(texts, ensure_ascii=False))
        self.mark = next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in taken)
        self._names = names

    def split(self, value: Any) -> Any:
        """``value`` with all its texts guarded; roles stay unless they contain a whole control token."""
        if isinstance(value, str):
            return self._split(value, edges=True)
        if isinstance(value, list):
            check()
            return [self.split(item) for item in value]
        if isinstance(value, dict):
            return {
                self._split(key, False): self._split(item, False) if key == "role" and isinstance(item, str) else self.split(item)
                for key, item in value.items()
            }
        return value

    def _split(self, text: str, edges: bool) -> str:
        names = self._names
        cuts = {match.start() + 1 for match in names.inside.finditer(text)}
        if edges and any(text[:n] in names.tails for n in range(1, names.longest)):
            cuts.add(0)
        if edges and any(text[-n:] in names.heads for n in range(1, names.longest)):
            cuts.add(len(text))
        for at in sorted(cuts, reverse=True):
            text = text[:at] + self.mark + text[at:]
        return text


def _length(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_length(key) + _length(item) for key, item in value.items())
    return sum(map(_length, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 1
