"""The model behind the server: prompts from texts and messages, constraints checked beforehand, and what it says of itself."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat import chat_template
from ..concurrent import ConcurrentSession
from ..sampling.grammar import Grammar
from ..sampling.lazy import LazyGrammar
from ..session import Session
from ..text.template import KEY, ChatTemplate
from ..text.tokenizer import Tokenizer
from . import fields
from .errors import ApiError

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
THINK, END_THINK = "<think>", "</think>"
_TAIL = 32  # tokens of a prompt that are looked at for an open <think>


@dataclass
class ServeOptions:
    """What `pyspec serve` was told, as far as requests depend on it.

    Attributes:
        names: of the model, the first one is its id.
        thinking: True or False for templates that can think; None leaves it to them.
        reasoning: whether reasoning is told apart from the content ("auto") or left in it ("none").
        suffix_first: whether what is filled in is asked for with the suffix in front of the prefix.
    """

    names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    slots: int = 8
    thinking: bool | None = None
    reasoning: str = "auto"
    template_arguments: dict[str, Any] = field(default_factory=dict)
    verbose: bool = False
    metrics: bool = True
    show_slots: bool = True
    page: bool = True
    prefill_assistant: bool = True
    suffix_first: bool = False


@dataclass(frozen=True)
class Prompt:
    """A conversation as tokens.

    Attributes:
        thinks: whether the answer begins inside of the reasoning.
        prefix: text of the assistant's that the answer goes on with; not repeated in it.
    """

    ids: list[int]
    thinks: bool = False
    prefix: str = ""


class Served:
    """A session and what is said with it. Methods that render, encode or compile take milliseconds: they are called in a thread of the pool."""

    def __init__(
        self, session: Session, concurrent: ConcurrentSession, limits: fields.Limits, options: ServeOptions, template: str | None = None
    ) -> None:
        self.session, self.limits, self.options = session, limits, options
        self.tokenizer: Tokenizer = session.tokenizer
        self.drafter = bool(session.methods)
        self.n_ctx = concurrent.n_ctx
        self.created = int(time.time())
        path = session.target.file.path
        self.path = str(path)
        self.names = options.names or (path.name,)
        source = template if template is not None else None if KEY in session.target.file.metadata else CHATML
        self.template: ChatTemplate = chat_template(session, source)[0]
        self.template.prepare(self.tokenizer)  # now, not while the event loop reads the first chat
        eos = session.target.file.metadata.get("tokenizer.ggml.eos_token_id")
        self.eos = eos if isinstance(eos, int) else None
        self.longest_piece = self.tokenizer.longest_piece  # bytes
        self._ends = [i for i in range(self.tokenizer.n_vocab) if self.tokenizer.is_end(i)]

    @property
    def name(self) -> str:
        return self.names[0]

    # -- prompts

    def text_ids(self, prompt: Any, name: str = "prompt") -> list[list[int]]:
        """Prompts of /completion: a text, tokens, both mixed, or a list of such; control tokens in texts count.

        Raises:
            ApiError: something else, or empty.
        """
        if isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt):
            if not prompt:
                raise ApiError(400, f"the {name} is an empty list; give a text", param=name)
            return [self._one_prompt(part, name) for part in prompt]
        return [self._one_prompt(prompt, name)]

    def _one_prompt(self, prompt: Any, name: str) -> list[int]:
        if isinstance(prompt, dict):
            if prompt.get("multimodal_data"):
                raise ApiError(400, "this model takes no images, sound or video; send text alone", param=name)
            prompt = prompt.get("prompt_string")
        if isinstance(prompt, (str, int)) and not isinstance(prompt, bool):
            prompt = [prompt]
        if not isinstance(prompt, list) or not all(isinstance(part, (int, str)) and not isinstance(part, bool) for part in prompt):
            raise ApiError(400, f"the {name} has to be a text, a list of token ids, or a list of such", param=name)
        ids: list[int] = []
        for i, part in enumerate(prompt):
            ids += [part] if isinstance(part, int) else self.tokenizer.encode(self.short(part, name), special=True, bos=i == 0)
        return self.checked(ids, name)

    def short(self, text: str, name: str) -> str:
        """The text itself, unless even tokens of the greatest length would be too many: to encode megabytes takes a thread of two many seconds.

        Raises:
            ApiError: it cannot fit the context.
        """
        least = len(text) // self.longest_piece
        if least >= self.n_ctx:
            raise self._too_many(f"at least {least}", least, name)
        return text

    def checked(self, ids: list[int], name: str = "prompt") -> list[int]:
        """The ids themselves, if they are tokens and fit.

        Raises:
            ApiError: none, outside of the vocabulary, or too many.
        """
        if not ids:
            raise ApiError(400, f"the {name} is empty; give some text", param=name)
        if len(self.known(ids, name)) >= self.n_ctx:
            raise self._too_many(str(len(ids)), len(ids), name)
        return ids

    def known(self, ids: list[int], name: str) -> list[int]:
        """The ids themselves, if they are tokens. Raises ApiError."""
        outside = next((i for i in ids if not 0 <= i < self.tokenizer.n_vocab), None)
        if outside is not None:
            raise ApiError(400, f"the {name} has the token {outside}, and the vocabulary has {self.tokenizer.n_vocab}", param=name)
        return ids

    def _too_many(self, told: str, count: int, name: str) -> ApiError:
        return ApiError(
            400, f"the request has {told} tokens, which exceeds the available context size of {self.n_ctx}; shorten it, or start the "
            "server with more", kind="exceed_context_size_error", param=name, n_prompt_tokens=count, n_ctx=self.n_ctx,
        )  # fmt: skip

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None, open_turn: bool = True, prefix: str = "",
    ) -> Prompt:  # fmt: skip
        """A conversation as the model's template writes it; ``prefix`` begins the assistant's turn. Errors as of ``ChatTemplate.encode``."""
        given: dict[str, Any] = {"thinking": thinking, "tools": tools or None, "variables": variables}
        self.short(
            "".join(m["content"] for m in messages if m.get("role") != "assistant" and isinstance(m.get("content"), str)), "messages"
        )
        ids = self.template.encode(self.tokenizer, messages, add_generation_prompt=open_turn, **given)
        if prefix:
            ids = ids + self.tokenizer.encode(prefix, special=False, bos=False)
        tail = self.tokenizer.decode(ids[-_TAIL:], special=True) if open_turn else ""
        thinks = tail.rfind(THINK) > tail.rfind(END_THINK) and not tail[tail.rfind(THINK) + len(THINK) :].strip()
        return Prompt(self.checked(ids, "messages"), thinks, prefix)

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None, open_turn: bool = True, prefix: str = "",
    ) -> str:  # fmt: skip
        """The same as text."""
        return (
            self.template.render(messages, add_generation_prompt=open_turn, thinking=thinking, tools=tools or None, variables=variables)
            + prefix
        )

    def check_constraint(self, constraint: tuple[str, str] | None, triggers: tuple[fields.Trigger, ...] = ()) -> None:
        """Compiles it, which is kept for its request: what is wrong with it is said before the request waits. Raises SamplingError."""
        if constraint is not None and triggers:
            LazyGrammar(*constraint, triggers, self.tokenizer)
        elif constraint is not None:
            Grammar(*constraint, self.tokenizer)

    def end_bias(self) -> list[dict[str, Any]]:
        """What ``ignore_eos`` comes to, as /completion shows it."""
        return [{"token": i, "bias": None} for i in self._ends]

    # -- what it is

    def model_entry(self) -> dict[str, Any]:
        target = self.session.target
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "pyspec", "aliases": list(self.names),
            "tags": list(self.options.tags),
            "meta": {
                "vocab_type": 2, "n_vocab": self.tokenizer.n_vocab, "n_ctx_train": target.context_length, "n_ctx": self.n_ctx,
                "n_embd": target.n_embd, "size": target.file.path.stat().st_size, "architecture": target.arch,
                "drafter": self.session.drafter.title if self.session.drafter is not None else None,
            },
        }  # fmt: skip

    def check_model(self, body: Mapping[str, Any]) -> None:
        """The name of the model in a request is not looked at, as in llama.cpp's server: there is one. It has to be a text."""
        fields.text(body, "model")
