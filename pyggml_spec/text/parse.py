"""Streaming parser of model output into reasoning, content and tool calls. The result does not depend on how the text is split.

reasoning --</think>--> content <--> call          one text with markers
header --<|message|>--> reasoning, content or call --<|end|>--> header         channels: gpt-oss, muse-glimmer

Markers and notations are those of a ``Format``. Calls of unknown tools, and truncated calls, stay text.
"""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from . import values
from .formats import BARE, GEMMA, GEMMA_QUOTE, JSON, NAMED, PYTHON, Calls, Channels, Format, Tags
from .python_calls import python_calls
from .stream import begins_at
from .values import Call

BoolReader = Generator[None, None, bool]
TextReader = Generator[None, None, str | None]

_MOST_HEADER = 512  # characters
_MOST_ENDS = 64  # markers in the texts of a call, each of which could be its end
_NAME = re.compile(r"\s*[^\s<{]*")
_PLAIN, _TEXT = re.compile(r"[\s\w.+:,-]*"), re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """New output: content, reasoning, or a call."""

    content: str = ""
    reasoning: str = ""
    call: Call | None = None


class Parser:
    """Call ``push`` with text, then ``finish``.

    Args:
        form: the model's format.
        inside: "reasoning" or "content" if the prompt opens it, else "".
        continued: the prompt contains the start of the text, so leading whitespace counts.
        tools: tools that may be called, with their descriptions.
        reasoning: False leaves reasoning in the content.
    """

    def __init__(
        self, form: Format = BARE, *, inside: str = "", continued: bool = False, tools: Sequence[dict] = (), reasoning: bool = True
    ) -> None:
        self.form = form
        self._tools = {t["function"]["name"]: t["function"] for t in tools}
        self._reasoning, self._inside, self._continued = reasoning, inside, continued
        self._pending, self._at = "", 0  # pending text, and how far it was read
        self._out: list[Piece] = []
        self._lead = False  # drop the whitespace that comes next
        self._blank, self._kind = "", ""  # whitespace emitted if text follows, and its kind
        self._final = self._cut = False
        self._moves = self._marked() if form.channels is None else self._messages(form.channels)

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        return self._run()

    def finish(self, cut: bool = False) -> list[Piece]:
        """Remaining output. ``cut``: the text was truncated by a limit, so an unfinished call is none."""
        self._final, self._cut = True, cut
        return self._run()

    def _run(self) -> list[Piece]:
        next(self._moves, None)
        if self._final and self._blank and self._kind == "content":
            self._out.append(Piece(content=self._blank))
        out, self._out = self._out, []
        return out

    # -- state machine; generators yield to wait for more text, and continue when there is none

    def _marked(self) -> Generator[None, None, None]:
        think = self.form.think if self._reasoning else None
        if self._inside == "reasoning":
            if think is not None:
                yield from self._think(fresh=not self._continued)
            elif not self._continued:
                self._emit("content", self.form.thinking[0])
        elif not self._inside:
            if think is not None and (yield from self._next(think[0])):
                self._drop()
                yield from self._think()
            elif self.form.bare is not None and self._tools:
                yield from self._bare(self.form.bare)
        yield from self._content()

    def _think(self, fresh: bool = True) -> Generator[None, None, None]:
        """Open reasoning and its end."""
        end = self.form.think[1]
        if fresh:
            self._new_section()
        begins = self._begins() if self.form.calls_think else {}
        while found := (yield from self._until("reasoning", (end, *begins))):
            if found == end or (yield from self._try_call(found, begins[found], "reasoning")):
                break
        self._new_section()

    def _content(self) -> Generator[None, None, None]:
        begins, form = self._begins(), self.form
        reopen, strays = (form.think[:1], form.strays) if form.interleaved and self._reasoning else ((), ())
        strays += form.frame
        ends = {call.section[1] for call in form.calls if call.section and not call.sectioned and self._tools}
        while found := (yield from self._until("content", (*begins, *reopen, *strays, *ends))):
            if found in begins:
                yield from self._try_call(found, begins[found], "content")
            elif found in reopen:
                yield from self._think()

    def _messages(self, channels: Channels) -> Generator[None, None, None]:
        while True:
            header = None if self._inside else (yield from self._header(channels))
            kind, self._inside = self._inside or "content", ""
            if header is not None:
                address = channels.address(header)
                kind = "reasoning" if address in channels.reasoning else "content" if address in channels.content else address
            written = (header or "") + (channels.message if header is not None else "")
            name, raw = kind.removeprefix(self.form.calls[0].prefix), kind == "reasoning" and not self._reasoning
            if kind in ("reasoning", "content"):
                if header is not None and not raw:
                    self._new_section()
                self._emit("content", written if raw else "")
            elif name in self._tools:
                if (yield from self._message_call(name, written, channels)):
                    continue
                kind = "content"
            else:  # as in llama-server, calls of unknown tools are dropped
                kind = "content" if self._tools else ""
                self._emit(kind, written)
            end = yield from self._until("content" if raw else kind, channels.ends)
            self._emit("content", end if raw and end == channels.ends[0] else "")
            if self._final and not self._pending:
                return

    def _header(self, channels: Channels) -> TextReader:
        """The next header, without its delimiters; None if there is none."""
        heads = (channels.start, "<|channel|>", channels.message, "to=")
        while True:
            text = self._pending.lstrip()
            begun = text.startswith(heads)
            at = self._pending.find(channels.message) if begun else -1
            if at >= 0:
                header, self._pending = self._pending[:at], self._pending[at + len(channels.message) :]
                return header.replace(channels.start, "")
            if begun and self._final and len(self._pending) <= _MOST_HEADER:
                self._pending = ""  # truncated
            if self._final or len(self._pending) > _MOST_HEADER or not (begun or any(head.startswith(text) for head in heads)):
                return None
            yield

    def _message_call(self, name: str, header: str, channels: Channels) -> BoolReader:
        """A message to a tool: its text is the arguments, or a section of calls."""
        (call,) = self.form.calls
        if not call.section:
            return (yield from self._call(call, "", "content", name, channels.ends, header))
        if (yield from self._next(call.section[0])) is None:
            self._emit("content", header)
        else:
            self._drop()
            yield from self._section(call, call.section[0], "content", header)
        return False

    # -- calls

    def _begins(self) -> dict[str, list[Calls]]:
        """Markers that start a call, and their notations."""
        out: dict[str, list[Calls]] = {}
        for call in self.form.calls if self._tools else ():
            for marker in ([call.section[0]] if call.section else []) + ([] if call.sectioned else [call.begin]):
                out.setdefault(marker, []).append(call)
            if call.unopened:
                out[call.name[0]] = [call]
        return out

    def _try_call(self, marker: str, calls: list[Calls], kind: str) -> BoolReader:
        """After ``marker``: reads a call and returns whether there was one; otherwise it is text of ``kind``."""
        first = calls[0]
        if first.section and marker == first.section[0]:
            return (yield from self._section(first, marker, kind))
        if marker != first.begin:  # a call without its begin marker
            self._pending = marker + self._pending
            return (yield from self._call(first, "", kind))
        return (yield from self._call((yield from self._notation(calls)), marker, kind))

    def _notation(self, calls: list[Calls]) -> Generator[None, None, Calls]:
        """Which of ``calls`` with the same begin marker follows."""
        if len(calls) == 1:
            return calls[0]
        heads = {"{" if call.arguments == NAMED else call.name[0]: call for call in calls}
        found = yield from self._next(*(head for head in heads if head))
        self._at = 0
        return heads[found or ""] if found or "" in heads else calls[0]

    def _section(self, call: Calls, begin: str, kind: str, header: str = "") -> BoolReader:
        """Calls of the section opened by ``begin``; returns whether there was one."""
        prefix, called = header + begin, False
        while (found := (yield from self._next(call.begin, call.section[1]))) == call.begin:
            self._drop()
            notation = yield from self._notation([c for c in self.form.calls if c.section == call.section])
            called |= yield from self._call(notation, call.begin, kind, prefix=prefix)
            prefix = ""
        if not called:
            self._emit(kind, prefix + (found or ""))
        self._drop()
        return called

    def _call(self, call: Calls, begin: str, kind: str, name: str = "", ends: tuple[str, ...] = (), prefix: str = "") -> BoolReader:
        """One call after ``begin``; ``ends``: further end markers. If it is not a call, its text is emitted as ``kind`` after ``prefix``."""
        self._at = 0
        made = yield from self._read(call, name)
        if made and (yield from self._closed(call, ends, begin)):
            self._out += [Piece(call=one) for one in made]
            self._new_section()
            self._drop()
            return True
        if self._final:
            self._at = len(self._pending)
        self._emit(kind, prefix + begin + self._pending[: self._at])
        self._drop()
        return False

    def _read(self, call: Calls, name: str) -> Generator[None, None, list[Call]]:
        """Name and arguments of a call, or of those of a list; ``name``: if known already."""
        if call.arguments == NAMED:
            text = yield from self._json("[" if call.listed else "{")
            made = self._named(text, call) if text is not None else []
        elif call.arguments == PYTHON:
            made = yield from self._python(call.end)
        else:
            one = yield from self._read_one(call, name)
            made = [one] if one is not None else []
        return made

    def _python(self, end: str) -> Generator[None, None, list[Call]]:
        """The calls of a list before ``end``, which may stand in their texts."""
        start = self._at
        for _ in range(_MOST_ENDS):
            closed = (yield from self._to(end)) is not None
            if not closed and self._cut:
                break
            stop = self._at - len(end) if closed else len(self._pending)
            try:
                found = python_calls(self._pending[start:stop])
            except ValueError:
                if not closed:
                    break
                continue
            self._at = stop
            made = [values.call(name, arguments) if name in self._tools else None for name, arguments in found]
            return [one for one in made if one is not None] if None not in made else []
        return []

    def _read_one(self, call: Calls, name: str) -> Generator[None, None, Call | None]:
        """A call whose name stands before its arguments."""
        if not name:
            found = yield from self._name(call)
            if found is None or (call.head and (yield from self._to(call.head)) is None):
                return None
            name = found
        if isinstance(call.arguments, Tags):
            return (yield from self._tagged(call, call.arguments, name))
        text = yield from (self._json() if call.arguments == JSON else self._quoted(call.end))
        tool = self._tools.get(name)
        if text is None or tool is None:
            return None
        try:
            return values.call(name, (values.gemma if call.arguments == GEMMA else values.loads)(text))
        except ValueError:
            return None

    def _named(self, text: str, call: Calls) -> list[Call]:
        """The calls that are in ``text`` as JSON; none if one of them is no call."""
        try:
            value = values.loads(text)
            made = [self._of_json(one, call) for one in (value if call.listed else [value])]
        except (ValueError, TypeError, AttributeError):
            return []
        return [one for one in made if one is not None] if None not in made else []

    def _of_json(self, value: dict, call: Calls) -> Call | None:
        if call.keys:
            name, arguments = value.get(call.keys[0]), value.get(call.keys[1], value.get("parameters", {}))
        else:
            ((name, arguments),) = value.items()
        arguments = values.loads(arguments) if isinstance(arguments, str) else arguments
        return values.call(str(name), arguments) if name in self._tools else None

    def _name(self, call: Calls) -> TextReader:
        before, after = call.name
        if before and (yield from self._next(before)) is None:
            return None
        if after:
            text = yield from self._to(after)
        else:  # up to a character that no name contains
            while (match := _NAME.match(self._pending, self._at)) and match.end() == len(self._pending) and not self._final:
                yield
            text = match[0] if match is not None else ""
            self._at += len(text)
        if text is None:
            return None
        text = text.strip()
        for name in (text, re.sub(f"{call.index}$", "", text)) if call.index else (text,):
            for short in (name, name.removeprefix(call.prefix)):
                if short in self._tools:
                    return short
        return None

    def _tagged(self, call: Calls, tags: Tags, name: str) -> Generator[None, None, Call | None]:
        tool, arguments = self._tools[name], {}
        schema = tool.get("parameters")
        known = schema.get("properties") if isinstance(schema, dict) else None
        follows, before = tuple(marker for marker in (tags.name[0], call.close, call.end) if marker), self._at
        while (yield from self._next(*follows)) == tags.name[0]:
            key = yield from self._to(tags.name[1])
            if key is None or (tags.value and (yield from (self._to if tags.attributes else self._next)(tags.value)) is None):
                return None
            text = yield from self._value(tags, follows, key)
            if text is None:
                return None
            key = key.strip()
            wanted = known.get(key, True) if isinstance(known, dict) else True
            arguments[key] = values.nested(text, tags.nested, wanted, schema) if tags.nested else values.typed(text, wanted, schema)
            before = self._at
        self._at = before
        return values.call(name, arguments)

    def _value(self, tags: Tags, follows: tuple[str, ...], name: str) -> TextReader:
        """A value up to its end tag; an end tag after which the call does not continue is part of the value."""
        start, end = self._at, tags.end.format(name) if tags.nested else tags.end
        while (yield from self._to(end)) is not None:
            after = self._at
            inside = self._pending[start : after - len(end)]
            if tags.nested and inside.count(name.join(tags.name)) > inside.count(end):  # the end of a part with the same name
                continue
            if (yield from self._next(*follows)) is not None or (self._final and not self._pending[after:].strip()):
                self._at = after
                return inside.removeprefix("\n").removesuffix("\n") if tags.lines else inside
            self._at = after
        return None

    def _closed(self, call: Calls, ends: tuple[str, ...], begin: str) -> BoolReader:
        """Whether the call ends here: at its markers, at another call where they may be missing, or at the end of the text."""
        loose = call.loose or (call.close and not begin)
        if call.close and (yield from self._next(call.close)) is None:
            return self._ended()
        markers = [marker for marker in (call.end, *ends) if marker]
        if markers and (yield from self._next(*markers)) is None:
            after = self._pending[self._at :].strip()
            return bool(loose and after and not any(m.startswith(after) for m in markers)) or self._ended()
        return True

    def _ended(self) -> bool:
        """Whether the model ended its text here."""
        return self._final and not self._cut and not self._pending[self._at :].strip()

    def _bare(self, marker: str) -> Generator[None, None, None]:
        """An answer that consists of JSON calls only."""
        made: list[Call] = []
        if (yield from self._next(marker)) is None:
            self._at = 0
        while (yield from self._next("{")) is not None:
            self._at -= 1
            text = yield from self._json()
            found = self._named(text, self.form.calls[0]) if text is not None else []
            if not found:
                break
            made += found
            if (yield from self._next(";")) is None and self._ended():
                self._out += [Piece(call=one) for one in made]
                self._drop()
        self._at = 0

    # -- reading ahead without output; False or None: no match

    def _next(self, *markers: str) -> TextReader:
        """Which of ``markers`` follows, after whitespace; consumed."""
        while True:
            text = self._pending[self._at :].lstrip()
            found = max((m for m in markers if text.startswith(m)), key=len, default=None)
            if found is not None and not self._final and any(len(m) > len(found) and m.startswith(text) for m in markers):
                yield
                continue
            if found is not None:
                self._at = len(self._pending) - len(text) + len(found)
                return found
            if self._final or (text and not any(m.startswith(text) for m in markers)):
                return None
            yield

    def _to(self, marker: str) -> TextReader:
        """The text before ``marker``; both are consumed."""
        start = scan = self._at
        while (at := self._pending.find(marker, scan)) < 0:
            scan = max(start, len(self._pending) - len(marker) + 1)
            if self._final:
                return None
            yield
        self._at = at + len(marker)
        return self._pending[start:at]

    def _json(self, opening: str = "{") -> TextReader:
        """The text of the next JSON object or array; None at the first character that JSON does not allow outside of strings."""
        if (yield from self._next(opening)) is None:
            return None
        start, depth, quoted = self._at - 1, 1, False
        while True:
            match = (_TEXT if quoted else _PLAIN).match(self._pending, self._at)
            self._at = match.end() if match is not None else self._at
            mark = self._pending[self._at : self._at + 1]
            if mark == '"':
                quoted = not quoted
            elif mark and mark in "{}[]" and not quoted:
                depth += 1 if mark in "{[" else -1
            elif (mark and not quoted) or self._final:
                return None
            else:
                yield
                continue
            self._at += 1
            if not depth:
                return self._pending[start : self._at]

    def _quoted(self, end: str) -> TextReader:
        """The text before ``end``, ignoring ``end`` inside Gemma 4's quotes."""
        start = scan = self._at
        quoted = False
        while True:
            found = [(at, m) for m in (GEMMA_QUOTE, *(() if quoted else (end,))) if (at := self._pending.find(m, scan)) >= 0]
            if found:
                at, marker = min(found)
                if marker == end:
                    self._at = at
                    return self._pending[start:at]
                quoted, scan = not quoted, at + len(marker)
                continue
            if self._final:
                self._at = len(self._pending)
                return self._pending[start:] if not self._cut else None
            scan = max(scan, len(self._pending) - max(len(end), len(GEMMA_QUOTE)) + 1)
            yield

    # -- output

    def _drop(self) -> None:
        """Discards what was read."""
        self._pending, self._at = self._pending[self._at :], 0

    def _new_section(self) -> None:
        """A new section starts: whitespace around it is dropped."""
        self._lead, self._blank = True, ""

    def _until(self, kind: str, markers: Sequence[str]) -> Generator[None, None, str]:
        """Emits text up to the first of ``markers`` (returned; "" at the end), or up to a possible start of one."""
        while True:
            found = min(((at, -len(m), m) for m in markers if (at := self._pending.find(m)) >= 0), default=None)
            at = found[0] if found is not None else len(self._pending)
            if not self._final:  # another marker may start earlier or be longer
                at = min(at, begins_at(self._pending, markers))
            self._emit(kind, self._pending[:at])
            self._pending = self._pending[at:]
            longer = [m for m in markers if found is not None and len(m) > len(found[2]) and m.startswith(self._pending)]
            if found is not None and found[0] == at and (self._final or not longer):
                self._pending = self._pending[len(found[2]) :]
                return found[2]
            if self._final:
                return ""
            yield

    def _emit(self, kind: str, text: str) -> None:
        """Emits text; trailing whitespace is held back where a marker may follow. Without ``kind`` nothing is emitted."""
        if not kind or not text:
            return
        text = self._blank + text
        if self._lead:
            text = text.lstrip()
        body = text.rstrip() if kind == "reasoning" or self._tools else text
        self._lead, self._blank, self._kind = self._lead and not text, text[len(body) :], kind
        if body:
            self._out.append(Piece(reasoning=body) if kind == "reasoning" else Piece(content=body))
