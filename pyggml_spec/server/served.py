"""The served model: prompts from texts and messages, checked constraints, and its entry in the list of models."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..api import Session
from ..cancel import check
from ..chat import chat_template, tool_template
from ..concurrent import ConcurrentSession
from ..engine.prompt import pictures_of
from ..text.formats import IN_JSON, TAIL, Format
from ..text.template import ChatTemplate
from ..text.tokenizer import Tokenizer
from ..vision.messages import encode_chat, marked
from .errors import ApiError
from .pictures import PictureOptions, decoded
from .sampling import Limits

CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
LLAMA3 = (
    "{{- bos_token -}}{%- for message in messages -%}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' "
    "+ (message.content or '') | trim + '<|eot_id|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)
COMMAND_R = (
    "{%- set names = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'} -%}{%- for message in messages if message.role in names -%}"
    "{{- '<|START_OF_TURN_TOKEN|><|' + names[message.role] + '_TOKEN|>' + (message.content or '') | trim + '<|END_OF_TURN_TOKEN|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}{%- endif -%}"
)
NAMED = {"chatml": CHATML, "command-r": COMMAND_R, "llama3": LLAMA3}
MAX_PROMPT_TOKENS = 1 << 19  # of all prompts of one request
MARKER = "<__media__>"  # llama.cpp's, of a picture in a text
CHARACTERS = 12  # per token of the context: the beginning of a text that is encoded first
ANSWER = 256  # tokens of output, for which a sufficient context is named


@dataclass
class ServeOptions:
    """Options of `pyspec serve` on which requests depend.

    Attributes:
        names: of the model, the first one is its id.
        thinking: True or False for templates that can think; None leaves it to them.
        thinking_budget: tokens of reasoning in requests that do not say, -1 for no limit. ``thinking_message``: what is put before its end there.
        reasoning: whether reasoning is separated from the content ("auto") or left in it ("none").
        pictures: limits of pictures.
        suffix_first: whether /infill puts the suffix before the prefix.
    """

    names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    slots: int = 8
    thinking: bool | None = None
    thinking_budget: int = -1
    thinking_message: str = ""
    reasoning: str = "auto"
    template_arguments: dict[str, Any] = field(default_factory=dict)
    verbose: bool = False
    metrics: bool = True
    show_slots: bool = True
    page: bool = True
    prefill_assistant: bool = True
    suffix_first: bool = False
    pictures: PictureOptions = field(default_factory=PictureOptions)


@dataclass(frozen=True)
class Prefill:
    """The beginning of the assistant's message, which the output does not repeat. ``content``: None where the reasoning goes on."""

    reasoning: str = ""
    content: str | None = ""


@dataclass(frozen=True)
class Rendering:
    """A conversation, and ``options`` of ``ChatTemplate.render`` and ``encode`` for it."""

    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    prefill: Prefill | None = None


@dataclass(frozen=True)
class Prompt:
    """A conversation as tokens. ``inside``: "reasoning" or "content", where the prompt has opened it, else ""; ``goes_on``: whether it ends within a
    text of the assistant's; ``form``: the format of outputs."""

    ids: list[int]
    inside: str
    goes_on: bool
    form: Format


class Served:
    """A session, with its templates and limits. ``note``: a line for the user. Methods that render, encode or compile take milliseconds: they run in the
    pool's threads."""

    def __init__(
        self, session: Session, concurrent: ConcurrentSession, limits: Limits, options: ServeOptions, template: str | None = None
    ) -> None:
        self.session, self.limits, self.options = session, limits, options
        self.tokenizer: Tokenizer = session.tokenizer
        self.drafter = bool(session.methods)
        takes = {"image": session.encoder.sees, "audio": session.encoder.rate > 0} if session.encoder is not None else {}
        self.media = tuple(kind for kind, taken in takes.items() if taken)
        self.picture_limits = replace(options.pictures.limits, rows=concurrent.n_ctx)
        self.n_ctx = concurrent.n_ctx
        self.created = int(time.time())
        path = session.target.file.path
        self.path = str(path)
        self.names = options.names or (path.name,)
        self.name = self.names[0]
        self.template, where = chat_template(session, template, CHATML)
        self.note = where if self.template.source == CHATML and template is None else ""
        self.tool_template = tool_template(session) if template is None else None
        for one in (self.template, self.tool_template):
            if one is not None:
                one.prepare(self.tokenizer)  # now: the first chat is read in the event loop
        eos = session.target.file.metadata.get("tokenizer.ggml.eos_token_id")
        self.eos = eos if isinstance(eos, int) else None
        self.longest_piece = self.tokenizer.longest_piece  # bytes
        self.ends = self.tokenizer.ends()

    def prompts(self, prompt: Any, name: str = "prompt") -> list[Any]:
        """Prompts of /completion: a text, tokens, both mixed, or a list of such. Raises ApiError: there are none."""
        if isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt):
            if not prompt:
                raise ApiError(400, f"the {name} is an empty list; give a text", param=name)
            return prompt
        return [prompt]

    def text_ids(self, prompts: Sequence[Any], name: str = "prompt") -> list[list[int]]:
        """Their tokens; control tokens in texts count. Raises ApiError: one is something else, or empty, or all are too long together."""
        out: list[list[int]] = []
        most = left = max(MAX_PROMPT_TOKENS, self.n_ctx)
        for prompt in prompts:
            check()
            if isinstance(prompt, dict):
                if data := prompt.get("multimodal_data"):
                    out.append(self.checked(self._with_pictures(prompt.get("prompt_string"), data, name), name))
                    continue
                prompt = prompt.get("prompt_string")
            if (parts := texts_and_ids(prompt)) is None:
                raise ApiError(400, f"the {name} has to be a text, a list of token ids, or a list of such", param=name)
            ids: list[int] = []
            for i, part in enumerate(parts):
                ids += [part] if isinstance(part, int) else self.encoded(part, name, special=True, bos=i == 0)
                if len(ids) > 2 * self.n_ctx:  # the rest cannot make it fit
                    break
            out.append(self.checked(ids, name))
            left -= len(out[-1])
            if left < 0:
                raise ApiError(400, f"the prompts have more than {most} tokens together; send several requests", param=name)
        return out

    def _with_pictures(self, text: Any, data: Any, name: str) -> list[int]:
        """A text with MARKER where each picture of ``data``, base64 texts, stands. Raises ApiError."""
        encoder = self.session.encoder
        if encoder is None:
            raise ApiError(
                400, "this server takes no images, sound or video: it was started without an encoder; send text alone", param=name
            )
        texts = text.split(MARKER) if isinstance(text, str) else []
        if not isinstance(data, list) or len(texts) != len(data) + 1:
            raise ApiError(400, f"multimodal_data has to be a list of base64 texts, one for each {MARKER} in prompt_string", param=name)
        parts: list[Any] = [self.encoded(texts[0], name, special=True, bos=True)]
        for one, after in zip(data, texts[1:], strict=True):
            parts += [decoded(one, self.options.pictures), self.encoded(after, name, special=True, bos=False)]
        return encoder.prompt(parts, self.picture_limits)

    def encoded(self, text: str, name: str, special: bool, bos: bool) -> list[int]:
        """Tokens of a text that can fit. Raises ApiError, as ``check_length``."""
        self.check_length(text, name)
        return self.tokenizer.encode(text, special, bos)

    def check_length(self, text: str, name: str) -> None:
        """Encodes the beginning of a long text first: nothing interrupts the encoding of megabytes. Raises ApiError: it cannot fit the context."""
        self.check_bytes(len(text), name)
        head = CHARACTERS * self.n_ctx
        while head < len(text):
            check()
            least = len(self.tokenizer.encode(text[:head], special=True, bos=False)) // 2  # half: the cut changes tokens near it
            if least >= self.n_ctx:
                raise self._too_many(f"at least {least}", least, name)
            head *= 4
        check()

    def check_count(self, count: int, name: str) -> None:
        """Raises ApiError: even parts of one token each would be too many."""
        if count > self.n_ctx:
            raise self._too_many(f"at least {count}", count, name)

    def check_bytes(self, size: int, name: str) -> None:
        """Raises ApiError: even tokens of the greatest length would be too many."""
        least = size // self.longest_piece
        if least >= self.n_ctx:
            raise self._too_many(f"at least {least}", least, name)

    def checked(self, ids: list[int], name: str = "prompt") -> list[int]:
        """The ids themselves, if they are tokens and fit. Raises ApiError: none, outside of the vocabulary, or too many."""
        if not ids:
            raise ApiError(400, f"the {name} is empty; give some text", param=name)
        if len(self.known(ids, name)) >= self.n_ctx:
            raise self._too_many(str(len(ids)), len(ids), name)
        return ids

    def known(self, ids: list[int], name: str) -> list[int]:
        """The ids themselves, if they are tokens. Raises ApiError."""
        n_vocab = self.tokenizer.n_vocab
        least = min(ids) if pictures_of(ids) else 0  # rows of pictures are below 0
        if (outside := next((i for i in ids if not least <= i < n_vocab), None)) is not None:
            raise ApiError(400, f"the {name} has the token {str(outside)[:30]}, and the vocabulary has {n_vocab}", param=name)
        return ids

    def _too_many(self, shown: str, count: int, name: str) -> ApiError:
        need = (count + ANSWER + 255) // 256 * 256
        return ApiError(
            400, f"the request has {shown} tokens, which exceeds the available context size of {self.n_ctx}; shorten it, or start the "
            f"server with more: `pyspec serve -c {need}` for the prompt and {ANSWER} tokens of output", kind="exceed_context_size_error", param=name, n_prompt_tokens=count, n_ctx=self.n_ctx,
        )  # fmt: skip

    def template_for(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """The template of a conversation: files may have another one for those with tools."""
        return self.tool_template if tools and self.tool_template is not None else self.template

    def chat_ids(self, chat: Rendering) -> Prompt:
        """A conversation as the model's template writes it. Errors as of ``ChatTemplate.encode``."""
        said = [m["content"] for m in chat.messages if m.get("role") != "assistant" and isinstance(m.get("content"), str)]
        self.check_bytes(sum(map(len, said)), "messages")
        tools = chat.options.get("tools")
        template = self.template_for(tools)
        form = template.form
        if tools and "tools" not in template.source:  # calls are requested in words
            form = replace(form, calls=(IN_JSON, *form.calls))
        fits = lambda text: self.check_length(text, "messages")  # noqa: E731
        ids = encode_chat(template, self.tokenizer, self.session.encoder, chat.messages, fits, self.picture_limits, **chat.options)
        opened = chat.options.get("add_generation_prompt", True) and form.opened(self.tokenizer.decode(ids[-TAIL:], special=True))
        for text, marks in _begun(template, opened, chat.prefill):
            ids.add(self.tokenizer.encode(text, special=marks, bos=False))
        inside, continued = "reasoning" if opened else "", False
        if (prefill := chat.prefill) is not None:
            inside, continued = "reasoning" if prefill.content is None else "content", prefill.content != ""
        return Prompt(self.checked(ids, "messages"), inside, continued, form)

    def rendered(self, chat: Rendering) -> str:
        """The same as text."""
        template = self.template_for(chat.options.get("tools"))
        messages, files, mark = marked(chat.messages)
        text = template.render(messages, **chat.options)
        text = text.replace(mark, MARKER) if files else text
        return text + "".join(part for part, _ in _begun(template, template.form.opened(text), chat.prefill))

    def model_entry(self) -> dict[str, Any]:
        target = self.session.target
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "pyspec", "aliases": list(self.names),
            "tags": list(self.options.tags), "status": {"value": "loaded"}, **({"architecture": {"input_modalities": ["text", *self.media], "output_modalities": ["text"]}} if self.media else {}),
            "meta": {
                "vocab_type": 2, "n_vocab": self.tokenizer.n_vocab, "n_ctx_train": target.context_length, "n_ctx": self.n_ctx,
                "n_embd": target.n_embd, "size": target.file.path.stat().st_size, "architecture": target.arch,
                "drafter": self.session.drafter.title if self.session.drafter is not None else None,
            },
        }  # fmt: skip


def texts_and_ids(value: Any) -> list[str | int] | None:
    """A text, a token id, or a list of both, as a list; None: something else."""
    parts = value if isinstance(value, list) else [value]
    return parts if all(isinstance(part, (int, str)) and not isinstance(part, bool) for part in parts) else None


def _begun(template: ChatTemplate, opened: bool, prefill: Prefill | None) -> list[tuple[str, bool]]:
    """The beginning of the assistant's message after a prompt, which has ``opened`` the reasoning or not: texts, and whether they are markers."""
    if prefill is None:
        return []
    channels = template.form.channels
    if channels is not None:
        begin, between, outputs = channels.thinks, channels.ends[0] + channels.start, channels.answers
    else:
        (begin, between), outputs = template.thinking, ""
    thought = bool(prefill.reasoning) or opened
    out = [(begin, True)] if thought and not opened else []
    out.append((prefill.reasoning, False))
    if prefill.content is not None:
        out += [(between if thought else "", True), (outputs, True), (prefill.content, False)]
    return [part for part in out if part[0]]
