"""A conversation over a loaded pair: messages in, events out, the caches kept from turn to turn."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Self, Unpack

from .arguments import LoadOptions
from .decode.stats import Stats
from .errors import PyspecError, TemplateError
from .events import StepEvent
from .sampling.sampler import Sampling
from .session import Session, load
from .text.template import DEFAULT, KEY, NAME, TOOL_USE, ChatTemplate, templates

CONTINUE = "{% for m in messages %}{{ m.content }}{% if not loop.last or m.role != 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
"""For models that were never taught to chat: all turns are one running text, which the model goes on with."""
CONTINUE_STOP, CONTINUE_TOKENS = ("\n\n\n",), 256  # such models rarely end by themselves


class Chat:
    """Use ``ask`` for a turn. A turn that fails, or is stopped before its answer begins, leaves the conversation as it was.

    Attributes:
        session: borrowed; other generations in between are allowed, and cost the reuse of the caches.
        template: of the conversation, or its Jinja source; None takes the model's, see ``chat_template``.
        system: the first message, if any.
        thinking: True or False switches a template that can think; None is True.
        variables: further names that the template knows, as ``ChatTemplate.render`` takes them.
        messages: the turns so far, the system prompt not among them.
        stats: of every answer so far.
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
        draft: str | Path | None = None,
        *,
        template: str | None = None,
        system: str | None = None,
        thinking: bool | None = None,
        sampling: Sampling | None = None,
        variables: Mapping | None = None,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """A conversation with a model that is loaded for it; use it in a ``with`` block, or ``close`` it. ``options`` as of ``load``.

        Raises:
            PyspecError: the model cannot be loaded.
            TemplateError: the template is wrong.
        """
        session = load(target, draft, **options)
        try:
            return cls(session, template, system, thinking, sampling, variables)
        except BaseException:
            session.close()
            raise

    @property
    def continues(self) -> bool:
        """Whether the turns are one running text."""
        return self.template.source == CONTINUE

    def answer(self, text: str, max_tokens: int | None = None) -> str:
        """The whole answer to ``text``; errors as of ``ask``."""
        return "".join(event.text for event in self.ask(text, max_tokens))

    def ask(
        self,
        text: str,
        max_tokens: int | None = None,
        *,
        interrupted: Callable[[], bool] | None = None,
        prefill_progress: Callable[[int, int], None] | None = None,
    ) -> Generator[StepEvent, None, None]:
        """Yields the answer to ``text`` as it comes; the last event has the final statistics.

        Raises:
            TemplateError: the template refuses the conversation.
            ContextError: it does not fit the context.
            SamplingError: as ``Session.steps``.
        """
        if max_tokens is None and self.continues:
            max_tokens = CONTINUE_TOKENS
        turn = {"role": "user", "content": text}
        ids = self.template.encode(self.session.tokenizer, self._messages(turn), thinking=self.thinking, variables=self.variables)
        if not ids:
            raise TemplateError("the chat template makes no text of this conversation; use another one")
        answer, stats = "", self.session.new_stats()
        events = self.session.steps(
            ids, max_tokens, sampling=self.sampling, stop=CONTINUE_STOP if self.continues else (), append=True,
            interrupted=interrupted, prefill_progress=prefill_progress, stats=stats,
        )  # fmt: skip
        failed = False
        try:
            with closing(events):
                for event in events:
                    answer += event.text
                    yield event
        except PyspecError:
            failed = True
            raise
        finally:  # an answer that was stopped counts as far as it came
            if stats.emitted and not failed:
                self.messages += [turn, {"role": "assistant", "content": answer}]
                self.stats.append(stats)

    def _messages(self, turn: dict) -> list[dict]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages, turn]

    def reset(self) -> None:
        """Forgets the turns. The system prompt stays."""
        self.messages, self.stats = [], []

    def close(self) -> None:
        """Closes the session, which is nobody else's where ``load`` has made the chat."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def chat_template(session: Session, source: str | None = None, otherwise: str = CONTINUE) -> tuple[ChatTemplate, str]:
    """A template and where it is from, in words.

    Args:
        source: Jinja text, or the name of one of the file's templates; None for the one that it uses.
        otherwise: for files that have none.

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
    how = ": your lines and its answers are one running text" if otherwise == CONTINUE else ": it is spoken to in ChatML"
    return ChatTemplate(otherwise), f"{file.path.name} has {has}{how}; `chat_template` gives it one"


def tool_template(session: Session) -> ChatTemplate | None:
    """The file's template for conversations with tools, if it has another one for them. Raises TemplateError."""
    found = templates(session.target.file)
    return ChatTemplate.from_gguf(session.target.file, found[TOOL_USE]) if TOOL_USE in found and len(found) > 1 else None
