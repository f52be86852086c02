"""Chat templates: messages to token ids, by the template that the GGUF brings.

The template's own text may name control tokens; a message's text may not. Every control token's text inside a message is split by a mark
before rendering (a private-use character that appears nowhere else), so in the result only the template's are whole. What lies between
them is encoded without control tokens, the marks removed. Harmless messages hold no marks, and are encoded exactly as llama.cpp would
encode the rendered text: a message's first word still joins the line break before it, as in training.
"""

import re
from collections.abc import Mapping, Sequence

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, UndefinedError
from jinja2.sandbox import SecurityError

from ..errors import TemplateError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray, brief
from .sandbox import LimitExceeded, Sandbox
from .tokenizer import Tokenizer

MAX_TEMPLATE = 1 << 18  # characters; real ones have up to 20,000
SECONDS = 2.0
OWN_CHARACTERS = 1 << 18  # what a rendering may have besides four times the messages
KEY = "tokenizer.chat_template"


class ChatTemplate:
    """A compiled template. ``can_think`` tells whether it knows ``enable_thinking``.

    Raises:
        TemplateError: too long, or not a template.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "", seconds: float = SECONDS):
        if len(source) > MAX_TEMPLATE:
            raise TemplateError(
                f"the chat template has {len(source)} characters (at most {MAX_TEMPLATE} are allowed); use another model file"
            )
        self.source, self.seconds = source, seconds
        self.can_think = "enable_thinking" in source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateError(
                f"line {error.lineno} of the chat template is wrong ({brief(str(error.message))}); use another model file"
            ) from None
        except Exception as error:  # Python's compiler gives up in several ways on absurd nesting
            raise TemplateError(f"the chat template cannot be compiled ({brief(str(error))}); use another model file") from None

    @classmethod
    def from_gguf(cls, file: GGUFFile, source: str | None = None) -> "ChatTemplate":
        """The template of a model file, or another one for its vocabulary.

        Raises:
            TemplateError: it has none, or one that is no template.
        """
        source = file.metadata.get(KEY) if source is None else source
        if isinstance(source, StringArray):
            raise TemplateError(f"{file.path} has a chat template of more than {MAX_TEMPLATE} characters; use another model file")
        if not isinstance(source, str) or not source:
            raise TemplateError(f"{file.path} has no chat template; give one with --chat-template-file, or whole prompts to `pyspec run`")
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
    ) -> str:
        """The text of a conversation. Not for encoding with control tokens: that is ``encode``.

        Args:
            messages: mappings with "role" and "content", as in the chat APIs.
            add_generation_prompt: whether the assistant's turn is opened at the end.
            thinking: True or False sets ``enable_thinking``; None leaves it to the template.
            tools: function descriptions, for templates that take them.

        Raises:
            TemplateError: the template refuses the conversation, fails, or does what a template must not do.
        """
        values = {"messages": _plain(messages), "tools": _plain(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        if thinking is not None:
            values["enable_thinking"] = thinking
        sandbox = self._sandbox
        sandbox.begin(self.seconds, OWN_CHARACTERS + 4 * _length(values))
        try:
            return sandbox.joined(self._pieces(values))
        except SecurityError as error:
            raise TemplateError(
                f"the chat template does what templates must not do: {brief(str(error))}; do not trust this model file"
            ) from None
        except LimitExceeded as error:
            if sandbox.refusal is not None:
                raise TemplateError(
                    f"the chat template refuses this conversation: {brief(sandbox.refusal, 300)}; change the messages"
                ) from None
            raise TemplateError(f"the chat template was stopped: {error}; do not trust this model file") from None
        except UndefinedError as error:
            raise TemplateError(f"the chat template needs what this conversation lacks: {brief(str(error))}; change the messages") from None
        except (JinjaError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError) as error:
            what = brief(f"{type(error).__name__} {error}")
            raise TemplateError(
                f"the chat template fails on this conversation ({what}); change the messages or use another model file"
            ) from None

    def _pieces(self, values: dict):
        size = 0
        for piece in self._template.generate(**self._tokens, **values):
            size += len(piece)
            if size > self._sandbox.limit:
                raise LimitExceeded(f"it makes more than {self._sandbox.limit} characters")
            yield piece

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Mapping], **options) -> list[int]:
        """Token ids of a conversation; ``options`` as for ``render``. Control tokens come from the template only.

        Raises:
            TemplateError: as ``render``.
        """
        control = tokenizer.control_tokens()
        guard = _Guard(control, self.source, messages, options.get("tools"))
        if options.get("tools"):
            options["tools"] = guard.split(_plain(options["tools"]))
        text = self.render(guard.split(_plain(messages)), **options)
        if guard.mark not in text:
            ids = tokenizer.encode(text, special=True, bos=False)
        else:
            ids = []
            for i, part in enumerate(guard.pattern.split(text)):
                ids += (
                    [control[part]] if i % 2 else tokenizer.encode(part.replace(guard.mark, ""), special=False, bos=False) if part else []
                )
        bos = tokenizer.bos
        return [bos, *ids] if bos is not None and ids[:1] != [bos] else ids


class _Guard:
    """Puts ``mark`` into every control token's text inside messages, and where an edge could complete one with the text beside it."""

    def __init__(self, control: Mapping[str, int], *texts):
        taken: set[str] = set()
        for text in texts:
            _characters(text, taken)
        self.mark = next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in taken)
        names = sorted((name for name in control if len(name) > 1), key=len, reverse=True)
        either = "|".join(map(re.escape, names)) or r"(?!)"
        self.pattern = re.compile(f"({either})")
        self._inside = re.compile(f"(?=({either}))")
        self._heads = {name[:n] for name in names for n in range(1, len(name))}
        self._tails = {name[n:] for name in names for n in range(1, len(name))}
        self._longest = max(map(len, names), default=0)

    def split(self, value):
        """``value`` with every text in it made harmless; roles stay as they are where they hold no whole control token."""
        if isinstance(value, str):
            return self._split(value, edges=True)
        if isinstance(value, list):
            return [self.split(item) for item in value]
        if isinstance(value, dict):
            return {
                self._split(key, False): self._split(item, False) if key == "role" and isinstance(item, str) else self.split(item)
                for key, item in value.items()
            }
        return value

    def _split(self, text: str, edges: bool) -> str:
        cuts = {match.start() + 1 for match in self._inside.finditer(text)}
        if edges and any(text[:n] in self._tails for n in range(1, self._longest)):
            cuts.add(0)
        if edges and any(text[-n:] in self._heads for n in range(1, self._longest)):
            cuts.add(len(text))
        for at in sorted(cuts, reverse=True):
            text = text[:at] + self.mark + text[at:]
        return text


def _plain(value):
    """Messages as lists, dictionaries, strings and numbers only: a template gets no objects with methods of their own.

    Raises:
        TemplateError: anything else.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # lone surrogates
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TemplateError(f"the message {brief(value)} has keys that are no strings; use the fields of the chat APIs")
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item) for item in value]
    raise TemplateError(f"a message holds {brief(value)}, which is neither text, number, list nor mapping; convert it first")


def _length(value) -> int:
    if isinstance(value, dict):
        return sum(_length(key) + _length(item) for key, item in value.items())
    return sum(map(_length, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 1


def _characters(value, out: set) -> None:
    if isinstance(value, str):
        out.update(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _characters(key, out)
            _characters(item, out)
    elif isinstance(value, Sequence):
        for item in value:
            _characters(item, out)
