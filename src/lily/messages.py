"""Messages as clients write them, checked and brought into the one form that a chat template is given.

What is understood: the messages of OpenAI's API, and the content parts of Anthropic's. What a model of text
can't be shown is refused by name; keys that mean nothing to it are passed over.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lily.toolcalls import LONGEST_NAME

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}, and for an assistant's also "reasoning_content" and "tool_calls"."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")
_NOT_READ = ("image", "audio", "video", "file", "document")  # what no text stands for
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as a template takes them.

    Each has role (system, user, assistant or tool) and content (str). An assistant's may have
    reasoning_content (str) and tool_calls, whose arguments are dicts.

    System messages at the beginning become one. A later one becomes a user's message that says what it is,
    where
    it stands: templates refuse it elsewhere, and moved to the front it would change all that a prefix holds.
    Raises TypeError or ValueError, which names the message and the key, for anything a prompt can't be made
    of.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: wanted a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: wanted at least one message, got none")
    checked: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        for plain in _check_message(f"messages[{i}]", message):
            if plain["role"] != "system" or not checked:
                checked.append(plain)
            elif len(checked) == 1 and checked[0]["role"] == "system":
                checked[0]["content"] += "\n\n" + plain["content"]
            else:
                checked.append({"role": "user", "content": _REMINDER.format(plain["content"])})
    return checked


def check_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return descriptions of functions as a template takes them.

    tools: [{"type": "function", "function": {"name": str, "description": str, "parameters": JSON schema}},
        ...]. A call spells the names of the function and its parameters in tags, so there are some that none
        can have.
    Raises TypeError or ValueError, which names the tool and the key, for anything else.
    """
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise TypeError(f"tools: wanted a list of tools, got {type(tools).__name__}")
    known: dict[str, int] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise TypeError(
                f'tools[{i}]: wanted {{"type": "function", "function": {{"name": ...}}}}, got {tool!r:.80}'
            )
        where = f"tools[{i}].function"
        name = _spelled(f"{where}.name", function.get("name"))
        if name in known:
            raise ValueError(
                f"{where}.name: wanted a name of its own, got {name!r:.80} as tools[{known[name]}] has"
            )
        known[name] = i
        if not isinstance(function.get("strict"), bool | None):
            raise TypeError(f"{where}.strict: wanted a bool, got {type(function['strict']).__name__}")
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise TypeError(f"{where}.parameters: wanted a JSON schema, got {type(parameters).__name__}")
        properties = (parameters or {}).get("properties")
        if not isinstance(properties, Mapping | None):
            raise TypeError(f"{where}.parameters.properties: wanted a dict, got {type(properties).__name__}")
        _check_json(where, function)
        for key in properties or {}:
            _spelled(f"{where}.parameters.properties", key)
    return [dict(tool) for tool in tools]


def _spelled(where: str, name: object) -> str:
    """Return a name that the tag of a call can spell."""
    name = _text(where, name)
    if not 0 < len(name) <= LONGEST_NAME or name != name.strip() or any(c in name for c in "<>\n"):
        raise ValueError(
            f"{where}: wanted a name of 1 to {LONGEST_NAME} characters without angle brackets, newlines and "
            f"blanks at its ends, got {name!r:.80}"
        )
    return name


@dataclass(slots=True)
class _Content:
    """What the parts of one message's content come to."""

    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)  # messages of their own


def _check_message(where: str, message: Message) -> Iterator[dict[str, Any]]:
    if not isinstance(message, Mapping):
        raise TypeError(f"{where}: wanted a dict with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role: wanted one of {', '.join(ROLES)}, got {role!r}")
    for key in ("images", "audio", "videos"):
        if message.get(key):
            raise ValueError(f"{where}.{key}: this model reads text only; leave it out")
    content = _check_content(f"{where}.content", role, message.get("content"))
    yield from content.results
    checked: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": "".join(content.text),
    }
    if role == "assistant":
        _add_thoughts(where, checked, message, content.thoughts)
        calls = message.get("tool_calls") or []
        if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
            raise TypeError(f"{where}.tool_calls: wanted a list of calls, got {type(calls).__name__}")
        calls = [_check_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
        if calls or content.calls:
            checked["tool_calls"] = calls + content.calls
    checked |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    if content.text or not content.results:
        yield checked


def _add_thoughts(where: str, checked: dict[str, Any], message: Message, parts: list[str]) -> None:
    """Set reasoning_content, if there is any, wherever in the message the thoughts stand."""
    for key in ("reasoning_content", "reasoning"):
        if message.get(key) is not None:
            checked["reasoning_content"] = _text(f"{where}.{key}", message[key])
            return
    if parts:
        checked["reasoning_content"] = "".join(parts)
    elif "</think>" in checked["content"]:
        # Given back as one text by a client that tells nothing apart. Templates split it by the tags, but by
        # then no text can spell a tag any more, so it is done here.
        thoughts, _, _ = checked["content"].partition("</think>")
        checked["reasoning_content"] = thoughts.rpartition("<think>")[2].strip("\n")
        checked["content"] = checked["content"].rpartition("</think>")[2].lstrip("\n")


def _check_content(where: str, role: str, content: object) -> _Content:
    if isinstance(content, str):
        return _Content([content])
    # A message that only calls tools has none, nor has the result of a tool that returns nothing.
    if content is None and role in ("assistant", "tool"):
        return _Content([""])
    if isinstance(content, bytes | Mapping) or not isinstance(content, Sequence):
        raise TypeError(f"{where}: wanted a str or a list of text parts, got {type(content).__name__}")
    gathered = _Content()
    for i, part in enumerate(content):
        _add_part(f"{where}[{i}]", role, part, gathered)
    return gathered


def _add_part(where: str, role: str, part: object, content: _Content) -> None:
    if not isinstance(part, Mapping):
        raise TypeError(f'{where}: wanted {{"type": "text", "text": ...}}, got {type(part).__name__}')
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        content.text.append(_text(f"{where}.text", part.get("text")))
    elif kind == "document" and isinstance(source := part.get("source"), Mapping) and "data" in source:
        if source.get("type") != "text":
            raise ValueError(f"{where}.source.type: wanted text, got {source.get('type')!r}; pass its text")
        content.text.append(_text(f"{where}.source.data", source["data"]))
    elif kind == "thinking" and role == "assistant":
        content.thoughts.append(_text(f"{where}.thinking", part.get("thinking")))
    elif kind == "redacted_thinking" and role == "assistant":
        pass  # encrypted by another model's maker: nobody else can read it
    elif kind == "tool_use" and role == "assistant":
        content.calls.append(_check_call(where, {**part, "arguments": part.get("input")}))
    elif kind == "tool_result" and role == "user":
        result = _check_content(f"{where}.content", "tool", part.get("content"))
        answer = {"role": "tool", "content": "".join(result.text)}
        if isinstance(part.get("tool_use_id"), str):
            answer["tool_call_id"] = part["tool_use_id"]
        content.results.append(answer)
    else:
        family = next((name for name in _NOT_READ if name in str(kind)), None)
        if family:
            raise ValueError(f"{where}.type: this model does not support {family} inputs, got {kind!r}")
        raise ValueError(f"{where}.type: wanted text in a message of role {role}, got {kind!r}")


def _check_call(where: str, call: object) -> dict[str, Any]:
    """Return a tool call with its arguments as a dict; they may be given as a dict or as its JSON."""
    asked = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(asked, Mapping):
        raise TypeError(
            f'{where}: wanted {{"function": {{"name": ..., "arguments": ...}}}}, got {type(call).__name__}'
        )
    arguments = asked.get("arguments")
    given = arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}.arguments: wanted a JSON object, got {given!r:.80}: {error}") from None
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"{where}.arguments: wanted a dict or its JSON, got {given!r:.80}")
    _check_json(f"{where}.arguments", dict(arguments or {}))
    name = _text(f"{where}.name", asked.get("name"))
    checked = {"type": "function", "function": {"name": name, "arguments": dict(arguments or {})}}
    if isinstance(call.get("id"), str):
        checked["id"] = call["id"]
    return checked


def _check_json(where: str, value: object) -> None:
    """Raise ValueError or TypeError for what JSON has no form for: templates would write whatever comes."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise type(error)(f"{where}: wanted what JSON can say, got {error}") from None


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{where}: wanted a str, got {type(value).__name__}")
    return value
