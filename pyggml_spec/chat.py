"""A conversation over a loaded pair: messages in, events out, the caches kept from turn to turn."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from .api import Session, load
from .engine.stats import Stats
from .errors import PyspecError, TemplateError
from .events import StepEvent
from .load_options import LoadOptions
from .sampling.sampler import Sampling
from .text.formats import TAIL, Format
from .text.parse import Parser
from .text.stream import TextStream
from .text.template import DEFAULT, KEY, NAME, TOOL_USE, ChatTemplate, templates
from .text.tokenizer import Tokenizer
from .vision.messages import PICTURE, encode_chat

CONTINUE = "{% for m in messages %}{{ m.content }}{% if not loop.last or m.role != 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
"""For models without a chat template: messages are joined as plain text."""
CONTINUE_STOP, CONTINUE_TOKENS = ("\n\n\n",), 256  # such models rarely emit an end token


class Chat:
    """Use ``ask`` for a turn. A turn that fails, or is stopped before its answer begins, leaves the conversation as it was.

    Attributes:
        session: borrowed. Other generations in between are allowed; the caches are then not reused.
        template: a template, or its Jinja source; None takes the model's, see ``chat_template``.
        system: the first message, if any.
        thinking: switches reasoning in templates that support it; None is True.
        variables: further template variables, as of ``ChatTemplate.render``.
        messages: the turns so far, without the system prompt.
        stats: of each response so far.
    """

    def __init__(
        self,
        session: Session,
        template: ChatTemplate | str | None = None,
        system: str | None = None,
        thinking: bool | None = None,
        sampling: Sampling | None = None,
        variables: Mapping | None = None,
    ) -> None:
        self.session, self.system, self.thinking, self.sampling, self.variables = session, system, thinking, sampling, variables
        self.template = template if isinstance(template, ChatTemplate) else chat_template(session, template)[0]
        self.messages: list[dict] = []
        self.stats: list[Stats] = []

    @classmethod
    def load(
        cls,
        target: str | Path | None = None,
        draft: str | Path | Sequence[str | Path] | None = None,
        options: LoadOptions | None = None,
        *,
        template: str | None = None,
        system: str | None = None,
        thinking: bool | None = None,
        sampling: Sampling | None = None,
        variables: Mapping | None = None,
        **fields: Any,
    ) -> Self:
        """A conversation with a model that is loaded for it; use it in a ``with`` block, or ``close`` it. ``options`` and ``fields`` as of ``load``.

        Raises:
            PyspecError: the model cannot be loaded.
            TemplateError: the template is wrong.
        """
        session = load(target, draft, options, **fields)
        try:
            return cls(session, template, system, thinking, sampling, variables)
        except BaseException:
            session.close()
            raise

    @property
    def continues(self) -> bool:
        """Whether messages are joined as plain text."""
        return self.template.source == CONTINUE

    def answer(self, text: str, max_tokens: int | None = None) -> str:
        """The whole answer to ``text``; errors as of ``ask``."""
        return "".join(event.text for event in self.ask(text, max_tokens))

    def ask(
        self,
        text: str,
        max_tokens: int | None = None,
        *,
        pictures: Sequence[bytes] = (),
        interrupted: Callable[[], bool] | None = None,
        prefill_progress: Callable[[int, int], None] | None = None,
    ) -> Generator[StepEvent, None, None]:
        """Yields the answer to ``text`` as it comes; the last event has the final statistics. ``pictures``: bytes of files, which stand before the text.

        Raises:
            TemplateError: the template refuses the conversation.
            ContextError: it does not fit the context.
            PictureError: a picture is none, damaged or too large, or the model has no encoder (`mmproj`).
            SamplingError: as ``Session.steps``.
        """
        if max_tokens is None and self.continues:
            max_tokens = CONTINUE_TOKENS
        turn: dict[str, Any] = {"role": "user", "content": text}
        if pictures:
            turn["content"] = [*({"type": PICTURE, "data": data} for data in pictures), {"type": "text", "text": text}]
        session, messages = self.session, self.as_messages(turn)
        ids = encode_chat(self.template, session.tokenizer, session.encoder, messages, thinking=self.thinking, variables=self.variables)
        if not ids:
            raise TemplateError("the chat template makes no text of this conversation; use another one")
        answer, stats = _Response(self.template.form, self.session.tokenizer, ids), self.session.new_stats()
        events = self.session.steps(
            ids, max_tokens, sampling=self.sampling, stop=CONTINUE_STOP if self.continues else (), append=True,
            interrupted=interrupted, prefill_progress=prefill_progress, stats=stats,
        )  # fmt: skip
        failed = False
        try:
            with closing(events):
                for event in events:
                    yield answer.take(event)
        except PyspecError:
            failed = True
            raise
        finally:  # a stopped response counts
            if stats.emitted and not failed:
                self.messages += [turn, answer.message()]
                self.stats.append(stats)

    def as_messages(self, *turns: dict) -> list[dict]:
        """The system prompt, the turns so far and ``turns``."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages, *turns]

    def reset(self) -> None:
        """Forgets the turns. The system prompt stays."""
        self.messages, self.stats = [], []

    def close(self) -> None:
        """Closes the session, which ``load`` made for this chat alone."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Response:
    """A response: the text to show, and the message for later turns. Reasoning is shown before the content, and separate in the message."""

    def __init__(self, form: Format, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        """``ids``: the prompt."""
        self.content = self.reasoning = ""
        self._parser: Parser | None = None
        if form.channels is not None or tokenizer.control_tokens().keys() & set(form.think):
            thinks = form.opened(tokenizer.decode(ids[-TAIL:], special=True))
            self._parser = Parser(form, inside="reasoning" if thinks else "")
            self._stream = TextStream(tokenizer.piece_with(form.markers()))

    def take(self, event: StepEvent) -> StepEvent:
        if self._parser is None:
            self.content += event.text
            return event
        last = not event.tokens and event.prompt_read is None
        pieces = self._parser.push(self._stream.finish() if last else self._stream.push(*event.tokens))
        shown = ""
        for piece in [*pieces, *(self._parser.finish() if last else ())]:
            shown += "\n\n" if piece.content and self.reasoning and not self.content else ""
            shown += piece.reasoning + piece.content
            self.reasoning, self.content = self.reasoning + piece.reasoning, self.content + piece.content
        return replace(event, text=shown)

    def message(self) -> dict[str, str]:
        return {"role": "assistant", "content": self.content} | ({"reasoning_content": self.reasoning} if self.reasoning else {})


def chat_template(session: Session, source: str | None = None, otherwise: str = CONTINUE) -> tuple[ChatTemplate, str]:
    """A template and its origin, in words.

    Args:
        source: Jinja text, or the name of one of the file's templates; None for the default one.
        otherwise: for files without a template.

    Raises:
        TemplateError: it is wrong.
    """
    file = session.target.file
    if source == "":
        raise TemplateError("the chat template that was given is empty")
    found = templates(file)
    if source is not None and NAME.fullmatch(source):
        if source not in found:
            there = f"the file's are named {', '.join(found)}" if found else "the file has none"
            raise TemplateError(f"the chat template {source!r} is neither Jinja text nor one of the file's; {there}")
        return ChatTemplate.from_gguf(file, found[source]), f"the template {source} of {file.path.name}"
    if source is not None:
        return ChatTemplate.from_gguf(file, source), "the template that was given"
    if found:
        return ChatTemplate.from_gguf(file, found.get(DEFAULT) or next(iter(found.values()))), f"the template of {file.path.name}"
    has = "an empty chat template" if KEY in file.metadata else "no chat template"
    how = ": messages are joined as plain text" if otherwise == CONTINUE else ": ChatML is used"
    return ChatTemplate(otherwise), f"{file.path.name} has {has}{how}; `chat_template` gives it one"


def tool_template(session: Session) -> ChatTemplate | None:
    """The file's template for conversations with tools, if it has another one for them. Raises TemplateError."""
    found = templates(session.target.file)
    return ChatTemplate.from_gguf(session.target.file, found[TOOL_USE]) if TOOL_USE in found and len(found) > 1 else None
