"""Turns Metal's syntax into what clang's "C++ for OpenCL" front end reads; kernels are in kernels.py.

Only syntax that the front end lacks is touched: address spaces, types and overloads stay as written, so that
it judges them. Lines keep their numbers.
"""

import re

from tools.metal.tokens import OPENING, Source

SCALARS = [
    "bool",
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "half",
    "float",
    "bfloat",
]
VECTORS = {f"{scalar}{count}" for scalar in SCALARS for count in (2, 3, 4)}
SPACES = ("thread", "device", "threadgroup", "constant")
# Attributes that are not Metal's and may stay: C++'s own and clang's.
PLAIN_ATTRIBUTES = {
    "maybe_unused",
    "unused",
    "fallthrough",
    "nodiscard",
    "clang",
    "gnu",
    "unroll",
    "likely",
    "unlikely",
}
METAL_ATTRIBUTES = {
    "kernel",
    "host_name",
    "buffer",
    "threadgroup",
    "function_constant",
    "max_total_threads_per_threadgroup",
    "id",
    "thread_position_in_grid",
    "threads_per_grid",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "required_threads_per_threadgroup",
    "visible",
    "stitchable",
}
FLOAT_LITERAL = re.compile(r"(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")
BFLOAT_LITERAL = re.compile(r"([0-9.]+(?:[eE][+-]?\d+)?)[bB][fF]")


def rewrite(source: Source) -> None:
    """Rewrite a source whose kernels have been found (kernels.find) already."""
    type_names = aliases(source)
    attributes(source)
    source.index()
    structs(source)
    source.index()
    constant_thread_references(source)
    static_casts(source)
    braced_arguments(source)
    source.index()
    matmul_descriptors(source)
    source.index()
    threadgroup_variables(source)
    source.index()
    direct_initialisers(source)
    source.index()
    short_initialisers(source, type_names)
    source.index()
    constructor_calls(source, type_names)
    literals(source)


def aliases(source: Source) -> set[str]:
    """Find the names that stand for a type: template parameters, using, typedef."""
    found = set()
    for position in range(len(source)):
        text = source.text(position)
        if (text in ("typename", "class") and source.text(position + 2) in (",", ">", "=")) or (
            text == "using" and source.text(position + 2) == "="
        ):
            found.add(source.text(position + 1))
        elif text == "typedef":
            end = source.skip_to(position, ";")
            if source.is_name(end - 1):
                found.add(source.text(end - 1))
    return found


def attributes(source: Source) -> None:
    """Remove Metal's attributes, and report those that neither Metal nor C++ knows."""
    position = 0
    while position < len(source):
        if source.text(position) == "[" and source.text(position + 1) == "[" and source.adjacent(position):
            end = source.close(position)
            names = [source.text(begin) for begin, _ in source.split(position + 2, end - 1)]
            if not all(name in METAL_ATTRIBUTES or name in PLAIN_ATTRIBUTES for name in names):
                wrong = next(name for name in names if name not in METAL_ATTRIBUTES | PLAIN_ATTRIBUTES)
                source.report(position, f"Metal has no attribute [[{wrong}]]")
            if not set(names) <= PLAIN_ATTRIBUTES:
                source.blank(position, end + 1)
            position = end
        position += 1


def structs(source: Source) -> None:
    """Declare the copies that Metal makes by itself, and that plain methods run on thread objects."""
    for position in range(len(source)):
        if source.text(position) not in ("struct", "union", "class"):
            continue
        if source.text(position - 1) in ("enum", "<", ","):
            continue
        name_at = position + 1
        while source.text(name_at) in ("[", "alignas", "__attribute__"):
            name_at = source.close(name_at if source.text(name_at) == "[" else name_at + 1) + 1
        opening = name_at + 1
        if source.text(opening) == "<":
            opening = source.close_angle(opening) + 1
        if source.text(opening) == "final":
            opening += 1
        if source.text(opening) == ":":
            while source.text(opening) not in ("{", ";", ""):
                opening += 1
        if source.text(opening) == "{" and source.is_name(name_at):
            _struct_body(source, position, source.text(name_at), opening)


def _struct_body(source: Source, position: int, name: str, opening: int) -> None:
    closing = source.close(opening)
    body = source.words(opening + 1, closing)
    constructors = [
        i
        for i in range(len(body) - 1)
        if body[i] == name
        and body[i + 1] == "("
        and (i == 0 or body[i - 1] not in ("~", "::", "new", "return"))
    ]
    copies = any(name in body[i + 2 : i + 8] and "&" in body[i + 2 : i + 9] for i in constructors)
    assigns = any(body[i] == "operator" and body[i + 1] == "=" for i in range(len(body) - 1))
    if not body or copies or assigns:
        declared = ""
    else:
        declared = f"MSL_COPIES({name})" if constructors else f"MSL_VALUE({name})"
    _method_spaces(source, name, opening, closing)
    if source.text(position) == "class":
        declared = f"public: {declared} private: "
    source.put(opening, "{ " + declared)


def _method_spaces(source: Source, name: str, opening: int, closing: int) -> None:
    """A member function without an address space runs on a `thread` object in Metal: say so."""
    skipped = ("__attribute__", "decltype", "static_assert", "alignas", "sizeof", "noexcept", "__declspec")
    position = opening + 1
    while position < closing:
        text = source.text(position)
        if text == "(":
            end = source.close(position)
            begin = position - 1
            while (
                begin > opening
                and source.text(begin) not in (";", "}", "{")
                and not _is_access(source, begin)
            ):
                begin -= 1
            head = source.words(begin + 1, position)
            if source.text(position - 1) == name and source.text(end + 1) in SPACES:
                position = _constructor_of_space(source, begin + 1, end + 1)
                continue
            named = source.is_name(position - 1) or "operator" in head[-3:]
            named = named and source.text(position - 1) not in skipped
            operator = "operator" in head
            fixed = any(word in ("static", "friend", "using", "typedef", "static_assert") for word in head)
            fixed = (
                fixed
                or ("=" in head and not operator)
                or source.text(position - 1) == name
                or "~" in head[-2:]
            )
            if named and not fixed and len(head) > 1:
                last = end + 1 if source.text(end + 1) == "const" else end
                if source.text(last + 1) in ("{", ";", "->", "=", "noexcept", "__attribute__", "["):
                    source.put(last, source.text(last) + " thread")
            position = end
        elif text in ("{", "["):
            position = source.close(position)
        position += 1


def _is_access(source: Source, position: int) -> bool:
    return source.text(position) == ":" and source.text(position - 1) in ("public", "private", "protected")


def _constructor_of_space(source: Source, begin: int, space: int) -> int:
    """Metal overloads constructors on the address space of *this; the front end knows thread objects only."""
    end = source.skip_to(space + 1, "{", ";")
    end = source.close(end) if source.text(end) == "{" else end
    if source.text(space) == "thread":
        source.put(space, "")
    else:
        source.blank(begin, end + 1)
    return end + 1


def constant_thread_references(source: Source) -> None:
    """`const thread uint&` binds to a value of any space in Metal; a plain reference does here."""
    for position in range(len(source) - 3):
        pair = source.words(position, position + 2)
        referred = source.text(position + 2) in SCALARS and source.text(position + 3) == "&"
        if sorted(pair) == ["const", "thread"] and referred:
            source.put(position + pair.index("thread"), "")


def static_casts(source: Source) -> None:
    """static_cast between vectors, and between half and bfloat, goes through a function that can do it."""
    for position in range(len(source) - 2):
        if source.text(position) == "static_cast" and source.text(position + 1) == "<":
            end = source.close_angle(position + 1)
            if end > 0 and not {"*", "&"} & set(source.words(position + 2, end)):
                source.put(position, "metal::msl_static_cast")


def braced_arguments(source: Source) -> None:
    """{a, b} passed where a vector is wanted becomes an object that converts to one."""
    for position in range(1, len(source) - 1):
        if source.text(position) != "{" or source.text(position - 1) not in ("(", ","):
            continue
        end = source.close(position)
        if source.text(end + 1) not in (",", ")") or not 2 <= len(source.split(position + 1, end)) <= 4:
            continue
        depth, before = 0, position - 1
        while before > 0 and not (source.text(before) in OPENING and depth == 0):
            depth += (source.text(before) in (")", "]", "}")) - (source.text(before) in OPENING)
            before -= 1
        called = source.is_name(before - 1) or source.text(before - 1) == ">"
        statement = source.text(before - 1) in ("if", "while", "for", "switch", "return", "sizeof")
        if source.text(before) == "(" and called and not statement:
            source.put(position, "metal::msl_braced(")
            source.put(end, ")")


def matmul_descriptors(source: Source) -> None:
    """matmul2d<descriptor, ...> takes an object as template argument, as C++17 cannot: give its members."""
    members = ("m", "n", "k", "transpose_left", "transpose_right", "relaxed_precision")
    for position in range(len(source) - 2):
        if source.text(position) == "matmul2d" and source.text(position + 1) == "<":
            begin, end = source.split(position + 2, source.close_angle(position + 1))[0]
            descriptor = source.between(begin, end)
            values = [f"({descriptor}).{member}" for member in members] + [f"(int)({descriptor}).matmul_mode"]
            source.replace(begin, end, ", ".join(values))
            source.put(position, "msl_matmul2d")


def threadgroup_variables(source: Source) -> None:
    """A threadgroup variable becomes a reference into the group's memory, found by its own number."""
    count, position = 0, 0
    while position < len(source):
        if source.text(position) == "threadgroup" and _previous_mark(source, position) in (
            ";",
            "{",
            "}",
            ")",
            ":",
        ):
            end = source.skip_to(position, ";", "{", "=")
            if source.text(end) == "=" and source.text(end + 1) == "{":
                source.blank(end, source.close(end + 1) + 1)
                source.index()
                continue
            if source.text(end) == ";":
                declared = _threadgroup_declarators(source, position + 1, end, count)
                if declared:
                    count += len(declared)
                    source.replace(position, end + 1, " ".join(declared))
                position = end
        position += 1


def _previous_mark(source: Source, position: int) -> str:
    position -= 1
    while position >= 0 and not source.text(position).strip():
        position -= 1
    return source.text(position).strip()[-1:]


def _threadgroup_declarators(source: Source, begin: int, end: int, count: int) -> list[str]:
    align = "16"
    if source.text(begin) == "alignas":
        closing = source.close(begin + 1)
        align, begin = source.between(begin + 2, closing), closing + 1
    parts = source.split(begin, end)
    first, stop = parts[0]
    name_at = stop - 1
    for position in range(first, stop):
        if source.text(position) in ("*", "&", "("):
            return []
        if source.text(position) == "[":
            name_at = position - 1
            break
    kind = source.between(first, name_at)
    declared = []
    for number, (part, part_end) in enumerate(parts):
        name = name_at if number == 0 else part
        extent = re.sub(r"\[\[.*?\]\]", "", source.between(name + 1, part_end))
        whole = f"__typeof__({kind} {extent})"
        declared.append(
            f"threadgroup {kind} (&{source.text(name)}){extent} = "
            f"*(threadgroup {whole}*)msl_threadgroup_memory(sizeof({whole}), {align}, {count + number});"
        )
    return declared


def direct_initialisers(source: Source) -> None:
    """float4 v(a, b);  ->  float4 v = make<float4>(a, b);"""
    position = 0
    while position < len(source):
        last = _vector_type_end(source, position)
        starts = source.text(position - 1) in (";", "{", "}", "const", "constexpr", ")")
        if last and starts and source.is_name(last + 1) and source.text(last + 2) == "(":
            end = source.close(last + 2)
            arguments = source.split(last + 3, end)
            is_parameter = {*VECTORS, *SCALARS, *SPACES, "const"}
            values = all(
                source.text(begin) not in is_parameter or source.text(begin + 1) == "("
                for begin, _ in arguments
            )
            if source.text(end + 1) == ";" and arguments and values:
                kind = source.between(position, last + 1)
                source.put(last + 1, f"{source.text(last + 1)} = metal::msl_make<{kind}>")
                position = end
        position += 1


def _vector_type_end(source: Source, position: int) -> int:
    """Give the last position of a vector type that starts here, or 0."""
    if source.text(position) in VECTORS:
        return position
    if source.text(position) == "vec" and source.text(position + 1) == "<":
        return max(0, source.close_angle(position + 1))
    return 0


def short_initialisers(source: Source, type_names: set[str]) -> None:
    """float4 v = {x};  ->  the missing components are zero."""
    for position in range(len(source) - 4):
        kind = source.text(position)
        if (
            kind not in VECTORS
            or not source.is_name(position + 1)
            or source.words(position + 2, position + 4) != ["=", "{"]
        ):
            continue
        end = source.close(position + 3)
        if source.text(end + 1) in (";", ",") and len(source.split(position + 4, end)) < int(kind[-1]):
            source.put(position + 3, f"metal::msl_fill<{kind}>(")
            source.put(end, ")")


def constructor_calls(source: Source, type_names: set[str]) -> None:
    """float4(a, b) and T(x) go through msl_make, which converts as Metal's constructors do."""
    position = 0
    while position < len(source):
        last = _vector_type_end(source, position)
        if source.text(position) in type_names:
            last = position
        if last and source.text(last + 1) == "(":
            begin, before = position, source.text(position - 1)
            if before == "::" and source.text(position - 2) == "metal":
                begin, before = position - 2, source.text(position - 3)
            if _is_expression(source, begin, before) and not _is_declarator(source, last):
                kind = source.between(position, last + 1)
                source.replace(begin, last + 1, f"metal::msl_make<{kind}>")
            position = last
        position += 1


def _is_declarator(source: Source, last: int) -> bool:
    """T (&x) and T (*x)."""
    return source.text(last + 2) in ("&", "*") and source.is_name(last + 3) and source.text(last + 4) == ")"


def _is_expression(source: Source, begin: int, before: str) -> bool:
    if before in ("*", "&"):
        return _is_binary(source, begin - 1)
    if before in (
        ">",
        "::",
        "new",
        "~",
        "operator",
        "decltype",
        ".",
        "->",
        "typename",
        "struct",
        "sizeof",
        "alignof",
    ):
        return False
    return not (source.is_name(begin - 1) and before not in ("return", "else", "case"))


def _is_binary(source: Source, position: int) -> bool:
    """Tell whether * or & here multiplies or masks, rather than making a pointer or a reference type."""
    before = source.text(position - 1)
    words = {*VECTORS, *SCALARS, *SPACES, "return", "const", "auto", "void"}
    return (
        before in (")", "]")
        or source.kind(position - 1) == "number"
        or (source.is_name(position - 1) and before not in words)
    )


def literals(source: Source) -> None:
    """Metal has no double: 1.0 is a float. 1.0bf is a bfloat."""
    for token in source.tokens:
        if token.kind != "number":
            continue
        bfloat = BFLOAT_LITERAL.fullmatch(token.text)
        if bfloat:
            token.text = f"((bfloat){bfloat.group(1)}f)"
        elif FLOAT_LITERAL.fullmatch(token.text) and re.search(r"[.eE]", token.text):
            token.text += "f"
