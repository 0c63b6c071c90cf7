"""What JSON the text of a tool's parameter stands for, by the tool's schema.

The format writes strings as they are and everything else as JSON, so the text alone doesn't say which it is.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_DEPTH = 16  # of references and choices that are followed


class Parameters:
    """The schema of a function's arguments.

    names: the parameters that it declares, in their order.
    """

    def __init__(self, schema: object) -> None:
        """Read a schema; anything that is none declares nothing."""
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        declared = self._resolve(self._root).get("properties")
        self._properties: Mapping[str, Any] = declared if isinstance(declared, Mapping) else {}
        self.names = tuple(self._properties)

    def plain(self, name: str) -> bool:
        """Return whether a parameter's text is its value: one that is a string, or not declared."""
        return name not in self._properties or self._types(self._properties[name]) == {"string"}

    def may_be_string(self, name: str) -> bool:
        """Return whether a parameter may be a string."""
        return name not in self._properties or "string" in self._types(self._properties[name])

    def choices(self, name: str) -> list[str] | None:
        """Return the strings that a parameter is one of; None if it may be something else."""
        schema = self._resolve(self._properties[name])
        named = [schema["const"]] if "const" in schema else schema.get("enum")
        strings = isinstance(named, list) and all(isinstance(each, str) for each in named)
        return list(named) if strings and named else None

    def schema(self, name: str) -> dict[str, Any]:
        """Return a parameter's schema with what it may refer to."""
        schema = self._properties[name]
        kept = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return (dict(schema) if isinstance(schema, Mapping) else {}) | kept

    def to_json(self, name: str, text: str) -> str:
        """Return the JSON that a parameter's text stands for; a string if it is nothing that is asked for."""
        string = json.dumps(text, ensure_ascii=False)
        if self.plain(name) or text in self._choices(self._properties[name]):
            return string
        literal = _literal(text.strip(), self._types(self._properties[name]))
        return string if literal is None else literal

    def _types(self, schema: object, depth: int = 0) -> frozenset[str]:
        """Return the JSON types that a schema may stand for; all of them if it doesn't say."""
        schema = self._resolve(schema)
        said = schema.get("type")
        if isinstance(said, str):
            return frozenset({said}) & _TYPES or _TYPES
        if isinstance(said, list):
            return frozenset(each for each in said if isinstance(each, str)) & _TYPES or _TYPES
        if isinstance(schema.get("enum"), list):
            return frozenset(map(_type_of, schema["enum"]))
        if "const" in schema:
            return frozenset({_type_of(schema["const"])})
        if depth < _DEPTH:
            for key in ("anyOf", "oneOf"):
                if isinstance(schema.get(key), list):
                    return frozenset().union(*(self._types(each, depth + 1) for each in schema[key]))
            if isinstance(schema.get("allOf"), list):
                return _TYPES.intersection(*(self._types(each, depth + 1) for each in schema["allOf"]))
        for kind, keys in (
            ("object", ("properties", "additionalProperties", "required")),
            ("array", ("items", "prefixItems", "minItems")),
        ):
            if any(key in schema for key in keys):
                return frozenset({kind})
        return _TYPES

    def _choices(self, schema: object, depth: int = 0) -> set[str]:
        """Return the strings that a schema names."""
        schema = self._resolve(schema)
        named = schema.get("enum") if isinstance(schema.get("enum"), list) else []
        found = {each for each in [*(named or []), schema.get("const")] if isinstance(each, str)}
        if depth < _DEPTH:
            for key in ("anyOf", "oneOf", "allOf"):
                for each in schema[key] if isinstance(schema.get(key), list) else []:
                    found |= self._choices(each, depth + 1)
        return found

    def _resolve(self, schema: object) -> Mapping[str, Any]:
        """Return a schema, or the part of the root that it refers to."""
        for _ in range(_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                break
            found: Any = self._root
            for step in reference.lstrip("#").strip("/").split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                found = found.get(step) if isinstance(found, Mapping) and step else found
            schema = found
        return schema if isinstance(schema, Mapping) else {}


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
    fits = kind in types or (kind == "integer" and "number" in types)
    fits = fits or (kind == "number" and "integer" in types and float(value).is_integer())
    return text if fits else None


def _whole(text: str) -> int:
    int(text)  # ValueError for more digits than Python's own reader of JSON takes
    return 0


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text}: JSON has no number for it")
    return value
