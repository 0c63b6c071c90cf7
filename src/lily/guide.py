"""What an answer is held to: a schema, a pattern, a grammar, calls of tools, a length of its thoughts.

Each step gets a mask of the tokens that may come next, for the backend to draw among. Following a grammar is
llguidance's work; writing it is this module's. Thoughts are free: a grammar begins behind them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lily.answer import END_THINK
from lily.errors import LilyError, how_to_install
from lily.toolcalls import CLOSE, OPEN
from lily.toolgrammar import LAYOUT, Arguments, quoted, slashed
from lily.tooltypes import MOST_LEVELS, has_end, levels

if TYPE_CHECKING:
    from lily.engine import Engine

Mask = NDArray[np.uint32]  # (ceil(V / 32),), bit i % 32 of word i / 32 for token i

_CHOICES = ("none", "auto", "required")
_MOST_RULES = 500  # of a grammar: a chain of some thousand overflows llguidance's stack
_FORCED = 64  # tokens that leave no choice, to follow in search of a text that fits a grammar


class ToolChoice:
    """What is said about calling tools, checked.

    tools: the functions that may be called, as check_tools returns them; () for none.  places: their paths in
        the argument `tools`, for errors.
    forced: bool, whether the answer is a call, or several.
    """

    def __init__(self, choice: object, tools: Sequence[Mapping[str, Any]]) -> None:
        """Check tool_choice: "none", "auto", "required", or {"type": "function", "function": {"name": ...}}.

        Raises ValueError for anything else, and for a call that must be made of a tool that isn't there.
        """
        named = choice.get("function", choice) if isinstance(choice, Mapping) else None
        name = named.get("name") if isinstance(named, Mapping) else None
        if choice is not None and choice not in _CHOICES and not isinstance(name, str):
            raise ValueError(
                f"tool_choice: wanted {', '.join(_CHOICES)} or "
                f'{{"type": "function", "function": {{"name": ...}}}}, got {choice!r:.80}'
            )
        self.forced = choice == "required" or name is not None
        kept = {
            f"tools[{i}].function": tool
            for i, tool in enumerate(tools)
            if choice != "none" and name in (None, tool["function"]["name"])
        }
        self.tools, self.places = tuple(kept.values()), tuple(kept)
        if self.forced and not self.tools:
            known = ", ".join(tool["function"]["name"] for tool in tools) or "none"
            raise ValueError(f"tool_choice: wanted one of the tools, which are {known}; got {choice!r:.80}")


class Guide:
    """The masks of one answer's tokens, drawn one by one.

    constrained: bool, whether a grammar says where the answer ends.
    """

    def __init__(
        self,
        engine: "Engine",
        text: Any = None,
        call: Any = None,
        thinking_budget: int | None = None,
    ) -> None:
        """Begin an answer.

        text, call: llguidance's matchers of the whole text, and of what follows each token <tool_call>; None
            for neither.
        thinking_budget: int, the token of the thoughts, from 0, in whose place they are ended; None for none.
        """
        self._engine = engine
        self._call = call
        self._open = engine.tokenizer.token_id(OPEN)
        self._end_think = engine.tokenizer.token_id(END_THINK)
        self._budget = None if self._end_think is None else thinking_budget
        self.constrained = text is not None
        self._matcher = text
        self._unended: Mask | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing can follow in the text."""
        return self.constrained and self._matcher is not None and bool(self._matcher.is_stopped())

    def allowed(self, thinking: bool, thought: int) -> Mask | None:
        """Return which tokens may come next, None for all.

        thinking: whether it is one of the thoughts, which have `thought` tokens so far.
        """
        if thinking:
            if self._budget is not None and thought >= self._budget:
                return _mask(self._engine.vocab, [self._end_think or 0])
            if self.constrained and self._unended is None:
                # An answer must follow, so thoughts can't end it.
                self._unended = ~_mask(self._engine.vocab, sorted(self._engine.tokenizer.stop))
            return self._unended
        if self._matcher is None:
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: (self._engine.vocab + 31) // 32]
        if self._matcher.is_error():
            raise self._fault()
        return mask

    def _fault(self) -> ValueError:
        """Return what is wrong with a grammar that no text fits, or that is past the parser's limits."""
        assert self._matcher is not None
        reason = self._matcher.get_error().partition("\n")[0]  # behind it comes the parser's whole state
        return ValueError(f"schema or grammar: it can't be followed any further: {reason}; make it simpler")

    def take(self, token: int) -> None:
        """Take a token of the text in."""
        if self._matcher is None:
            if self._call is not None and token == self._open:
                self._matcher = self._call.deep_copy()
            return
        if not self._matcher.consume_token(token):
            fault = self._fault()
            if "doesn't satisfy" in str(fault):  # the token's fault, not the grammar's
                raise LilyError(f"the grammar does not go on with token {token}")
            raise fault
        if not self.constrained and self._matcher.is_stopped():
            self._matcher = None  # the call is over


def guide_of(
    engine: "Engine", settings: Mapping[str, Any], choice: ToolChoice, thinking: bool
) -> Guide | None:
    """Return what an answer is held to, None for nothing.

    settings: schema, regex, grammar, parallel_tool_calls and thinking_budget are looked at.
    thinking: whether the answer begins inside its thoughts.
    Raises ValueError or TypeError, which names the argument, for what can't be followed.
    """
    given = [name for name in ("schema", "regex", "grammar") if settings.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{given[1]}: wanted one of schema, regex and grammar, got {' and '.join(given)}")
    budget = settings.get("thinking_budget")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise ValueError(f"thinking_budget: wanted an int of at least 0, got {budget!r}")
    several = settings.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise ValueError(f"parallel_tool_calls: wanted True or False, got {several!r}")
    text = call = None
    if choice.forced or given:
        what = "tool_choice" if choice.forced else given[0]
        writer = _Writer(engine)
        calls = writer.calls(choice, several) if choice.tools else None
        body = None
        if not choice.forced:
            body = _body(given[0], settings[given[0]])
            _matcher(engine, what, json.dumps({"grammars": [body]}))  # before there is a choice beside it
        text = _matcher(engine, what, writer.whole(body, calls, thinking))
    elif any(tool["function"].get("strict") is True for tool in choice.tools):
        writer = _Writer(engine)
        writer.lines.append(f"start: {writer.call(choice, strict=False)}")
        call = _matcher(engine, "tools", writer.text())
    if text is None and call is None and budget is None:
        return None
    return Guide(engine, text, call, budget)


def _body(name: str, value: object) -> dict[str, Any]:
    """Return the grammar of a schema, a pattern or a grammar, as llguidance has them in JSON."""
    if name == "schema":
        value = value.model_json_schema() if hasattr(value, "model_json_schema") else value
        if not isinstance(value, Mapping):
            raise TypeError(f"schema: wanted a JSON schema as a dict, got {type(value).__name__}")
        _check_depth("schema", value)
        if not has_end(value):
            raise ValueError("schema: wanted one that some text fits, got references in a circle without end")
        return {"json_schema": {**value, "x-guidance": LAYOUT}}
    if not isinstance(value, str):
        raise TypeError(f"{name}: wanted a str, got {type(value).__name__}")
    if name == "regex":
        return {"lark_grammar": f"start: /{slashed(value)}/"}
    rules = value.count(":")  # or fewer
    if rules > _MOST_RULES:
        raise ValueError(f"grammar: wanted at most {_MOST_RULES} rules, got {rules}; make it smaller")
    for found in re.finditer(r"%json\s*", value):
        schema = None
        with suppress(ValueError):  # which llguidance finds too
            schema, _ = json.JSONDecoder().raw_decode(value, found.end())
        _check_depth("grammar", schema)
    return {"lark_grammar": value}


def _check_depth(where: str, schema: object) -> None:
    """Raise ValueError for a schema so deep that llguidance's stack might not hold it."""
    if levels(schema) > MOST_LEVELS:
        raise ValueError(
            f"{where}: wanted at most {MOST_LEVELS} levels, with what its references lead to; make it flatter"
        )


class _Writer:
    """Writes a Lark grammar rule by rule."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.lines: list[str] = []

    def text(self, *others: dict[str, Any]) -> str:
        """Return the grammar, and those that it refers to, as llguidance takes them."""
        return _lark(self.lines, *others)

    def whole(self, body: dict[str, Any] | None, calls: str | None, thinking: bool) -> str:
        """Return the grammar of an answer that is a body, or calls, or either."""
        answers = [*([] if body is None else ["@body"]), *([] if calls is None else [calls])]
        # Between thoughts and text there is an empty line, which is no part of the text.
        blank = '"\\n\\n"?' if thinking else ""
        self.lines.append(f"start: {blank} ({' | '.join(answers)})")
        return self.text(*([] if body is None else [{"name": "body", **body}]))

    def calls(self, choice: ToolChoice, several: bool) -> str:
        """Write the rules of calls, one or several, and return the name of the first."""
        rest = self.call(choice, strict=True)
        self.lines.append(f"call: {self._marker(OPEN)} {rest}")
        self.lines.append('calls: call ("\\n" call)*' if several else "calls: call")
        return "calls"

    def call(self, choice: ToolChoice, strict: bool) -> str:
        """Write the rules of what follows <tool_call> and return the name of the first.

        strict: whether every function's arguments follow its schema; if not, only those that ask for it.
        """
        names = []
        for i, (tool, place) in enumerate(zip(choice.tools, choice.places, strict=True)):
            function, where = tool["function"], f"{place}.parameters"
            schema = function.get("parameters") if strict or function.get("strict") is True else None
            _check_depth(where, schema)
            if not has_end(schema):
                raise ValueError(f"{where}: wanted arguments that have an end, got references in a circle")
            arguments = Arguments(f"f{i}", where, schema, self._unfit)
            for rule, part in arguments.strings.items():
                _matcher(self._engine, part, _lark([f"start: {rule}", *arguments.rules]))
            head = quoted(f"{function['name']}>\n")
            self.lines += [*arguments.rules, f"function{i}: {head} {arguments.expression}"]
            names.append(f"function{i}")
        name = f"({' | '.join(names)})"
        self.lines.append(f'rest: "\\n<function=" {name} "</function>\\n" {self._marker(CLOSE)}')
        return "rest"

    def _unfit(self, schema: Mapping[str, Any]) -> str | None:
        """Return why no grammar can be made of a JSON schema, None if one can."""
        grammar = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": LAYOUT}}]})
        return _fault_of(self._engine, _new(self._engine, grammar))

    def _marker(self, text: str) -> str:
        token = self._engine.tokenizer.token_id(text)
        return quoted(text) if token is None else f"<[{token}]>"


def _mask(vocab: int, tokens: Sequence[int]) -> Mask:
    """Return the mask of some tokens."""
    mask = np.zeros((vocab + 31) // 32, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


def _lark(lines: Sequence[str], *others: dict[str, Any]) -> str:
    """Return a grammar in Lark's notation, and those that it refers to, as llguidance takes them."""
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *others]})


def _new(engine: "Engine", grammar: str) -> Any:
    return _library().LLMatcher(engine.grammar_tokenizer, grammar, log_level=0)


def _matcher(engine: "Engine", what: str, grammar: str) -> Any:
    """Return what follows a grammar. Raises ValueError, which names the argument, if nothing can."""
    matcher = _new(engine, grammar)
    if (reason := _fault_of(engine, matcher)) is not None:
        raise ValueError(f"{what}: wanted what a grammar can be made of, got {reason}")
    return matcher


def _fault_of(engine: "Engine", matcher: Any) -> str | None:
    """Return why no text fits a grammar, None if one may.

    It is followed for as long as there is no choice: a part that nothing fits may come late.
    """
    if matcher.is_error():
        return " ".join(matcher.get_error().split())[:400]
    ahead = matcher.deep_copy()
    for _ in range(_FORCED):
        if ahead.is_accepting():
            break
        mask = np.frombuffer(ahead.compute_bitmask(), np.uint8)
        if ahead.is_error():
            reason = str(ahead.get_error()).partition("\n")[0]  # behind it comes the parser's whole state
            return "one that no text fits" if "NoExtension" in reason else reason
        (tokens,) = np.nonzero(np.unpackbits(mask, bitorder="little"))
        if len(tokens) == 0:
            return "one that no text fits"
        if len(tokens) > 1 or tokens[0] in engine.tokenizer.stop:
            break
        ahead.consume_token(int(tokens[0]))
    return None


@lru_cache(1)
def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise LilyError(
            f"schema, regex, grammar and tool_choice need llguidance: {how_to_install('structured')}"
        ) from error
    return llguidance


def tokenizer_of(engine: "Engine") -> Any:
    """Return llguidance's form of a checkpoint's tokenizer; making it takes up to a second."""
    text = (engine.folder / "tokenizer.json").read_text(encoding="utf-8")
    return _library().LLTokenizer(text, n_vocab=engine.vocab, eos_token=sorted(engine.tokenizer.stop))
