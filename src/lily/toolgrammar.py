"""The grammar of a tool's arguments: Qwen's XML around the values that the tool's schema allows.

The format writes strings as they are and everything else as JSON. So what a schema says of strings becomes
regular expressions here, and the rest is llguidance's own JSON. A schema that says more than these can see to
is refused, by the name of what can't be.
"""

import json
from collections.abc import Callable, Mapping, Set
from typing import Any

from lily.tooltypes import Parameters, is_of, with_references_to

# As models write JSON, and no room for white space without end.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_ANY = "/(?s:.*)/"
_DEPTH = 16  # of references and choices that are followed
# Of a schema's keywords, those that say something of strings; of arguments as a whole; and all that exclude
# something. Others are notes.
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
# Of arguments as a whole, and what each may say without excluding any that the grammar writes.
_OF_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    name: lambda said: False
    for name in (
        "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum",
        "if", "maxProperties", "minProperties", "not", "oneOf", "patternProperties", "propertyNames", "then",
        "unevaluatedProperties",
    )
} | {
    "patternProperties": lambda said: said == {},
    "unevaluatedProperties": lambda said: isinstance(said, bool),
    "minProperties": lambda said: said == 0,
}  # fmt: skip

_YEAR, _MONTH, _DAY = "[0-9]{4}", "(0[1-9]|1[0-2])", "(0[1-9]|[12][0-9]|3[01])"
_DAYS = f"(({_MONTH}-(0[1-9]|1[0-9]|2[0-8]))|((0[13-9]|1[0-2])-(29|30))|((0[13578]|1[02])-31))"
_DATE = f"{_YEAR}-{_DAYS}"  # without the 29th of February: not every year has one
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {  # narrower than what they stand for is good enough: each text that they let through is one
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,4}W|[0-9]{1,4}D(T[0-9]{1,4}H)?|T[0-9]{1,4}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}|([0-9a-f]{1,4}(:[0-9a-f]{1,4}){0,2})?::"
    "([0-9a-f]{1,4}(:[0-9a-f]{1,4}){0,2})?",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": r"[a-z][a-z0-9+.-]{1,15}://[A-Za-z0-9._~:\/?&=+,;@!$()*-]{1,2000}",
}


class Arguments:
    """The grammar of one function's arguments, in Lark's notation.

    expression: str, of all of them.  rules: list of str, what it refers to.
    strings: dict of the rules of strings that not every string fits, and the path of their schema.
    """

    def __init__(
        self, prefix: str, where: str, schema: object, compiles: Callable[[Mapping[str, Any]], str | None]
    ) -> None:
        """Write it.

        prefix: what the rules' names begin with.  where: path of the schema, for errors.
        compiles: returns why llguidance can't follow a JSON schema, None if it can.
        Raises ValueError, which names the keyword, for what can't be seen to.
        """
        self._read = read = Parameters(schema)
        self._compiles = compiles
        self._prefix = prefix
        self._rule_of: dict[str, str] = {}  # the rules of strings, by their expressions
        self.rules: list[str] = []
        self.strings: dict[str, str] = {}
        _check_whole(where, read)
        if not read.names and not read.required:
            self.expression = "" if read.closed else self._anything()
            return
        parts = []
        for j, key in enumerate(dict.fromkeys((*read.names, *read.required))):
            if read.schema(key) is False and key not in read.required:
                continue  # it says that there is no such parameter
            value = self._value(f"{prefix}_{j}", f"{where}.properties.{key}", key)
            self.rules.append(f"{prefix}_{j}: {quoted(f'<parameter={key}>' + chr(10))} {value}")
            parts.append(f"{prefix}_{j}" if key in read.required else f"{prefix}_{j}?")
        self.expression = " ".join(parts)

    def _anything(self) -> str:
        """Write parameters of any names, for a schema that declares none."""
        head = '"<parameter=" /[A-Za-z_][A-Za-z0-9_.-]{0,63}/ ">\\n"'
        self.rules.append(f"{self._prefix}_p: {head} {self._string('', _ANY)}")
        return f"{self._prefix}_p*"

    def _value(self, name: str, place: str, key: str) -> str:
        """Write the rules of a parameter's value and of the tag behind it; return the first one's name."""
        schema, self._place = self._read.schema(key), place
        if (choices := self._choices(place, schema)) is not None:
            return f"({' | '.join(map(quoted, choices))}) {_END}"
        strings = self._strings(place, schema)
        types = self._read.types(schema)
        if strings is None:
            return self._json(name, place, schema, types)
        if types == {"string"} or (strings == _ANY and self._free(schema)):
            return self._string(place, strings)
        return self._mixed(name, place, schema, strings)

    def _choices(self, place: str, schema: Any) -> list[str] | None:
        """Return what a value that is one of a few is written as; None for other schemas."""
        schema = self._read.resolve(schema)
        named = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(named, list) or (_KNOWN & schema.keys()) - {"const", "enum", "type"}:
            return None
        written = [
            each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)
            for each in named
            if is_of(each, self._read.types({"type": schema.get("type")}))
        ]
        tags = ("</parameter>", "</function>", "</tool_call>", "\n<parameter=")
        written = [each for each in dict.fromkeys(written) if not any(tag in each for tag in tags)]
        if not written:
            raise ValueError(
                f"{place}.enum: wanted at least one value that a call can have, got {named!r:.60}"
            )
        return written

    def _mixed(self, name: str, place: str, schema: Any, strings: str) -> str:
        """Write a value that may be a string, or something else, which a string must not look like."""
        others = self._read.types(schema) - {"string"}
        alternatives, words, looks = [], [], []
        for word, kind in (("null", "null"), ("true", "boolean"), ("false", "boolean")):
            if kind in others:
                looks.append(word if kind == "null" else f"({word}|{word.capitalize()})")
                if self._compiles(self._part(schema, {"enum": [json.loads(word)]})) is None:
                    words.append(quoted(word))
        looks = [rf"\s*{look}\s*" for look in looks]
        looks += [r"\s*-?[0-9](?s:.*)"] if others & {"integer", "number"} else []
        looks += [
            rf"\s*\{start}(?s:.*)" for start, kind in (("[", "array"), ("{", "object")) if kind in others
        ]
        longer = others - {"null", "boolean"}
        if longer and self._compiles(self._part(schema, {"type": sorted(longer)})) is None:
            alternatives.append(self._json(name, place, schema, longer))
        if words:
            alternatives.append(f"({' | '.join(words)}) {_END}")
        apart = "".join(f" & ~/{look}/" for look in looks)
        alternatives.append(self._string(place, strings + apart))
        return f"({' | '.join(alternatives)})"

    def _string(self, place: str, expression: str) -> str:
        """Write the rule of a string and the tag behind it, which nothing in the string is taken for."""
        if (known := self._rule_of.get(expression)) is not None:
            return known
        names = "|".join(map(_escaped, self._read.names))
        parameter = rf"|\n<parameter=\s*({names})\s*>" if names else ""
        ends = (
            r"/(?s:.*)(<\/parameter>\s*(<parameter=|<\/function>|<\/?tool_call>)"
            rf"|<\/function>\s*<\/?tool_call>|<\/tool_call>\s*<tool_call>{parameter})(?s:.*)/"
        )
        rule = f"{self._prefix}_s{len(self._rule_of)}"
        self.rules.append(f"{rule}[suffix={_END}]: {rule.upper()}")
        self.rules.append(f"{rule.upper()}: {expression} & ~{ends}")
        self._rule_of[expression] = rule
        if expression != _ANY:
            self.strings[rule] = place
        return rule

    def _json(self, name: str, place: str, schema: Any, kinds: Set[str]) -> str:
        """Write the rule of a value of some types, none of them a string."""
        part = self._part(schema, {"type": sorted(kinds)} if kinds != self._read.types(schema) else {})
        if (reason := self._compiles(part)) is not None:
            raise ValueError(f"{place}: wanted what a grammar can be made of, got {reason}")
        self.rules.append(f"{name}_j: %json {json.dumps({**part, 'x-guidance': LAYOUT})}")
        return f"{name}_j {_END}"

    def _part(self, schema: Any, only: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema of those of a schema's values that another one allows too."""
        whole = {True: {}, False: {"not": {}}}[schema] if isinstance(schema, bool) else schema
        return with_references_to(self._read.root, {"allOf": [whole, only]} if only else whole)

    def _free(self, schema: Any, depth: int = 0) -> bool:
        """Return whether a schema says nothing but types."""
        if not isinstance(schema, Mapping):
            return schema is True
        for name in _KNOWN & schema.keys():
            if name == "anyOf" and isinstance(schema[name], list) and depth < _DEPTH:
                if not all(self._free(each, depth + 1) for each in schema[name]):
                    return False
            elif name != "type":
                return False
        return True

    # What a schema says of strings

    def _strings(self, place: str, schema: Any, depth: int = 0) -> str | None:
        """Return a regular expression of the strings that a schema allows, None for no string."""
        if depth > _DEPTH:
            raise ValueError(f"{self._place}: wanted one that ends, got one in a circle, or nested too deep")
        if isinstance(schema, bool):
            return _ANY if schema else None
        if not isinstance(schema, Mapping):
            raise ValueError(f"{place}: wanted a JSON schema, got {type(schema).__name__}")
        said = schema.get("type")
        if said is not None and said != "string" and not (isinstance(said, list) and "string" in said):
            return None
        parts: list[str | None] = []
        if "$ref" in schema:
            parts.append(self._strings(f"{place}.$ref", self._read.follow(place, schema["$ref"]), depth + 1))
        named = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(named, list):
            strings = [each for each in named if isinstance(each, str)]
            parts.append(_any_of(list(map(quoted, strings))))
        parts += [
            _of_keyword(f"{place}.{name}", name, schema[name]) for name in _OF_STRINGS if name in schema
        ]
        parts += self._combined(place, schema, depth + 1)
        if any(part is None for part in parts):
            return None
        kept = [part for part in parts if part is not None and part != _ANY]
        return _ANY if not kept else kept[0] if len(kept) == 1 else f"({' & '.join(kept)})"

    def _combined(self, place: str, schema: Mapping[str, Any], depth: int) -> list[str | None]:
        def each(name: str) -> list[str | None]:
            several = schema[name]
            if not isinstance(several, list) or not several:
                raise ValueError(f"{place}.{name}: wanted a list of schemas, got {several!r:.40}")
            return [self._strings(f"{place}.{name}[{i}]", one, depth) for i, one in enumerate(several)]

        found: list[str | None] = []
        if "allOf" in schema:
            found += each("allOf")
        if "anyOf" in schema:
            found.append(_any_of(each("anyOf")))
        if "oneOf" in schema:
            several = [part for part in each("oneOf") if part is not None]
            found.append(
                _any_of(
                    [
                        _all_of([part, *(_not(other) for other in several[:i] + several[i + 1 :])])
                        for i, part in enumerate(several)
                    ]
                )
            )
        if "not" in schema:
            found.append(_not(self._strings(f"{place}.not", schema["not"], depth)))
        if "if" in schema:
            asked = self._strings(f"{place}.if", schema["if"], depth)
            then = self._strings(f"{place}.then", schema.get("then", True), depth)
            other = self._strings(f"{place}.else", schema.get("else", True), depth)
            found.append(_any_of([_all_of([asked, then]), _all_of([_not(asked), other])]))
        return found


_END = '"\\n</parameter>\\n"'
_KNOWN = frozenset(
    (
        *_OF_STRINGS, *_OF_ARGUMENTS, "$ref", "$dynamicRef", "$recursiveRef", "additionalItems",
        "additionalProperties", "contains", "exclusiveMaximum", "exclusiveMinimum", "items", "maxContains",
        "maxItems", "maximum", "minContains", "minItems", "minimum", "multipleOf", "prefixItems",
        "properties", "required", "type", "unevaluatedItems", "uniqueItems",
    )
)  # fmt: skip


def quoted(text: str) -> str:
    """Return a text as Lark's notation has it."""
    return json.dumps(text, ensure_ascii=False)


def _check_whole(where: str, read: Parameters) -> None:
    """Raise ValueError unless a grammar of one parameter after the other is all that the schema says."""
    root = read.resolved
    kind = root.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"{where}.type: wanted object, got {kind!r:.40}")
    for name, harmless in _OF_ARGUMENTS.items():
        if name in root and not harmless(root[name]):
            raise ValueError(
                f"{where}.{name}: what it says of the arguments as a whole can't be seen to in a call that "
                "must be made, or is strict; leave it out, or say it in properties"
            )
    needed = root.get("required", [])
    if not isinstance(needed, list) or not all(isinstance(each, str) for each in needed):
        raise ValueError(f"{where}.required: wanted a list of str, got {needed!r:.60}")
    more = root.get("additionalProperties", True)
    undeclared = [key for key in read.required if key not in read.names]
    if undeclared and more not in (True, {}):
        raise ValueError(f"{where}.required: wanted names that properties has, got {undeclared[0]!r:.60}")
    if not isinstance(more, bool) and more != {} and not read.names:
        raise ValueError(
            f"{where}.additionalProperties: parameters without names can't be held to a schema in a call "
            "that must be made, or is strict; declare them in properties"
        )


def _any_of(parts: list[str | None]) -> str | None:
    kept = list(dict.fromkeys(part for part in parts if part is not None))
    if not kept:
        return None
    return _ANY if _ANY in kept else kept[0] if len(kept) == 1 else f"({' | '.join(kept)})"


def _all_of(parts: list[str | None]) -> str | None:
    if any(part is None for part in parts):
        return None
    kept = [part for part in parts if part is not None and part != _ANY]
    return _ANY if not kept else kept[0] if len(kept) == 1 else f"({' & '.join(kept)})"


def _not(part: str | None) -> str | None:
    return _ANY if part is None else None if part == _ANY else f"~({part})"


def _of_keyword(where: str, name: str, said: Any) -> str:
    """Return the expression of what one keyword says of strings."""
    if name in ("minLength", "maxLength"):
        if isinstance(said, bool) or not isinstance(said, int | float) or said < 0 or said != int(said):
            raise ValueError(f"{where}: wanted a whole number of at least 0, got {said!r:.40}")
        return f"/(?s:.{{0,{int(said)}}})/" if name == "maxLength" else f"/(?s:.{{{int(said)},}})/"
    if not isinstance(said, str):
        raise ValueError(f"{where}: wanted a str, got {type(said).__name__}")
    if name == "format":
        if said not in _FORMATS:
            raise ValueError(f"{where}: wanted one of {', '.join(_FORMATS)}, got {said!r:.40}; leave it out")
        return f"/{slashed(_FORMATS[said])}/"
    alternatives = []
    for each in _alternatives(where, said):
        begun, ended = each.startswith("^"), _ends_with_anchor(each)
        inner = each[1 if begun else 0 : len(each) - 1 if ended else len(each)]
        if _has_anchor(inner):
            raise ValueError(f"{where}: wanted ^ and $ at the ends of a pattern alone, got {said!r:.60}")
        alternatives.append(f"{'' if begun else '(?s:.*)'}(?:{inner}){'' if ended else '(?s:.*)'}")
    return f"/{slashed('|'.join(alternatives))}/"


def slashed(pattern: str) -> str:
    """Return a pattern as it stands between Lark's slashes, which is on one line."""
    written = []
    for _, text in _pieces(pattern):
        if text in ("/", "\\\n", "\n"):
            text = "\\/" if text == "/" else "\\n"
        written.append(text)
    return "".join(written)


def _pieces(pattern: str) -> list[tuple[str, str]]:
    """Return a pattern character by character, escaped ones with their backslash.

    Each has what it is: "class" for one in brackets, else "plain".
    """
    found, at, inside = [], 0, 0
    while at < len(pattern):
        length = 2 if pattern[at] == "\\" else 1
        text = pattern[at : at + length]
        # A bracket that is the first in a class closes nothing.
        found.append(("class" if inside else "plain", text))
        if text == "[":
            inside += 1
            for opening in ("^", "]"):
                if pattern.startswith(opening, at + length):
                    found.append(("class", opening))
                    at += 1
        elif text == "]" and inside:
            inside -= 1
        at += length
    return found


def _alternatives(where: str, pattern: str) -> list[str]:
    """Return what a pattern's outermost bars part."""
    parts, depth = [""], 0
    for kind, text in _pieces(pattern):
        depth += (text == "(") - (text == ")") if kind == "plain" else 0
        if kind == "plain" and text == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += text
    if depth:
        raise ValueError(
            f"{where}: wanted a regular expression, got {pattern!r:.60}, whose brackets don't pair"
        )
    return parts


def _ends_with_anchor(pattern: str) -> bool:
    pieces = _pieces(pattern)
    return bool(pieces) and pieces[-1] == ("plain", "$")


def _has_anchor(pattern: str) -> bool:
    return any(
        kind == "plain" and text in ("^", "$", "\\b", "\\B", "\\A", "\\z", "\\Z")
        for kind, text in _pieces(pattern)
    )


def _escaped(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-" else f"\\x{{{ord(c):x}}}" for c in name)
