"""Answers that are held to a grammar: whatever the logits, they are what was asked for, and they end."""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import numpy as np
import pytest

import lily
from lily import _core
from lily.guide import ToolChoice
from scripted import scripted

QUESTION = [{"role": "user", "content": "Why?"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 6}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"enum": ["north", "south"]},
                "steps": {"type": "integer", "minimum": 1, "maximum": 12},
                "path": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["to", "steps"],
        },
    },
}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}


class Random:
    """The core's session, but for the logits it draws from, which are random. The drawing is the core's."""

    def __init__(self, session: object, seed: int) -> None:
        self._session = session
        self._random = np.random.default_rng(seed)
        self._position = 0

    def sample(self, state: object, sampling: object, history: object = None, allowed: object = None) -> int:
        self._position += 1
        logits = self._random.normal(0, 4, 4096).astype(np.float32)
        token: int = self._session._sample_from(logits, sampling, self._position, history, allowed)
        return token

    def step(self, state: object, token: int, *arguments: object) -> int:
        return self.sample(state, *arguments)

    def extend(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)


@contextmanager
def random_logits(model: lily.Model, seed: int) -> Iterator[None]:
    """Have a model draw from random logits."""
    engine = model._engine
    session = engine._session
    engine._session = Random(session, seed)
    try:
        yield
    finally:
        engine._session = session


def random_schema(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    """Make a schema whose values have an end, however they are drawn."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = choose.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf"])
    if kind == "string":
        return {"type": "string", "maxLength": choose.randint(0, 12), "minLength": 0}
    if kind == "integer":
        least = choose.randint(-1000, 1000)
        return {"type": "integer", "minimum": least, "maximum": least + choose.randint(0, 500)}
    if kind == "number":
        return {"type": "number", "minimum": -10, "maximum": choose.randint(-9, 1000)}
    if kind == "enum":
        return {"enum": choose.sample(["a", "b c", 'd"e', 1, None, True, "é", "\n"], choose.randint(1, 4))}
    if kind == "const":
        return {"const": choose.choice(["word", 3, None, [1, 2], {"a": "b"}])}
    if kind == "array":
        return {"type": "array", "items": random_schema(choose, depth + 1), "maxItems": choose.randint(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(choose, depth + 1) for _ in range(choose.randint(1, 3))]}
    if kind == "object":
        names = choose.sample(["a", "b", "name", "x y", "é", "type"], choose.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(choose, depth + 1) for name in names},
            "required": [name for name in names if choose.random() < 0.6],
            "additionalProperties": False,
        }
    return {"type": kind}


def test_random_logits_under_random_schemas_validate_and_end(model: lily.Model) -> None:
    """1,000 runs; every second one thinks first, for as long as its budget lets it."""
    for run in range(1000):
        schema = random_schema(random.Random(run))
        thinking = run % 2 == 0
        with random_logits(model, run):
            done = model.generate(
                QUESTION,
                schema=schema,
                thinking=thinking,
                thinking_budget=3,
                max_tokens=2000,
                seed=run,
                temperature=1.0,
                top_k=run % 50,
                top_p=1.0,
                repetition_penalty=1.0 + run % 3 / 10,
            )
        assert done.finish_reason == "stop", (run, schema, done.text)
        value = json.loads(done.text)
        jsonschema.validate(value, schema)
        assert bool(done.usage.reasoning_tokens) == thinking


def test_random_logits_make_the_calls_that_are_asked_for(model: lily.Model) -> None:
    named = {"type": "function", "function": {"name": "move"}}
    for run in range(60):
        choice: Any = ["required", named][run % 2]
        with random_logits(model, run):
            done = model.generate(
                QUESTION,
                tools=[MOVE, WAIT],
                tool_choice=choice,
                thinking_budget=2,
                max_tokens=1000,
                top_k=0,
                top_p=1.0,
                parallel_tool_calls=run % 3 > 0,
            )
        assert (done.finish_reason, done.text) == ("tool_calls", ""), done
        assert done.tool_calls
        assert run % 3 or len(done.tool_calls) == 1
        for call in done.tool_calls:
            assert call.name == "move" or choice == "required"
            if call.name == "move":
                jsonschema.validate(call.parsed, MOVE["function"]["parameters"])


def test_a_schema_goes_together_with_tools(model: lily.Model) -> None:
    found = set()
    for run in range(12):
        with random_logits(model, run):
            done = model.generate(
                QUESTION, schema=POINT, tools=[MOVE], thinking=False, max_tokens=1000, top_k=0
            )
        found.add(done.finish_reason)
        if done.finish_reason == "stop":
            jsonschema.validate(json.loads(done.text), POINT)
    assert found == {"stop", "tool_calls"}


def test_the_grammar_of_calls_takes_what_the_template_writes(model: lily.Model) -> None:
    """A model's own calls, in the form it was trained on, are never bent."""
    call = (
        "<tool_call>\n<function=move>\n<parameter=to>\nnorth\n</parameter>\n<parameter=steps>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    with scripted(model, f"I must.\n</think>\n\n{call}\n{call}"):
        done = model.generate(QUESTION, tools=[MOVE, WAIT], tool_choice="required")
    assert [each.parsed for each in done.tool_calls] == [{"to": "north", "steps": 3}] * 2
    assert done.finish_reason == "tool_calls"


def test_a_strict_tool_holds_calls_to_its_schema(model: lily.Model) -> None:
    strict = {"type": "function", "function": {**MOVE["function"], "strict": True}}
    opened = [*QUESTION, {"role": "assistant", "content": "I go. "}]
    tokens = [*model.encode(opened, continue_final_message=True, tools=[strict])]
    assert tokens
    with (
        scripted(model, "</think>I go. <tool_call>\n<function=wait>"),
        pytest.raises(lily.LilyError, match="token"),
    ):
        model.generate(QUESTION, tools=[strict, WAIT, MOVE][:1])
    with scripted(model, "</think>No call, then."):
        assert model.generate(QUESTION, tools=[strict]).text == "No call, then."


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"regex": "[0-9]{3}/[ab]{2,5}"}, "[0-9]{3}/[ab]{2,5}"),
        ({"grammar": 'start: "yes" | "no" WORD\nWORD: /[a-z]{1,4}/'}, "yes|no[a-z]{1,4}"),
        ({"regex": "é+🦊"}, "é+🦊"),
        ({"regex": "a\\/b/c\n[de]"}, "a/b/c\n[de]"),
        ({"regex": "a\\\nb[\n/]c"}, "a\nb[\n/]c"),
        ({"regex": "a\\\\\nb"}, "a\\\\\nb"),
        ({"regex": ""}, ""),
    ],
)
def test_patterns_and_grammars(model: lily.Model, settings: dict[str, str], pattern: str) -> None:
    for run in range(20):
        with random_logits(model, run):
            done = model.generate(
                QUESTION, **settings, thinking=run % 2 == 0, thinking_budget=1, max_tokens=200
            )
        assert done.finish_reason == "stop"
        assert re.fullmatch(pattern, done.text), done.text


def test_an_answer_that_is_cut_says_so(model: lily.Model) -> None:
    with random_logits(model, 1):
        done = model.generate(QUESTION, schema=POINT, thinking=False, max_tokens=3)
    assert done.finish_reason == "length"
    assert done.text.startswith("{")


def test_stop_tokens_of_the_callers_do_not_keep_it_from_ending(model: lily.Model) -> None:
    with random_logits(model, 2):
        done = model.generate(QUESTION, schema={"type": "boolean"}, stop_tokens=(), thinking=False)
    assert done.text in ("true", "false")
    assert done.finish_reason == "stop"


def test_thoughts_end_at_their_budget(model: lily.Model) -> None:
    with random_logits(model, 3):
        free = model.generate(QUESTION, max_tokens=40, thinking_budget=0)
    assert free.usage.reasoning_tokens == 1
    assert free.reasoning == ""
    for budget in (1, 5):
        done = model.generate(QUESTION, max_tokens=40, thinking_budget=budget, seed=1)
        assert done.usage.reasoning_tokens == budget + 1
    plain = model.generate(QUESTION, max_tokens=5, thinking=False, thinking_budget=0, seed=1)
    assert plain.usage.reasoning_tokens == 0
    # The caller's own stop tokens stay as they are.
    assert not model.stream(QUESTION, thinking_budget=0, stop_tokens=())._request.stop_tokens


def test_a_class_that_has_a_schema_will_do(model: lily.Model) -> None:
    class Point:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return POINT

    with random_logits(model, 4):
        done = model.generate(QUESTION, schema=Point, thinking=False)
    jsonschema.validate(json.loads(done.text), POINT)


@pytest.mark.parametrize("simd", ["plain", "sim"])
def test_the_mask_holds_on_every_backend(simd: str) -> None:
    from support import CHECKPOINTS, options_of

    weights = _core.Weights(str(CHECKPOINTS["tiny"]))
    session = _core.Session(weights, options_of("plain" if simd == "plain" else "sim rows"))
    state = session.new_state()
    session.extend(state, np.array([1, 2, 3], np.int32))
    vocab = weights.config["vocab"]
    for token in (0, 31, 32, vocab - 1):
        allowed = np.zeros((vocab + 31) // 32, np.uint32)
        allowed[token // 32] = 1 << token % 32
        for sampling in (
            _core.Sampling(),
            _core.Sampling(temperature=1.0),
            _core.Sampling(temperature=1.0, top_k=5),
        ):
            assert session.sample(state, sampling, None, allowed) == token
            assert session.step(session.fork(state), 5, sampling, _core.History(), allowed) == token


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"schema": {"type": "nonsense"}},
            ValueError,
            "schema: wanted what a grammar can be made of, got .*nonsense",
        ),
        ({"schema": [1]}, TypeError, "schema: wanted a JSON schema as a dict, got list"),
        ({"regex": "("}, ValueError, "regex: wanted what a grammar"),
        ({"regex": 1}, TypeError, "regex: wanted a str, got int"),
        ({"grammar": "start: nope"}, ValueError, "grammar: wanted what a grammar"),
        (
            {"schema": {}, "regex": "a"},
            ValueError,
            "regex: wanted one of schema, regex and grammar, got schema and",
        ),
        ({"parallel_tool_calls": 1}, ValueError, "parallel_tool_calls: wanted True or False, got 1"),
        ({"thinking_budget": -1}, ValueError, "thinking_budget: wanted an int of at least 0, got -1"),
        ({"tool_choice": "always"}, ValueError, "tool_choice: wanted none, auto, required or"),
        ({"tool_choice": "required"}, ValueError, "tool_choice: wanted one of the tools, which are none"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": [MOVE]},
            ValueError,
            "tool_choice: wanted one of the tools, which are move; got",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(
    model: lily.Model, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    for work in (model.stream, model.generate):
        with pytest.raises(error, match=f"^{message}"):
            work(QUESTION, **settings)


def test_choices_of_tools() -> None:
    tools = [MOVE, WAIT]
    choice: Callable[[object], ToolChoice] = lambda said: ToolChoice(said, tools)  # noqa: E731
    assert (choice(None).tools, choice("auto").forced) == (tuple(tools), False)
    assert (choice("none").tools, choice("none").forced) == ((), False)
    assert choice("required").forced
    assert choice({"name": "wait"}).tools == (WAIT,)


def test_what_is_not_installed_is_named(model: lily.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    import lily.guide

    monkeypatch.setitem(sys.modules, "llguidance", None)
    lily.guide._library.cache_clear()
    with pytest.raises(lily.LilyError, match=r"pip install '\.\[structured\]' in a checkout of Lily"):
        model.stream(QUESTION, regex="a")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(
        lily.LilyError, match=r"\(uvicorn\): pip install '\.\[server\]' in a checkout of Lily"
    ):
        model.serve(port=0)
