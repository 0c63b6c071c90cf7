"""Calls that must be made, or are strict: whatever the logits, their schema validates the arguments."""

import datetime
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

import lily
from lily.guide import guide_of
from lily.messages import check_tools
from lily.tooltypes import Parameters
from scripted import scripted
from test_guide import QUESTION, random_logits

WORDS = {"type": "string", "maxLength": 8}
FORMATS = jsonschema.FormatChecker()
FORMATS.checks("time", ValueError)(lambda said: bool(datetime.time.fromisoformat(said)) or True)
FORMATS.checks("date-time", ValueError)(lambda said: bool(datetime.datetime.fromisoformat(said)))
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2}
CLOSED = {"type": "object", "additionalProperties": False}
SCHEMAS: list[dict[str, Any]] = [
    {"properties": {"x": {"type": "string", "pattern": "^[a-c]{2,4}$"}}},
    {"properties": {"x": {"type": "string", "pattern": "b", "maxLength": 6}}},
    {"properties": {"x": {"type": "string", "pattern": "^a/b$|^(c|d)+\\$$", "maxLength": 5}}},
    {"properties": {"x": {"type": "string", "pattern": "^[]^$|]{1,3}$"}}},
    {"properties": {"x": {"type": "string", "minLength": 3, "maxLength": 5}}},
    {"properties": {"x": {"type": "string", "format": "date"}}},
    {"properties": {"x": {"type": "string", "format": "date-time"}}},
    {"properties": {"x": {"type": "string", "format": "time"}}},
    {"properties": {"x": {"type": "string", "format": "uuid"}}},
    {"properties": {"x": {"type": "string", "format": "ipv4"}}},
    {"properties": {"x": {"type": "string", "format": "ipv6"}}},
    {"properties": {"x": {"type": "string", "format": "hostname", "maxLength": 12}}},
    {"properties": {"x": {"type": "string", "format": "email", "maxLength": 20}}},
    {"properties": {"x": {"enum": ["a", "1", 1, 2.5, None, True, "true", [1, "b"], {"k": "v"}]}}},
    {"properties": {"x": {"enum": ["a", 1], "type": "string"}}},
    {"properties": {"x": {"const": "one\ntwo"}}},
    {"properties": {"x": {"const": ""}}},
    {"properties": {"x": {"anyOf": [WORDS, {"type": "null"}]}}},
    {"properties": {"x": {"anyOf": [WORDS, {"type": "integer", "minimum": 100, "maximum": 200}]}}},
    {"properties": {"x": {"anyOf": [WORDS, {"type": "boolean"}, {"type": "null"}]}}},
    {"properties": {"x": {"anyOf": [WORDS, DIGITS]}}},
    {"properties": {"x": {"type": ["string", "null"], "minLength": 2, "maxLength": 4}}},
    {"properties": {"x": {"type": "string", "maxLength": 6, "oneOf": [{"maxLength": 3}, {"minLength": 2}]}}},
    {"properties": {"x": {"allOf": [{"type": "string", "maxLength": 6}, {"pattern": "^[x-z]"}]}}},
    {"properties": {"x": {"type": "string", "not": {"pattern": "[a-z]"}, "maxLength": 6}}},
    {
        "properties": {
            "x": {
                "type": "string",
                "if": {"pattern": "^a"},
                "then": {"minLength": 3},
                "else": {"maxLength": 2},
                "maxLength": 5,
            }
        }
    },
    {"properties": {"x": {"maxLength": 4}}},
    {"properties": {"x": {"type": "string", "maxLength": 9}, "y": {"type": "string", "maxLength": 9}}},
    {
        "properties": {
            "x": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"$ref": "#"}]},
        },
        "additionalProperties": False,
    },
    {
        "$defs": {"Node": {**CLOSED, "properties": {"next": {"$ref": "#/$defs/Node"}}}},
        "properties": {"x": {"$ref": "#/$defs/Node"}},
    },
    {"properties": {"y": {"type": "string", "maxLength": 3}, "x": {"$ref": "#/properties/y"}}},
    {"properties": {"a/b": WORDS, "x": {"$ref": "#/properties/a~1b"}}},
    {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"x": WORDS}, "required": ["x"]}}},
    {"properties": {"x": {**CLOSED, "properties": {"enum": {"const": "$ref"}}, "required": ["enum"]}}},
    {"properties": {}, "minProperties": 0},
    {"type": "object", "properties": {"x": WORDS, "y": False}, "required": ["x"]},
]  # fmt: skip


def tool_of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


def whole(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of which every parameter that it declares must be there."""
    if "$ref" in schema or not schema["properties"] or "required" in schema:
        return schema
    return {"type": "object", "required": list(schema["properties"]), **schema}


def answers(model: lily.Model, tool: dict[str, Any], runs: int, **settings: Any) -> Iterator[lily.Completion]:
    for run in range(runs):
        with random_logits(model, run):
            yield model.generate(
                QUESTION, tools=[tool], max_tokens=3000, top_k=0, top_p=1.0, seed=run, **settings
            )


@pytest.mark.parametrize("schema", SCHEMAS, ids=[str(i) for i in range(len(SCHEMAS))])
def test_calls_validate_whatever_the_logits(model: lily.Model, schema: dict[str, Any]) -> None:
    schema = whole(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    tool = tool_of(schema)
    found = set()
    settings: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "thinking": False}
    for done in answers(model, tool, 12, **settings):
        if done.finish_reason == "length":
            assert "maxLength" not in json.dumps(schema)  # a string may go on for ever
            continue
        (call,) = done.tool_calls
        validator.validate(call.parsed)
        found.add(call.arguments)
    assert found


def can_follow(model: lily.Model, schema: Any, value: str) -> bool:
    """Return whether a call that must be made may have this as its parameter x, as it is written."""
    guide = guide_of(
        model._engine, {}, lily.guide.ToolChoice("required", check_tools([tool_of(schema)])), thinking=False
    )
    assert guide is not None
    end = "\n</parameter>\n</function>\n</tool_call>"
    call = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}{end}"
    for token in model.tokenizer.encode(call, markers=True):
        mask = guide.allowed(False, 0)
        assert mask is not None
        if not mask[token // 32] >> np.uint32(token % 32) & 1:
            return False
        guide.take(token)
    return True


@pytest.mark.parametrize(
    ("schema", "fits", "others"),
    [
        ({"type": "string", "pattern": "^a+$"}, ["aaa"], ["", "b", "aab"]),
        ({"type": "string", "pattern": "a+"}, ["xaax", "a"], ["", "b"]),
        ({"type": "string", "pattern": "a\\\nb"}, ["xa\nb"], ["anb", "a\\nb"]),
        ({"type": "string", "maxLength": 3000}, ["ab " * 900, "<b>\n</b>\n"], ["ab " * 1100]),
        ({"type": "string", "minLength": 3}, ["abc", "a\n\nb"], ["ab"]),
        ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-02-30", "2024-2-1", "today"]),
        ({"enum": ["a", 1, None]}, ["a", "1", "null"], ["b", "2", '"a"', "true"]),
        ({"type": ["string", "null"], "maxLength": 5}, ["north", "null", "nulls"], ["northern"]),
        (
            {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "integer", "minimum": 7}]},
            ["seven", "7", "12"],
            ["6", "sevens"],
        ),
        (
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            ["words, many", "[1, 2]"],
            ["[a]", ' ["a"]'],
        ),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["5 apples", "5", "[x"], []),
        # What the reader would take for the end of the value is no part of a string.
        (
            {"type": "string"},
            ["</parameter> and </function>", "<parameter=x>", "a\n<parameter=z>"],
            ["</parameter></function>", "</function>\n</tool_call>", "a\n<parameter=x>"],
        ),
    ],
)  # fmt: skip
def test_what_a_string_may_be(model: lily.Model, schema: Any, fits: list[str], others: list[str]) -> None:
    schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    assert [value for value in fits if not can_follow(model, schema, value)] == []
    assert [value for value in others if can_follow(model, schema, value)] == []


def test_what_is_required_is_there_though_it_is_not_declared(model: lily.Model) -> None:
    tool = tool_of({"properties": {"x": WORDS}, "required": ["x", "y"]})
    call = "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n"
    end = "</function>\n</tool_call>"
    with scripted(model, f"</think>\n\n{call}<parameter=y>\nb\n</parameter>\n{end}"):
        done = model.generate(QUESTION, tools=[tool], tool_choice="required")
    assert done.tool_calls[0].parsed == {"x": "a", "y": "b"}
    with scripted(model, f"</think>\n\n{call}{end}"), pytest.raises(lily.LilyError, match="does not go on"):
        model.generate(QUESTION, tools=[tool], tool_choice="required")


PLACE = "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        *(
            ({"properties": {"x": WORDS}, **more}, f"{PLACE}.{next(iter(more))}")
            for more in (
                {"oneOf": [{"required": ["x"]}]}, {"anyOf": [{"required": ["x"]}]}, {"allOf": [{}]},
                {"not": {"required": ["x"]}}, {"minProperties": 1}, {"maxProperties": 1}, {"const": {}},
                {"enum": [{}]}, {"if": {}}, {"dependentRequired": {"x": ["y"]}}, {"propertyNames": {}},
                {"dependentSchemas": {}}, {"patternProperties": {"^x": {}}}, {"type": "array"},
                {"required": ["y"], "additionalProperties": False}, {"unevaluatedProperties": {}},
            )
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, f"{PLACE}.additionalProperties"),
        ({"properties": {"x": {"type": "string", "format": "path"}}}, f"{PLACE}.properties.x.format"),
        ({"properties": {"x": {"type": "string", "pattern": "(^a)b"}}}, f"{PLACE}.properties.x.pattern"),
        ({"properties": {"x": {"type": "string", "pattern": "a)"}}}, f"{PLACE}.properties.x.pattern"),
        ({"properties": {"x": {"type": "string", "pattern": "a(?=b)"}}}, f"{PLACE}.properties.x"),
        ({"properties": {"x": {"type": "string", "pattern": 1}}}, f"{PLACE}.properties.x.pattern"),
        ({"properties": {"x": {"type": "string", "maxLength": -1}}}, f"{PLACE}.properties.x.maxLength"),
        ({"properties": {"x": {"type": "string", "maxLength": 1, "minLength": 2}}}, f"{PLACE}.properties.x"),
        ({"properties": {"x": {"type": "integer", "maximum": 1, "minimum": 2}}}, f"{PLACE}.properties.x"),
        ({"properties": {"x": {"type": "object", "not": {}}}}, f"{PLACE}.properties.x"),
        ({"properties": {"x": {"type": "string", "$ref": "#/$defs/none"}}}, f"{PLACE}.properties.x.$ref"),
        ({"properties": {"x": {"$ref": "http://example.org/x"}}}, f"{PLACE}.properties.x.$ref"),
        ({"properties": {"x": {"enum": []}}}, f"{PLACE}.properties.x.enum"),
        ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, PLACE),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, f"{PLACE}.properties.x"),
        ({"properties": {"x": {"allOf": [{"$ref": "#/properties/x"}]}}}, f"{PLACE}.properties.x"),
        ({"properties": {"x": False}, "required": ["x"]}, f"{PLACE}.properties.x"),
        ({"properties": {"x": 5}}, f"{PLACE}.properties.x"),
        ({"properties": {"x": WORDS}, "required": "x"}, f"{PLACE}.required"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_to_is_refused_by_name(model: lily.Model, schema: Any, place: str) -> None:
    """In calls that must be made and in strict ones; in others the schema only says how to read them."""
    for tool, settings in (
        (tool_of(schema), {"tool_choice": "required"}),
        (tool_of(schema, strict=True), {}),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(place)}: "):
            model.stream(QUESTION, tools=[tool], **settings)
    with scripted(model, "</think>No."):
        assert model.generate(QUESTION, tools=[tool_of(schema)]).text == "No."


def test_the_path_is_that_of_the_request(model: lily.Model) -> None:
    bad = {"type": "function", "function": {"name": "g", "parameters": {"oneOf": [{}]}}}
    with pytest.raises(ValueError, match=r"^tools\[1\]\.function\.parameters\.oneOf: "):
        model.stream(
            QUESTION, tools=[tool_of({}), bad], tool_choice={"type": "function", "function": {"name": "g"}}
        )


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a\nb", "a>b", "a<b", "\n", "x" * 256, 5, None])
def test_names_that_no_tag_can_spell(model: lily.Model, name: Any) -> None:
    for tool, place in (
        ({"type": "function", "function": {"name": name}}, "tools[0].function.name"),
        (tool_of({"properties": {name: {}}}), "tools[0].function.parameters.properties"),
    ):
        with pytest.raises((ValueError, TypeError)) as raised:
            model.stream(QUESTION, tools=[tool])
        assert str(raised.value).partition(": ")[0] == place


def test_tools_that_cannot_be_told_apart() -> None:
    with pytest.raises(
        ValueError, match=r"^tools\[1\]\.function\.name: wanted a name of its own, got 'f' as too"
    ):
        check_tools([tool_of({}), tool_of({})])
    with pytest.raises(TypeError, match=r"^tools\[0\]\.function\.strict: wanted a bool, got str"):
        check_tools([tool_of({}, strict="yes")])
    with pytest.raises(TypeError, match=r"^tools\[0\]\.function\.parameters: wanted a JSON schema, got list"):
        check_tools([tool_of([])])
    with pytest.raises(
        TypeError, match=r"^tools\[0\]\.function\.parameters\.properties: wanted a dict, got int"
    ):
        check_tools([tool_of({"properties": 5})])


def test_references_lead_into_the_parameters() -> None:
    schema = {
        "$defs": {"a b": {"type": "integer"}, "list": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}},
        "properties": {
            "one": {"$ref": "#/$defs/a%20b"},
            "two": {"$ref": "#/$defs/list/anyOf/1"},
            "self": {"$ref": "#"},
            "none": {"$ref": "#/$defs/list/anyOf/2"},
        },
        "type": "object",
    }
    read = Parameters(schema)
    assert read.to_json("one", "5") == "5"
    assert read.to_json("two", "true") == "true"
    assert read.to_json("two", "null") == '"null"'
    assert read.to_json("self", '{"one": 5}') == '{"one": 5}'
    assert read.to_json("self", "5") == '"5"'
    assert read.to_json("none", "5") == "5"


def chain(levels: int, link: Any) -> dict[str, Any]:
    defs = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{levels}": {"type": "null"}}}


def test_what_would_overflow_a_stack_is_refused(model: lily.Model) -> None:
    """llguidance goes down a chain of rules, or references, on the stack, whose end is the process's."""
    links: list[Any] = [
        lambda after: after,
        lambda after: {"type": "array", "items": after},
        lambda after: {"type": "object", "properties": {"x": after}},
        lambda after: {"type": "object", "properties": {"x": {"anyOf": [{"items": after, "type": "array"}]}}},
    ]
    rules = "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(5000))
    settings: list[dict[str, Any]] = [
        {"grammar": f'start: r0\n{rules}\nr5000: "c"'},
        {"grammar": f"start: %json {json.dumps(chain(5000, links[2]))}"},
        *({"schema": chain(5000, link)} for link in links),
    ]
    for each in settings:
        name = next(iter(each))
        with pytest.raises(ValueError, match=f"^{name}: wanted at most [0-9]+ (rules|levels)"):
            model.stream(QUESTION, **each)
    deep = chain(5000, links[1])
    whole = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": deep["$defs"]}
    with pytest.raises(ValueError, match=r"^tools\[0\]\.function\.parameters: wanted at most 800 levels"):
        can_follow(model, whole, "")
    for link in links:  # as deep as may be
        model.stream(QUESTION, schema=chain(100, link))
    rules = "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(498))
    model.stream(QUESTION, grammar=f'start: r0\n{rules}\nr498: "c"')


def test_what_no_text_fits_is_refused_before_any_work(model: lily.Model) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    for settings in (
        {"regex": r"[^\s\S]"},
        {"regex": "ab[^\\s\\S]"},
        {"grammar": 'start: start "a"'},
        {"grammar": 'start: "q" A\nA: /ax/ & /ay/'},
        {"schema": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"schema": {"$ref": "#"}},
        {"schema": endless},
        {"schema": {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}]}}}},
        {"schema": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}},
    ):
        name = next(iter(settings))
        with pytest.raises(ValueError, match=f"^{name}: wanted "):
            model.stream(QUESTION, **settings)
    tree = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    with random_logits(model, 1):
        assert model.generate(QUESTION, schema=tree, thinking=False, max_tokens=2000, seed=1).text
