"""Messages to a prompt, by the chat template that a checkpoint brings.

The template is a program from a stranger: it runs in Jinja's sandbox, sees the messages and nothing else, and
    can
write text only. Reading answers apart into thoughts and tool calls is not done here.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lily.errors import ModelFilesError
from lily.files import read_json

if TYPE_CHECKING:
    import jinja2

    from lily.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""{"role": "system", "user" or "assistant", "content": str or [{"type": "text", "text": str}, ...]}."""

ROLES = ("system", "user", "assistant")


class ChatTemplate:
    """A checkpoint's chat template, compiled when it is first used."""

    def __init__(self, source: str, name: str) -> None:
        """Hold a template's source; name says in errors where it came from."""
        self.source = source
        self.name = name

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """Read chat_template.jinja, or else the template in tokenizer_config.json; None if there is neither.

        Raises ModelFilesError if one is there and can't be read.
        """
        file = folder / "chat_template.jinja"
        try:
            return cls(file.read_text(encoding="utf-8"), str(file))
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFilesError(f"{file}: cannot be read: {error}; fetch the file again") from error
        file = folder / "tokenizer_config.json"
        source = read_json(file).get("chat_template")
        if isinstance(source, list):  # several, by name
            named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
            source = named[0].get("template") if named else None
        if source is not None and not isinstance(source, str):
            raise ModelFilesError(f"{file}: chat_template: wanted a str, got {type(source).__name__}")
        return None if source is None else cls(source, f"{file}: chat_template")

    def encode(self, messages: Sequence[Message], tokenizer: "Tokenizer", **variables: object) -> list[int]:
        """Return the token ids of a prompt that asks for the assistant's next message.

        variables: what else the template may read.
        Raises what check_messages and render raise.
        """
        guarded = []
        for message in check_messages(messages):
            # An answer given back as history brings its thoughts along, and the template tells them apart by
            # their tags. Nobody but the model writes those.
            keep = ("<think>", "</think>") if message["role"] == "assistant" else ()
            guarded.append({**message, "content": tokenizer.guard(message["content"], keep=keep)})
        return tokenizer.encode_guarded(self.render(guarded, **variables))

    def render(self, messages: Sequence[Message], **variables: object) -> str:
        """Return the text that the template makes of messages, as they are.

        Raises ValueError if the template refuses them, ModelFilesError if the template itself is at fault.
        """
        try:
            text = self._compiled.render(messages=messages, add_generation_prompt=True, **variables)
        except _RefusalError as refusal:
            raise ValueError(f"messages: the chat template refuses them: {refusal}") from None
        except ModelFilesError:
            raise
        except Exception as error:  # whatever a stranger's program can raise
            raise ModelFilesError(f"{self.name}: failed: {type(error).__name__}: {error}") from error
        return text

    @cached_property
    def _compiled(self) -> "jinja2.Template":
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"{self.name}: wanted a Jinja template, got {error}") from error


class _RefusalError(Exception):
    """What a template raises by raise_exception(message)."""


def _refuse(message: str) -> NoReturn:
    raise _RefusalError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter sorts the keys and escapes "<", "&", quotes and everything that isn't ASCII; models
    # are trained on the plain form.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def check_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages with their text parts joined.

    Raises TypeError or ValueError, which names the message and the key, for anything a prompt can't be made
        of.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: wanted a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: wanted at least one message, got none")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(where: str, message: Message) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise TypeError(f"{where}: wanted a dict with role and content, got {type(message).__name__}")
    if message.get("role") not in ROLES:
        raise ValueError(f"{where}.role: wanted one of {', '.join(ROLES)}, got {message.get('role')!r}")
    for key, value in message.items():
        if key not in ("role", "content") and value is not None:
            raise ValueError(f"{where}.{key}: wanted role and content only, got {value!r}; leave it out")
    content = message.get("content")
    if isinstance(content, str):
        return {"role": message["role"], "content": content}
    if isinstance(content, bytes | Mapping) or not isinstance(content, Sequence):
        raise TypeError(
            f"{where}.content: wanted a str or a list of text parts, got {type(content).__name__}"
        )
    parts = [_check_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
    return {"role": message["role"], "content": "".join(parts)}


def _check_part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise TypeError(f'{where}: wanted {{"type": "text", "text": ...}}, got {type(part).__name__}')
    if part.get("type") != "text":
        raise ValueError(
            f"{where}.type: wanted text, the only kind this model reads, got {part.get('type')!r}"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise TypeError(f"{where}.text: wanted a str, got {type(text).__name__}")
    return text
