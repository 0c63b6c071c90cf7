"""Tool calls, read out of an answer's text as the model writes them: Qwen's XML in, names and JSON out.

What is read depends on the text alone, never on the pieces in which it comes. tooltypes.py says what JSON a
parameter's text becomes. docs/chat.md has the rules for what is malformed or cut.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lily.tooltypes import Parameters

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
LONGEST_NAME = 255  # characters; what is longer is prose
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.DOTALL)
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks to be called.

    id: str, made up for this call.  name: str.
    arguments: str, a JSON object; strings in it are, to the byte, what the model wrote.
    """

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments as a dict."""
        value: dict[str, Any] = json.loads(self.arguments)
        return value

    @property
    def message(self) -> dict[str, Any]:
        """The call as a message's tool_calls has it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call.

    index: int, which call of the answer it belongs to, from 0.
    id, name: str in a call's first piece, None in later ones.
    arguments: str, what comes next of the JSON.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class _Call:
    """The call that is being read. raw: its text so far, for as long as it may turn out to be none."""

    name: str
    raw: str
    keys: set[str] = field(default_factory=set)
    begun: bool = False  # whether it is handed out, so that there is no way back
    stray: str = ""  # what stands in it between the tags
    key: str = ""  # of the parameter that is being read
    value: list[str] = field(default_factory=list)  # its text, unless it is handed out as it comes
    fresh: bool = False  # whether the newline behind its tag is still to come


class CallReader:
    """Tells calls from text. All that push and finish return, joined, is the answer.

    closed: int, how many calls have come to their end.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Begin an answer that may call these functions, as check_tools returns them."""
        functions = [tool["function"] for tool in tools]
        self._parameters = {each["name"]: Parameters(each.get("parameters")) for each in functions}
        self.closed = 0
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the JSON
        self._left = ""  # what is not decided yet
        self._blank = ""  # white space that belongs to the text only if text follows
        self._line = ""  # the text's last line, as far as it is handed out
        self._fence = ""  # what opened the block of code that the text is in
        self._after_call = False  # whether there is no text behind the last call
        self._call: _Call | None = None
        self._ended = False  # whether the call's function is closed, and only its last tag may follow
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far; the last one's arguments may still be incomplete JSON."""
        return tuple(ToolCall(key, name, "".join(pieces)) for key, name, pieces in self._calls)

    @property
    def open(self) -> bool:
        """Whether a call is being read."""
        return self._call is not None

    def push(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Take text in; return the text and the pieces of calls that are certain with it."""
        self._left += text
        self._read(final=False)
        return self._take()

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Return what was held back when the answer ends here; a call that is open is closed."""
        self._read(final=True)
        if self._call is not None:
            self._cut(self._call)
        if not self._after_call:
            self._text.append(self._blank)
        self._blank = ""
        return self._take()

    def _take(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        text, deltas = "".join(self._text), tuple(self._deltas)
        self._text, self._deltas = [], []
        return text, deltas

    def _read(self, final: bool) -> None:
        going = True
        while going and self._left:
            if self._call is None:
                going = self._read_text(final)
            elif self._ended:
                going = self._read_end(final)
            elif self._call.key:
                going = self._read_value(self._call, final)
            else:
                going = self._read_tag(self._call, final)

    def _read_text(self, final: bool) -> bool:
        """Read text up to where a call begins; return whether to go on."""
        at = self._left.find("<")
        if at < 0:
            self._add_text(self._left)
            self._left = ""
            return False
        self._add_text(self._left[:at])
        self._left = self._left[at:]
        opening = self._opening(self._left)
        if opening is None and not final:
            return False
        if not opening:
            self._add_text("<")
            self._left = self._left[1:]
            return True
        name, length = opening
        self._call, self._ended = _Call(name, self._left[:length]), False
        self._left = self._left[length:]
        return True

    def _opening(self, text: str) -> tuple[str, int] | Literal[False] | None:
        """Return the name of the call that text begins with, and its tags' length; None if more will say.

        Not in a block of code, nor where a backtick stands before it: there a call is only spoken of. The
        outer tag may be left out, at the beginning of a line, before a function that there is.
        """
        if self._fence or _FENCE.match(self._line) or self._line.endswith("`"):
            return False
        start = 0
        bare = not OPEN.startswith(text[: len(OPEN)])
        if not bare:
            if len(text) < len(OPEN):
                return None
            start = _skip(text, len(OPEN))
        found = _named(text, start, _FUNCTION)
        if not found:
            return found
        if bare and (self._line.strip() or found[0] not in self._parameters):
            return False
        return found

    def _add_text(self, text: str) -> None:
        for piece in text.splitlines(keepends=True):
            bare = piece.rstrip()
            if bare:
                self._text.append(self._blank + bare)
                self._blank, self._after_call = piece[len(bare) :], False
            else:
                self._blank += piece
            self._line += piece
            if self._line.endswith("\n"):
                self._end_line()

    def _end_line(self) -> None:
        mark = _FENCE.match(self._line.rstrip("\n"))
        self._line = ""
        if mark and not self._fence:
            self._fence = mark[1]
        elif mark and mark[1].startswith(self._fence) and not mark[2].strip():
            self._fence = ""

    def _read_tag(self, call: _Call, final: bool) -> bool:
        """Read up to the next tag inside a call; return whether to go on."""
        at = self._left.find("<")
        call.stray += self._left if at < 0 else self._left[:at]
        self._left = "" if at < 0 else self._left[at:]
        if at < 0:
            return False
        parameter = _named(self._left, 0, _PARAMETER)
        if parameter:
            key, length = parameter
            self._left = self._left[length:]
            self._begin_value(call, key)
            return True
        for tag in (_END_FUNCTION, CLOSE):
            if self._left.startswith(tag):
                self._left = self._left[len(tag) :]
                self._end_call(call)
                self._ended = tag == _END_FUNCTION
                if not self._ended:
                    self._call = None
                return True
        if self._left.startswith(OPEN):  # the next call, while this one is open
            self._end_call(call)
            self._call = None
            return True
        if not final and (parameter is None or _may_become(self._left, (_END_FUNCTION, CLOSE, OPEN))):
            return False
        call.stray += "<"
        self._left = self._left[1:]
        return True

    def _read_end(self, final: bool) -> bool:
        """Read what closes a call behind its function; return whether to go on."""
        at = _skip(self._left, 0)
        rest = self._left[at:]
        if not final and _may_become(rest, (CLOSE,)):
            return False
        self._call = None
        if rest.startswith(CLOSE):
            self._left = rest[len(CLOSE) :]
        return True

    def _begin_value(self, call: _Call, key: str) -> None:
        self._begin_call(call)
        self._give_stray(call)
        parameters = self._parameters.get(call.name, Parameters(None))
        call.key, call.value, call.fresh = key, [], True
        if key in call.keys:  # said twice: the first one holds
            return
        self._give(f"{', ' if call.keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        if parameters.plain(key):
            self._give('"')

    def _read_value(self, call: _Call, final: bool) -> bool:
        """Read a parameter's value up to its end; return whether to go on."""
        if call.fresh:
            # One newline on either side is the format's.
            self._left = self._left.removeprefix("\n")
            call.fresh = False
            if not self._left:
                return False
        at = self._left.find("<")
        while at >= 0:
            length = self._end_of_value(call, at, final)
            if length != 0:
                break
            at = self._left.find("<", at + 1)
        else:
            at, length = len(self._left), None
        if length is None and final:
            return False
        edge = at - 1 if at > 0 and self._left[at - 1] == "\n" else at
        self._add_value(call, self._left[:edge])
        if length is None:
            self._left = self._left[edge:]
            return False
        self._left = self._left[at + length :] if length > 0 else self._left[at:]
        self._end_value(call)
        return True

    def _end_of_value(self, call: _Call, at: int, final: bool) -> int | None:
        """Return the length of the tag that ends a value at a "<"; 0 if none does, None if more will say.

        -1 for one that is missing: the next parameter's tag, or the call's end, stands in its place. A tag
        that nothing of a call follows belongs to the value: it may be about XML.
        """
        text = self._left
        for tag, followers in (
            (_END_PARAMETER, (_PARAMETER, _END_FUNCTION, CLOSE, OPEN)),
            (_END_FUNCTION, (CLOSE, OPEN)),
            (CLOSE, (OPEN,)),
        ):
            if not text.startswith(tag, at):
                continue
            rest = text[_skip(text, at + len(tag)) :]
            undecided = _may_become(rest, followers)
            if rest.startswith(followers) or (final and undecided):
                return len(tag) if tag == _END_PARAMETER else -1
            return None if undecided else 0
        rest = text[at:]
        if _may_become(rest, (_END_PARAMETER, _END_FUNCTION, CLOSE)):
            return None if not final else 0
        if at == 0 or text[at - 1] != "\n":
            return 0
        found = _named(text, at, _PARAMETER)
        if found is None and not final:
            return None
        parameters = self._parameters.get(call.name)
        known = found and parameters and found[0] in parameters.names and found[0] not in call.keys
        return -1 if known and found and found[0] != call.key else 0

    def _add_value(self, call: _Call, text: str) -> None:
        parameters = self._parameters.get(call.name, Parameters(None))
        if call.key in call.keys or not text:
            return
        if parameters.plain(call.key):
            self._give(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            call.value.append(text)

    def _end_value(self, call: _Call) -> None:
        parameters = self._parameters.get(call.name, Parameters(None))
        if call.key not in call.keys:
            call.keys.add(call.key)
            plain = parameters.plain(call.key)
            self._give('"' if plain else parameters.to_json(call.key, "".join(call.value)))
        call.key = ""

    def _begin_call(self, call: _Call) -> None:
        if call.begun:
            return
        call.begun = True
        # White space before a call is the format's.
        self._blank, self._line, self._after_call = "", "", True
        self._calls.append((f"call_{secrets.token_hex(12)}", call.name, []))
        key, name, _ = self._calls[-1]
        self._deltas.append(ToolCallDelta(len(self._calls) - 1, "", key, name))
        self._give("{")

    def _end_call(self, call: _Call) -> None:
        whole = None if call.begun else _object(call.stray)
        self._begin_call(call)
        if whole is None:
            self._give("}")
            self._give_stray(call)
        else:
            self._give(whole[1:])  # its arguments are written as JSON
        self.closed += 1

    def _give_stray(self, call: _Call) -> None:
        """Give what stands between a call's tags out as text: nothing that was written gets lost."""
        if call.stray.strip():
            self._text.append(call.stray.strip())
        call.stray = ""

    def _give(self, arguments: str) -> None:
        """Hand out a piece of the last call's JSON."""
        self._calls[-1][2].append(arguments)
        index = len(self._calls) - 1
        if self._deltas and self._deltas[-1].index == index:
            last = self._deltas.pop()
            self._deltas.append(ToolCallDelta(index, last.arguments + arguments, last.id, last.name))
        else:
            self._deltas.append(ToolCallDelta(index, arguments))

    def _cut(self, call: _Call) -> None:
        """End a call at the answer's end: with what it has, or as text if that is nothing."""
        if self._ended:
            return
        if not call.begun:
            self._text.append(self._blank + call.raw + call.stray + self._left)
            self._blank = ""
        else:
            if call.key:
                self._add_value(call, _without_part(self._left))
                self._end_value(call)
            elif call.stray.strip().startswith(("</", _PARAMETER)) or _may_become(
                call.stray.strip(), (_PARAMETER, OPEN)
            ):
                call.stray = ""  # part of a tag
            self._end_call(call)
        self._call, self._left = None, ""


def _skip(text: str, at: int) -> int:
    """Return where, from a place on, white space ends."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing at the least


def _may_become(text: str, tags: tuple[str, ...]) -> bool:
    """Return whether text is the beginning of a tag, or nothing yet."""
    return any(len(text) < len(tag) and tag.startswith(text) for tag in tags)


def _named(text: str, at: int, tag: str) -> tuple[str, int] | Literal[False] | None:
    """Return the name in a tag like <function=name> and where the tag ends; None if more will say."""
    if not text.startswith(tag, at):
        return None if tag.startswith(text[at:]) else False
    start = at + len(tag)
    end = text.find(">", start, start + LONGEST_NAME + 1)
    name = text[start : start + LONGEST_NAME + 1] if end < 0 else text[start:end]
    if "\n" in name or "<" in name or (end < 0 and len(name) > LONGEST_NAME):
        return False
    if end < 0:
        return None
    return (name.strip(), end + 1) if name.strip() else False


def _without_part(text: str) -> str:
    """Return a value that was cut without the part of its end, a newline and a tag, that it ends with."""
    for length in range(len(_END_PARAMETER), -1, -1):
        if text.endswith(part := "\n" + _END_PARAMETER[:length]):
            return text[: -len(part)]
    return text


def _object(text: str) -> str | None:
    """Return text that is a JSON object, None if it is not."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text.strip() if isinstance(value, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
