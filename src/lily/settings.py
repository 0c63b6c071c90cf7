"""The keyword arguments that generate, stream, agenerate and astream have in common, declared once."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

from lily.progress import Report
from lily.sampling import SamplingArguments

Function = TypeVar("Function", bound=Callable[..., Any])
Part = TypeVar("Part", bound=Mapping[str, Any])


Reuse = Literal["auto", "strict", "off"]


class Generation(SamplingArguments, total=False):
    """How an answer is written: Prefix.generate's arguments. None stands for the default."""

    max_tokens: int | None
    stop: str | Iterable[str] | None
    stop_tokens: Iterable[int] | None
    logprobs: bool
    top_logprobs: int
    timeout: float | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    schema: Mapping[str, Any] | type | None
    regex: str | None
    grammar: str | None
    thinking_budget: int | None


class Rendering(TypedDict, total=False):
    """How messages become a prompt."""

    tools: Sequence[Mapping[str, Any]] | None
    thinking: bool | None
    preserve_thinking: bool
    template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    add_generation_prompt: bool


class Settings(Generation, Rendering, total=False):
    """Model.generate's arguments."""

    progress: bool | Report | None
    reuse: Reuse


_DEFAULTS = {
    "reuse": "auto",
    "preserve_thinking": True,
    "add_generation_prompt": True,
    "parallel_tool_calls": True,
    "top_logprobs": 0,
} | dict.fromkeys(("continue_final_message", "logprobs"), False)  # of those that are not None


def of(part: type[Part], settings: Mapping[str, Any]) -> Part:
    """Return those of some arguments that a TypedDict has."""
    return cast(Part, {name: settings[name] for name in part.__annotations__ if name in settings})


def check_names(given: Mapping[str, Any], known: type) -> None:
    """Raise TypeError, which names what may have been meant, for a keyword that `known` does not have."""
    names = known.__annotations__
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names))}"
            raise TypeError(f"unexpected argument {name!r}; {hint}")


def spelled_out(function: Function) -> Function:
    """Let help() and notebooks show one by one what a method's **settings: Unpack[...] may be."""
    signature = inspect.signature(function)
    *named, rest = signature.parameters.values()
    (declared,) = rest.annotation.__args__
    keywords = [
        inspect.Parameter(name, rest.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=annotation)
        for name, annotation in declared.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=named + keywords)  # type: ignore[attr-defined]
    return function
