"""pyspec chat"""

import json
import os
import sys
from contextlib import ExitStack, closing, suppress
from io import TextIOWrapper
from pathlib import Path

import click

from ..api import load
from ..chat import CONTINUE_TOKENS, Chat, chat_template
from ..engine.prompt import Picture
from ..engine.stats import Stats
from ..errors import ContextError, PyspecError
from ..text.renderer import RENDERER
from ..vision.messages import NO_ENCODER, PICTURE
from ..vision.pictures import picture_file
from .help import PATH, GroupedCommand, flag, option
from .main import EXIT_ERROR, EXIT_INTERRUPT
from .options import (
    LIMIT,
    TEMPLATE,
    TokenLimit,
    argument_text,
    check_prefix,
    escape_option,
    in_options,
    loading,
    template_variables,
    text_of,
    unescaped,
    with_options,
)  # fmt: skip
from .report import answer_line, configuration_line, footer
from .run import check_place, write_atomically
from .sampling import sampling_options, take_sampling
from .terminal import Interrupt, TextOut, progress_line, say

HELP = """/stats           speed and acceptance of the last answer, and of the conversation
/reset           forget the conversation; the system prompt stays
/system [TEXT]   show the system prompt, or set it from the next answer on; /system - removes it
/think on|off    thinking mode from the next answer on
/image FILE      a picture for the next question; several in a row
/audio FILE      a sound, likewise
/save FILE       write the conversation as JSON
/exit            end; so does Ctrl-D
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer; twice, the chat. Begin with a space to say something that starts with /."""

_LONG = 512  # tokens; computing fewer takes too little time to show a bar


@click.command("chat", cls=GroupedCommand, words="questions are typed, or piped in, a line each")
@loading
@option("-p --prompt question", "First question; further ones are typed.")
@escape_option
@flag("-st --single-turn", "End after the first answer.")
@option("-sys --system-prompt system", "System prompt.")
@option("-sysf --system-prompt-file system_file", "File with the system prompt.", type=PATH)
@option("--think/--no-think thinking", "Thinking mode, where the template has one. Default: on, as in llama-server.", default=None)
@option("--chat-template template", "Chat template instead of the model file's.", metavar="JINJA")
@with_options(TEMPLATE)
@option(LIMIT, f"Tokens per answer; -1 for no limit but the context. Default: until the end token; {CONTINUE_TOKENS} if the model has no chat template.",
        type=TokenLimit(1))  # fmt: skip
@sampling_options
@flag("-q --quiet", "Answers and errors only.")
def command(target, draft, options, question, escaped, single_turn, system, system_file, thinking, template, template_file, variables,
            max_tokens, quiet, **more):  # fmt: skip
    """Talks with a model: a line is a turn. Answers go to stdout; everything else goes to stderr. /help lists the commands.

    The caches are kept from turn to turn. Lines can be piped in; the exit code is then 1 if one of them failed.
    """
    wanted = take_sampling(more)
    check_prefix(options)
    source = text_of("chat_template", template, template_file)
    system = text_of("system_prompt", system, system_file)
    question = question if question is None else argument_text(question)
    if escaped:
        system, question = (text and unescaped(text) for text in (system, question))
    given = template_variables(variables)
    if thinking is None and isinstance(given.get("enable_thinking"), bool):
        thinking = given["enable_thinking"]
    RENDERER.start()  # it is ready by the time the model is
    with progress_line() as progress:
        session = load(target, draft, options, progress)
    with session:
        template, origin = chat_template(session, source)
        sampling, notes = wanted.sampling(session.target.file)
        chat = Chat(session, template, system, thinking, sampling, given)
        desk = _Desk(chat, max_tokens, quiet, question, single_turn)
        if (sampler := session._sampler(sampling, False)) is not None:  # a wrong grammar is said before the first turn
            sampler.close()
        if thinking is not None and not template.can_think:
            raise PyspecError(f"--{'' if thinking else 'no-'}think was given, but the chat template has no thinking mode; leave it out")
        desk.note(configuration_line(session.configuration(), None, sampling.describe(), notes))
        desk.note(f"chat: {in_options(origin)}; thinking {desk.thinking()}; /help lists the commands")
        sys.exit(desk.run())


class _Desk:
    """Reads lines, runs commands and shows answers."""

    def __init__(self, chat: Chat, max_tokens: int | None, quiet: bool, first: str | None = None, once: bool = False):
        self.first, self.once = first, once
        self.chat, self.max_tokens, self.quiet = chat, max_tokens, quiet
        self.out = TextOut()
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        self.failed, self.pictures = False, list[bytes]()  # of the next question
        if self.interactive:
            if isinstance(sys.stdin, TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")
            with suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input())

    def note(self, text: str) -> None:
        if not self.quiet:
            say(text)

    def run(self) -> int:
        """Turn after turn; returns the exit code."""
        armed = False  # a second Ctrl-C in a row ends the chat
        while True:
            try:
                line, self.first = self.first or self._read(), None
                if line is None:
                    return self._code()
                armed = False
                if line.startswith("/"):
                    if self._command(line):
                        return self._code()
                elif line.strip():
                    armed = True
                    armed = self._answer(line)
                if armed and not self.interactive:
                    return EXIT_INTERRUPT
                if self.once and self.chat.stats:
                    return self._code()
            except PyspecError as error:
                armed, self.failed = False, True
                hint = "; /reset forgets the conversation" if isinstance(error, ContextError) and self.chat.messages else ""
                say(f"pyspec: {in_options(str(error))}{hint}")
                if self.once:
                    return EXIT_ERROR
            except KeyboardInterrupt:
                if armed or not self.interactive:
                    return EXIT_INTERRUPT
                armed = True
                say("\n(Ctrl-C again, or /exit, ends the chat)")

    def _code(self) -> int:
        return EXIT_ERROR if self.failed and not self.interactive else 0

    # -- lines

    def _read(self) -> str | None:
        """The next line, with those that it goes on in; None at the end of the input."""
        parts: list[str] = []
        while True:
            line = self._line("> " if not parts else "  ")
            if line is None:
                return "\n".join(parts) if parts else None
            if not line.endswith("\\"):
                return "\n".join([*parts, line])
            parts.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        if sys.stdin is None:
            return None
        if not self.interactive:
            line = sys.stdin.buffer.readline()
            return line.decode("utf-8", "replace").rstrip("\r\n") if line else None
        try:
            if self.out.is_terminal:
                return input(prompt)
            click.echo(prompt, nl=False, err=True)
            return input()
        except EOFError:
            self.note("")
            return None

    def _answer(self, text: str) -> bool:
        """Shows the answer; returns whether it was stopped by Ctrl-C."""
        last, progress = "", None
        stats: Stats | None = None

        def prefilled(done: int, total: int) -> None:
            nonlocal progress
            if progress is None and total - done > _LONG:
                progress = bars.enter_context(progress_line())
            if progress is not None:
                progress("prefill", done, total)

        with Interrupt() as stopped, ExitStack() as bars:
            pictures, self.pictures = self.pictures, []
            events = self.chat.ask(text, self.max_tokens, pictures=pictures, interrupted=stopped, prefill_progress=prefilled)
            try:
                with closing(events):
                    for event in events:
                        bars.close()
                        self.out.write(event.text)
                        last, stats = event.text or last, event.stats
            finally:  # an error's sentence begins a line too
                if (last or stats) and not last.endswith("\n"):
                    self.out.write("\n")
        assert stats is not None  # the last event has them
        if stats.stop_reason == "interrupt":
            kept = "" if stats.emitted else " before the answer began, and the question is forgotten"
            self.note(f"(stopped{kept}; Ctrl-C again, or /exit, ends the chat)")
        elif stats.stop_reason == "context":
            self.note(f"(the context of {self.chat.session.runner.options.n_ctx} tokens is full: /reset begins anew, -c makes it larger)")
        self.note(answer_line(stats))
        return stopped.asked  # also where the answer ended before it was polled

    # -- commands

    def _command(self, line: str) -> bool:
        """Runs a command; returns whether the chat ends."""
        name, _, rest = line.strip().partition(" ")
        commands = {
            "/stats": self._stats,
            "/reset": self._reset,
            "/system": self._system,
            "/think": self._think,
            "/save": self._save,
            "/image": self._attach,
            "/audio": self._attach,
        }
        if name in ("/exit", "/quit"):
            return True
        if name == "/help":
            say(HELP)
        elif name in commands:
            commands[name](rest.strip())
        else:
            raise PyspecError(f"there is no command {name}; /help lists them, and a space before it makes it text")
        return False

    def _stats(self, rest: str) -> None:
        if not self.chat.stats:
            say("no answer yet")
            return
        stats, session = self.chat.stats, self.chat.session
        say(footer(stats[-1], (session.costs or {}).get(1)).lstrip())
        names = "drafted", "matched", "emitted", "prompt_tokens", "reused_tokens"
        drafted, matched, emitted, prompts, reused = (sum(getattr(s, name) for s in stats) for name in names)
        used = f"{session.runner.cursor.committed} of {session.runner.options.n_ctx} tokens of context used"
        text = f"{len(stats)} answers, {emitted} tokens, {matched} of {drafted} drafts accepted"
        say(f"conversation: {text}, {reused} of {prompts} prompt tokens were in the caches; {used}")

    def _reset(self, rest: str) -> None:
        self.chat.reset()
        say("the conversation is forgotten" + ("; the system prompt stays" if self.chat.system else ""))

    def _system(self, rest: str) -> None:
        if rest:
            self.chat.system = None if rest == "-" else rest
        say(f"system prompt: {self.chat.system}" if self.chat.system else "no system prompt")

    def _think(self, rest: str) -> None:
        if rest and rest not in ("on", "off"):
            raise PyspecError(f"/think {rest} is unknown; use /think on or /think off")
        if rest and not self.chat.template.can_think:
            raise PyspecError("the chat template has no thinking mode")
        if rest:
            self.chat.thinking = rest == "on"
        say(f"thinking {self.thinking()}")

    def thinking(self) -> str:
        if not self.chat.template.can_think:
            return "not known to the template"
        return {None: "on, the default", True: "on", False: "off"}[self.chat.thinking]

    def _attach(self, rest: str) -> None:
        if not rest:
            raise PyspecError("/image and /audio need the name of a file")
        if (encoder := self.chat.session.encoder) is None:
            raise PyspecError(NO_ENCODER)
        data = picture_file(Path(os.path.expanduser(rest)))
        rows = sum(part.rows for part in encoder.encode(data) if isinstance(part, Picture))
        self.pictures.append(data)
        say(f"{rest} takes {rows} rows and stands before the next question")

    def _save(self, rest: str) -> None:
        if not rest:
            raise PyspecError("/save needs the name of a file")
        chat, path = self.chat, Path(os.path.expanduser(rest))
        content = {
            "target": chat.session.target.file.path.name,
            "drafter": chat.session.drafter.title if chat.session.drafter is not None else None,
            "sampling": chat.sampling.describe() if chat.sampling is not None else None,
            "seeds": [s.seed for s in chat.stats],
            "thinking": chat.thinking is not False if chat.template.can_think else None,
            "messages": [_without_bytes(message) for message in chat.as_messages()],
        }
        check_place(path, "conversation")
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n", "conversation")
        say(f"{len(chat.messages) // 2} turns written to {rest}")


def _without_bytes(message: dict) -> dict:
    """A message as JSON: of its pictures only that they were there."""
    content = message.get("content")
    return (
        message | {"content": [{"type": PICTURE} if part["type"] == PICTURE else part for part in content]}
        if isinstance(content, list)
        else message
    )
