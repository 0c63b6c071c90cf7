"""What JSON the text of a tool's parameter stands for, by the tool's schema.

The format writes strings as they are and everything else as JSON, so the text alone doesn't say which it is.
"""

import json
import math
from collections.abc import Mapping, Set
from typing import Any
from urllib.parse import unquote

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
MOST_LEVELS = 800  # of a schema, with all that it refers to
MOST_NODES = 1_000_000  # to look at in search of them
_DEPTH = 16  # of references and choices that are followed
_OF_NAMES = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
_OF_VALUES = frozenset(("const", "default", "enum", "examples"))  # what stands in them is no schema


class Parameters:
    """The schema of a function's arguments.

    names: the parameters that it declares, in their order.  required: those that must be there.
    root: the schema, to which references in it are relative.  resolved: it, or what it refers to.
    closed: bool, whether there are no others than those declared.
    """

    def __init__(self, schema: object) -> None:
        """Read a schema; anything that is none declares nothing."""
        self.root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self.resolved = self.resolve(self.root)
        declared, needed = self.resolved.get("properties"), self.resolved.get("required")
        self._properties: Mapping[str, Any] = declared if isinstance(declared, Mapping) else {}
        self.names = tuple(self._properties)
        self._plain: dict[str, bool] = {}
        self.required = (
            tuple(each for each in needed or () if isinstance(each, str)) if isinstance(needed, list) else ()
        )
        self.closed = declared is not None or self.resolved.get("additionalProperties") is False

    def plain(self, name: str) -> bool:
        """Return whether a parameter's text is its value: one that is a string, or not declared."""
        if name not in self._plain:  # it is asked for with every piece of a value
            schema = self._properties.get(name, {"type": "string"})
            self._plain[name] = self.types(schema) == {"string"}
        return self._plain[name]

    def schema(self, name: str) -> Any:
        """Return a parameter's schema; one that is required and not declared is a string."""
        return self._properties.get(name, {"type": "string"})

    def to_json(self, name: str, text: str) -> str:
        """Return the JSON that a parameter's text stands for; a string if it is nothing that is asked for."""
        string = json.dumps(text, ensure_ascii=False)
        if self.plain(name) or text in self._choices(self._properties[name]):
            return string
        literal = _literal(text.strip(), self.types(self._properties[name]))
        return string if literal is None else literal

    def types(self, schema: object, depth: int = 0) -> frozenset[str]:
        """Return the JSON types that a schema may stand for; all of them if it doesn't say."""
        schema = self.resolve(schema)
        said = schema.get("type")
        if isinstance(said, str):
            return frozenset({said}) & TYPES or TYPES
        if isinstance(said, list):
            return frozenset(each for each in said if isinstance(each, str)) & TYPES or TYPES
        if isinstance(schema.get("enum"), list):
            return frozenset(map(_type_of, schema["enum"]))
        if "const" in schema:
            return frozenset({_type_of(schema["const"])})
        if depth < _DEPTH:
            for key in ("anyOf", "oneOf"):
                if isinstance(schema.get(key), list):
                    return frozenset().union(*(self.types(each, depth + 1) for each in schema[key]))
            if isinstance(schema.get("allOf"), list):
                return TYPES.intersection(*(self.types(each, depth + 1) for each in schema["allOf"]))
        for kind, keys in (
            ("object", ("properties", "additionalProperties", "required")),
            ("array", ("items", "prefixItems", "minItems")),
        ):
            if any(key in schema for key in keys):
                return frozenset({kind})
        return TYPES

    def _choices(self, schema: object, depth: int = 0) -> set[str]:
        """Return the strings that a schema names."""
        schema = self.resolve(schema)
        named = schema.get("enum") if isinstance(schema.get("enum"), list) else []
        found = {each for each in [*(named or []), schema.get("const")] if isinstance(each, str)}
        if depth < _DEPTH:
            for key in ("anyOf", "oneOf", "allOf"):
                for each in schema[key] if isinstance(schema.get(key), list) else []:
                    found |= self._choices(each, depth + 1)
        return found

    def resolve(self, schema: object) -> Mapping[str, Any]:
        """Return a schema, or the part of the root that it refers to."""
        for _ in range(_DEPTH):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = self.at(schema["$ref"])
        return schema if isinstance(schema, Mapping) else {}

    def follow(self, place: str, reference: object) -> Any:
        """Return the part of the root that a reference names; ValueError, which names the place, if none."""
        found = self.at(reference) if isinstance(reference, str) else None
        if found is None:
            raise ValueError(f"{place}.$ref: wanted a place in the tool's parameters, got {reference!r:.60}")
        return found

    def at(self, reference: str) -> Any:
        """Return what a reference names, None if it is not in the root."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        found: Any = self.root
        for step in unquote(reference).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and int(step[:9]) < len(found):
                found = found[int(step)]
            else:
                return None
        return found


def with_references_to(root: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema whose references, which are relative to the root, hold on their own."""
    moved, found = _moved(schema)
    if not found:
        return dict(moved)
    whole, _ = _moved({name: said for name, said in root.items() if name not in ("$id", "$schema")})
    return {**moved, "$defs": {"root": whole}}


def _moved(schema: Any) -> tuple[Any, bool]:
    """Return a schema whose references lead to "#/$defs/root", and whether it has any."""
    if isinstance(schema, list):
        several = [_moved(each) for each in schema]
        return [each for each, _ in several], any(found for _, found in several)
    if not isinstance(schema, Mapping):
        return schema, False
    moved, any_found = {}, False
    for name, said in schema.items():
        found = False
        if name == "$ref" and isinstance(said, str) and (said == "#" or said.startswith("#/")):
            said, found = "#/$defs/root" + said[1:], True
        elif name in _OF_NAMES and isinstance(said, Mapping):
            named = {key: _moved(each) for key, each in said.items()}
            said = {key: each for key, (each, _) in named.items()}
            found = any(inner for _, inner in named.values())
        elif name not in _OF_VALUES:
            said, found = _moved(said)
        moved[name] = said
        any_found = any_found or found
    return moved, any_found


def levels(schema: object) -> int:
    """Return how many levels deep whoever follows a schema's references may get, each of them once.

    What follows it in native code goes as deep as that on its stack, and nothing there looks for its end.
    """
    read, seen, nodes = Parameters(schema), set(), 0

    def height(part: object) -> int:
        nonlocal nodes
        nodes += 1
        if nodes > MOST_NODES:
            return MOST_LEVELS
        if isinstance(part, Mapping):
            if isinstance(reference := part.get("$ref"), str) and reference not in seen:
                seen.add(reference)
                waiting.append(read.at(reference))
            return 1 + max(map(height, part.values()), default=0)
        return max(map(height, part), default=0) if isinstance(part, list) else 0

    waiting: list[object] = [schema]
    total = 0
    try:
        while waiting and total <= MOST_LEVELS:
            total += height(waiting.pop())
    except RecursionError:
        return MOST_LEVELS + 1
    return total


def has_end(schema: object) -> bool:
    """Return whether a schema's references leave room for a finite value: not if each needs another one."""
    steps = 10_000  # enough for any schema that means well
    read = Parameters(schema)

    def ends(part: object, followed: frozenset[str]) -> bool:
        nonlocal steps
        steps -= 1
        if steps < 0 or not isinstance(part, Mapping):
            return True
        reference = part.get("$ref")
        if isinstance(reference, str) and (
            reference in followed or not ends(read.at(reference), followed | {reference})
        ):
            return False
        for name, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            several = part.get(name)
            if isinstance(several, list) and several and not enough(ends(each, followed) for each in several):
                return False
        needed: list[object] = []
        if part.get("type") in ("object", ["object"]):
            inner = Parameters(part)
            needed = [inner.schema(name) for name in inner.required] if "$ref" not in part else []
        elif part.get("type") in ("array", ["array"]) and part.get("minItems"):
            needed = [part.get("items")]
        return all(ends(each, followed) for each in needed)

    try:
        return ends(schema, frozenset())
    except RecursionError:
        return True


def is_of(value: object, types: Set[str]) -> bool:
    """Return whether a value of JSON has one of some types."""
    kind = _type_of(value)
    if kind == "number" and "integer" in types and float(value).is_integer():  # type: ignore[arg-type]
        return True
    return kind in types or (kind == "integer" and "number" in types)


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def _literal(text: str, types: frozenset[str]) -> str | None:
    """Return text as JSON of one of some types; None if it is not."""
    if "boolean" in types and text in ("True", "False"):
        return text.lower()
    if "null" in types and "string" not in types and text == "None":
        return "null"
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    kind = _type_of(value)
    if kind == "string":  # a string would stand there without quotes
        return None
    return text if is_of(value, types) else None


def _whole(text: str) -> int:
    int(text)  # ValueError for more digits than Python's own reader of JSON takes
    return 0


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text}: JSON has no number for it")
    return value
