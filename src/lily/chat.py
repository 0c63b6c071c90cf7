"""Messages to a prompt, by the chat template that a checkpoint brings.

The template is a program from a stranger: it runs in Jinja's sandbox, sees the messages and nothing else, and
can write text only. What messages may look like is messages.py's; reading answers is answer.py's.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lily.errors import ModelFilesError
from lily.files import read_bytes, read_json
from lily.messages import Message, check_messages, check_tools

if TYPE_CHECKING:
    import jinja2

    from lily.tokenizer import Tokenizer

# Put behind the end of a text that the model is to go on with, to find it again in what the template writes.
# A
# noncharacter: Unicode keeps it for a program's private use.
_OPEN_END = "\ufdd1"


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
        text = read_bytes(file)
        if text is not None:
            try:
                return cls(text.decode(), str(file))
            except UnicodeDecodeError as error:
                raise ModelFilesError(f"{file}: wanted UTF-8, got {error}; fetch the file again") from error
        file = folder / "tokenizer_config.json"
        source = read_json(file).get("chat_template")
        if isinstance(source, list):  # several, by name
            named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
            source = named[0].get("template") if named else None
        if source is not None and not isinstance(source, str):
            raise ModelFilesError(f"{file}: chat_template: wanted a str, got {type(source).__name__}")
        return None if source is None else cls(source, f"{file}: chat_template")

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: "Tokenizer",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        preserve_thinking: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt; the arguments are Model.generate's; most is Tokenizer.encode's.

        Only the template writes markers: no text in messages, tools or template_kwargs can.
        Raises what check_messages, check_tools and render raise, and ValueError for what the template lacks.
        """
        variables: dict[str, Any] = {"preserve_thinking": preserve_thinking}
        if thinking is not None:
            variables["enable_thinking"] = thinking
        if tools:
            if "tools" not in self.source:
                raise ValueError(f"tools: {self.name} knows of none; leave them out, or load another model")
            variables["tools"] = check_tools(tools)
        variables |= _check_variables(template_kwargs or {})
        checked = check_messages(messages)
        try:
            guarded = _guard(tokenizer, {"messages": checked} | variables)
        except RecursionError:
            raise ValueError("messages, tools: wanted plain values, got some nested too deep") from None
        checked = guarded.pop("messages")
        if not continue_final_message:
            text = self.render(checked, add_generation_prompt=add_generation_prompt, **guarded)
        else:
            text = self._render_open(checked, guarded)
        return tokenizer.encode_guarded(text, most)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """Return the text that the template makes of messages, as they are.

        add_generation_prompt: whether it ends where the assistant's answer begins.
        Raises ValueError if the template refuses them, ModelFilesError if the template itself is at fault.
        """
        try:
            return self._compiled.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except _RefusalError as refusal:
            raise ValueError(f"messages: the chat template refuses them: {refusal}") from None
        except ModelFilesError:
            raise
        except Exception as error:  # whatever a stranger's program can raise
            raise ModelFilesError(f"{self.name}: failed: {type(error).__name__}: {error}") from error

    def _render_open(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Render up to the end of the last message's content, or of its thoughts if it has nothing else."""
        last = messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise ValueError(
                "continue_final_message: wanted a last message of the assistant without tool calls, "
                f"got one of role {last['role']}{' that calls tools' if last.get('tool_calls') else ''}"
            )
        key = "content" if last["content"] or not last.get("reasoning_content") else "reasoning_content"
        opened = {**last, key: last[key] + _OPEN_END}
        text = self.render([*messages[:-1], opened], add_generation_prompt=False, **variables)
        end = text.rfind(_OPEN_END)
        if end < 0:
            raise ValueError(f"continue_final_message: {self.name} does not show the last message's {key}")
        return text[:end]

    @cached_property
    def _compiled(self) -> "jinja2.Template":
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """Takes {% generation %}, by which trainers mark what the assistant wrote, for nothing at all."""

            tags = {"generation"}  # noqa: RUF012  as Jinja declares it

            def parse(self, parser: "jinja2.parser.Parser") -> list[jinja2.nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
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


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter sorts the keys and escapes "<", "&", quotes and everything that isn't ASCII; models
    # are trained on the plain form.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _check_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return template_kwargs as a dict, unless it holds what has an argument of its own."""
    if not isinstance(variables, Mapping):
        raise TypeError(f"template_kwargs: wanted a dict, got {type(variables).__name__}")
    for name in variables:
        if name in ("messages", "tools", "add_generation_prompt"):
            raise ValueError(f"template_kwargs: wanted the template's own variables, got {name!r}")
    return dict(variables)


def _guard(tokenizer: "Tokenizer", value: Any) -> Any:
    """Return a copy of plain values in which no text can be taken for a marker."""
    if isinstance(value, str):
        return tokenizer.guard(value)
    if isinstance(value, Mapping):
        return {_guard(tokenizer, key): _guard(tokenizer, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_guard(tokenizer, item) for item in value]
    return value
