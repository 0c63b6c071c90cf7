"""What a second turn takes in, for every way in which templates and clients change the first one.

The model is the demo checkpoint under tests/templates/thinking.jinja, and writes what it is told to, letter
by letter: never the tokens that a tokenizer would choose.  `python tests/reuse.py` writes the table into
docs/caching.md; tests/test_reuse.py holds both to it.
"""

import itertools
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lily
from scripted import make_checkpoint, scripted

PAGE = Path(__file__).parent.parent / "docs" / "caching.md"
SYSTEM = {"role": "system", "content": "Answer in one sentence. Look things up before you answer. " * 3}
PARAMETERS = {"deep": {"type": "boolean"}, "name": {"type": "string"}, "code": {"type": "string"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": PARAMETERS}},
    }
]
ARGUMENTS = {
    "boolean": {"deep": True},
    "unicode": {"name": "Søren 日本 🦊"},
    "trailing newline": {"code": "x = 1\n"},
}
HEAD = (
    "| thinking | thoughts kept | client echoes them | the first turn "
    "| prompt | in common | cached | spliced | prefilled |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """A second turn.

    prompt: int, its tokens; common: of these, how many the first turn had taken in or written.
    cached, spliced, prefilled: int, tokens, as usage has them.
    """

    thinking: bool
    preserve: bool
    echoed: bool
    turn: str
    prompt: int
    common: int
    cached: int
    spliced: int
    prefilled: int

    @property
    def new(self) -> int:
        """Tokens that nobody could have had."""
        return self.prompt - self.common

    def __str__(self) -> str:
        """Return it as a line of the table."""
        flags = ("yes" if flag else "no" for flag in (self.thinking, self.preserve, self.echoed))
        numbers = (self.prompt, self.common, self.cached, self.spliced, self.prefilled)
        return "| " + " | ".join([*flags, self.turn, *map(str, numbers)]) + " |"


def letters(model: lily.Model, text: str) -> list[int]:
    """Return a text's tokens, a byte each, and its markers."""
    bytes_of = {}
    for token in range(len(model.tokenizer)):
        spelled = model.tokenizer.token_bytes(token)
        if len(spelled) == 1:
            bytes_of.setdefault(spelled[0], token)
    tokens: list[int] = []
    for token in model.tokenizer.encode(text, markers=True):
        if model.tokenizer.is_marker(token):
            tokens.append(token)
        else:
            tokens += [bytes_of[byte] for byte in model.tokenizer.token_bytes(token)]
    return tokens


def written(thinking: bool, turn: str) -> str:
    """Return what the model writes in its first turn."""
    thoughts = "I had better look.\n</think>\n\n" if thinking else ""
    if turn == "text":
        return thoughts + "A fox, and two hens that she does not eat."
    parameters = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else 'true'}\n</parameter>\n"
        for name, value in ARGUMENTS[turn].items()
    )
    return f"{thoughts}<tool_call>\n<function=find>\n{parameters}</function>\n</tool_call>"


def second_turn(model: lily.Model, thinking: bool, preserve: bool, echoed: bool, turn: str) -> Row:
    """Have the model write a first turn, and measure the second."""
    settings: dict[str, Any] = {"thinking": thinking, "preserve_thinking": preserve, "tools": TOOLS}
    case = f"Case {thinking} {preserve} {echoed}, {turn}."
    messages: list[Any] = [SYSTEM, {"role": "user", "content": f"Who lives in the wood? {case}"}]
    with scripted(model, letters(model, written(thinking, turn))):
        first = model.generate(messages, **settings)
    known = [*model.encode(messages, **settings), *first.tokens]
    answer = dict(first.message)
    if not echoed:
        answer.pop("reasoning_content", None)
    if turn != "text":
        (call,) = first.tool_calls
        assert call.parsed == ARGUMENTS[turn]
        answer["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.parsed}}
        ]
    messages += [answer, {"role": "user", "content": "And who else?"}]
    if turn != "text":
        messages[-1] = {"role": "tool", "content": "A fox and two hens."}
    rendered = np.array(model.encode(messages, **settings), np.int32)
    prompt, _ = model._engine.splices.splice(rendered, TOOLS)
    common = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known))
    with scripted(model, "So."):
        usage = model.generate(messages, **settings).usage
    assert usage.prompt_tokens == len(prompt)
    prefilled = usage.prompt_tokens - usage.cached_tokens
    return Row(
        thinking,
        preserve,
        echoed,
        turn,
        len(prompt),
        common,
        usage.cached_tokens,
        usage.spliced_tokens,
        prefilled,
    )


def rows() -> Iterator[Row]:
    """Measure every second turn."""
    with tempfile.TemporaryDirectory() as folder, lily.Model.load(make_checkpoint(Path(folder))) as model:
        for case in itertools.product((True, False), (True, False), (True, False), ("text", *ARGUMENTS)):
            yield second_turn(model, *case)


def with_table(page: str, table: list[Row]) -> str:
    """Return a page with the table in its place."""
    text = "\n".join([HEAD, *map(str, table)])
    made, count = re.subn(
        r"(<!-- reuse: [^\n]*-->\n).*?(?=\n<!-- end -->)", lambda m: m[1] + text, page, flags=re.DOTALL
    )
    assert count == 1, "the page has no place for the table"
    return made


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), list(rows())))
    sys.stdout.write(f"wrote {PAGE}\n")
