"""A conversation over a loaded pair: messages in, events out, the caches kept from turn to turn."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from .errors import PyspecError, TemplateError
from .events import StepEvent
from .session import Session
from .spec.sampling import Sampling
from .spec.stats import Stats
from .text.template import KEY, ChatTemplate

CONTINUE = "{% for m in messages %}{{ m.content }}{% if not loop.last or m.role != 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
"""For models that were never taught to chat: all turns are one running text, which the model goes on with."""
CONTINUE_STOP, CONTINUE_TOKENS = ("\n\n\n",), 256  # such models rarely end by themselves


@dataclass
class Chat:
    """Use ``ask`` for a turn. A turn that fails, or is stopped before its answer begins, leaves the conversation as it was.

    Attributes:
        session: borrowed; other generations in between are allowed, and cost the reuse of the caches.
        template: of the conversation; ``chat_template`` finds the model's.
        system: the first message, if any.
        thinking: True or False switches a template that can think; None is True.
        variables: further names that the template knows, as ``ChatTemplate.render`` takes them.
        messages: the turns so far, the system prompt not among them.
        stats: of every answer so far.
    """

    session: Session
    template: ChatTemplate
    system: str | None = None
    thinking: bool | None = None
    sampling: Sampling | None = None
    variables: Mapping | None = None
    messages: list[dict] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)

    @property
    def continues(self) -> bool:
        """Whether the turns are one running text."""
        return self.template.source == CONTINUE

    def ask(
        self,
        text: str,
        max_tokens: int | None = None,
        *,
        interrupted: Callable[[], bool] = lambda: False,
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


def chat_template(session: Session, source: str | None = None) -> tuple[ChatTemplate, str]:
    """A template and where it is from, in words: ``source`` if it is given, else the model file's, else CONTINUE.

    Raises:
        TemplateError: it is wrong.
    """
    file = session.target.file
    if source == "":
        raise TemplateError("the chat template that was given is empty")
    if source is not None:
        return ChatTemplate.from_gguf(file, source), "the template that was given"
    if KEY in file.metadata:
        return ChatTemplate.from_gguf(file), f"the template of {file.path.name}"
    return ChatTemplate(
        CONTINUE
    ), f"{file.path.name} has no chat template: your lines and its answers are one running text; --chat-template-file gives it one"
