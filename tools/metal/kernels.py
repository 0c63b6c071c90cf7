"""The kernels of a Metal source: their argument tables, and the entry points that a launch calls."""

import re
from dataclasses import dataclass, field

from tools.metal.tokens import Problem, Source

BUFFERS = 31  # Metal's argument table
THREADGROUP_BUFFERS = 31
# [[attribute]]: what runs in the entry point to give it, in language/launch.h
BUILTINS = {
    "thread_position_in_grid": "msl_position_in_grid",
    "threads_per_grid": "msl_grid",
    "threadgroup_position_in_grid": "msl_group_position",
    "threadgroups_per_grid": "msl_groups",
    "thread_position_in_threadgroup": "msl_position",
    "threads_per_threadgroup": "msl_threads",
    "dispatch_threads_per_threadgroup": "msl_dispatch_threads",
    "thread_index_in_threadgroup": "msl_index",
    "thread_index_in_simdgroup": "msl_lane",
    "simdgroup_index_in_threadgroup": "msl_simdgroup",
    "simdgroups_per_threadgroup": "msl_simdgroups",
    "dispatch_simdgroups_per_threadgroup": "msl_simdgroups",
    "threads_per_simdgroup": "msl_simd_width",
    "thread_execution_width": "msl_simd_width",
    "thread_index_in_quadgroup": "msl_quad_lane",
    "quadgroup_index_in_threadgroup": "msl_quadgroup",
}


@dataclass(frozen=True)
class Argument:
    """One entry of a kernel's argument table."""

    space: str  # device, constant or threadgroup
    index: int
    name: str
    writable: bool
    atomic: bool = False  # through which groups of one dispatch may depend on each other
    optional: bool = False  # there only if a function constant says so


@dataclass
class Parameter:
    """One parameter of a kernel function, as written."""

    type: str
    name: str
    attributes: dict[str, str]
    position: int


@dataclass
class Function:
    """A kernel function; a template has one entry point for every instance."""

    name: str
    template: str | None
    parameters: list[Parameter]
    attributes: dict[str, str]
    where: tuple[str, int]
    arguments: list[Argument] = field(default_factory=list)
    call: list[str] = field(default_factory=list)  # an expression for every parameter


@dataclass(frozen=True)
class Instance:
    """What a pipeline is made from: a kernel function, its template arguments, and the host's name for it."""

    name: str
    function: str
    template_arguments: str | None
    where: tuple[str, int]


@dataclass(frozen=True)
class Constant:
    """A function constant."""

    index: int
    type: str
    name: str


@dataclass
class Kernels:
    """All that one source offers to a host."""

    functions: dict[str, Function] = field(default_factory=dict)
    instances: list[Instance] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)


def find(source: Source) -> Kernels:
    """Find kernels, instances and function constants, and leave of them what the front end reads."""
    found = Kernels()
    _function_constants(source, found)
    template: tuple[int, str] | None = None  # the position after the last template <...>, and its parameters
    position = 0
    while position < len(source):
        text = source.text(position)
        if text == "template" and source.text(position + 1) == "<":
            end = source.close_angle(position + 1)
            if end > 0:
                template = (end + 1, source.between(position + 2, end))
                position = end
        elif text == "template":
            position = _instance(source, found, position)
            template = None
        elif _starts_kernel(source, position):
            belongs = template and position in (template[0], source.attributes(template[0])[1])
            position = _kernel(source, found, position, template[1] if template and belongs else None)
            template = None
        elif text in (";", "}"):
            template = None
        position += 1
    source.index()
    return found


def _starts_kernel(source: Source, position: int) -> bool:
    if source.text(position) in ("kernel", "__kernel"):
        return source.is_name(position + 1) or source.text(position + 1) == "["
    if source.text(position) == "[" and source.text(position + 1) == "[" and source.adjacent(position):
        return "kernel" in source.words(position + 2, source.close(position))
    return False


def _host_name(attributes: dict[str, str], otherwise: str) -> str:
    return "".join(re.findall(r'"((?:\\.|[^"])*)"', attributes.get("host_name", ""))) or otherwise


def _instance(source: Source, found: Kernels, position: int) -> int:
    """Read `template [[host_name("...")]] [[kernel]] decltype(f<T>) f<T>;` and give where it ends."""
    attributes, start = source.attributes(position + 1)
    is_kernel = "host_name" in attributes or "kernel" in attributes
    while source.text(start) in ("kernel", "__kernel"):
        is_kernel = True
        source.put(start, "")
        start += 1
    more, start = source.attributes(start)
    attributes |= more
    if not is_kernel and "kernel" not in more and "host_name" not in more:
        return position
    end = source.skip_to(start, ";")
    name_at = source.close(start + 1) + 1 if source.text(start) == "decltype" else start + 1
    while source.text(name_at) == "::":
        name_at += 2
    if source.text(name_at) == "<":
        name_at = source.close_angle(name_at) + 1
    while source.text(name_at + 1) == "::":
        name_at += 2
    name, arguments = source.text(name_at), None
    if source.text(name_at + 1) == "<":
        arguments = source.between(name_at + 2, source.close_angle(name_at + 1))
    else:
        source.report(name_at, f"{name}: an instance of a kernel must write its template arguments")
    found.instances.append(Instance(_host_name(attributes, name), name, arguments, source.where(position)))
    source.blank(position, end + 1)
    return end


def _kernel(source: Source, found: Kernels, position: int, template: str | None) -> int:
    keyword = source.text(position) in ("kernel", "__kernel")
    attributes, start = source.attributes(position + 1 if keyword else position)
    opening = start
    while source.text(opening) not in ("(", ";", ""):
        angle = source.close_angle(opening) if source.text(opening) == "<" else -1
        opening = angle + 1 if angle > 0 else opening + 1
    if source.text(opening) != "(":
        return start
    name, end = source.text(opening - 1), source.close(opening)
    if "void" not in source.words(start, opening - 1):
        source.report(start, f"kernel {name} must return void")
    if source.text(end + 1) == "{":
        parameters = [
            _parameter(source, *part, number) for number, part in enumerate(source.split(opening + 1, end))
        ]
        where = source.where(opening - 1)
        if name in found.functions:
            source.report(opening - 1, f"there are two kernels of the name {name}")
        function = Function(name, template, parameters, attributes, where)
        found.functions[name] = function
        _argument_table(source, function)
        if template is None:
            found.instances.append(Instance(_host_name(attributes, name), name, None, where))
    source.replace(position, start, '[[clang::annotate("metal:kernel")]]')
    return opening


def _parameter(source: Source, begin: int, end: int, number: int) -> Parameter:
    attributes: dict[str, str] = {}
    stop, position = None, begin
    while position < end and source.text(position) != "=":
        if source.text(position) == "[" and source.text(position + 1) == "[":
            stop = position if stop is None else stop
            more, position = source.attributes(position)
            attributes |= more
        else:
            position += 1
    stop = position if stop is None else stop
    array = source.text(stop - 1) == "]"
    while source.text(stop - 1) == "]":
        stop -= 1
        while source.text(stop) != "[":
            stop -= 1
    named = source.is_name(stop - 1) and stop - 1 > begin
    kind = source.between(begin, stop - 1 if named else stop) + ("*" if array else "")
    name = source.text(stop - 1) if named else f"parameter{number}"
    return Parameter(kind.strip(), name, attributes, begin)


def _argument_table(source: Source, function: Function) -> None:
    free = {"buffer": 0, "threadgroup": 0}
    for parameter in function.parameters:
        builtin = next((name for name in parameter.attributes if name in BUILTINS), None)
        if builtin:
            function.call.append(f"msl_builtin<{parameter.type}>({BUILTINS[builtin]}(thread_context))")
        elif parameter.type.endswith(("*", "&")) or re.search(
            r"\*\s*(const|restrict|__restrict)$", parameter.type
        ):
            _buffer(source, function, parameter, free)
        else:
            source.report(
                parameter.position,
                f"{function.name}: '{parameter.type} {parameter.name}' is neither a pointer or reference to "
                "a buffer nor a built-in such as [[thread_position_in_grid]]",
            )
            function.call.append("0")
    _check_table(source, function)


def _buffer(source: Source, function: Function, parameter: Parameter, free: dict[str, int]) -> None:
    kind = re.sub(r"(?<=\*)\s*(const|restrict|__restrict)\s*$", "", parameter.type)
    pointee = kind[:-1].rstrip()
    space = next(
        (word for word in ("threadgroup", "device", "constant") if re.search(rf"\b{word}\b", kind)), None
    )
    table = "threadgroup" if space == "threadgroup" else "buffer"
    written = parameter.attributes.get(table)
    index = free[table]
    if space is None:
        message = (
            f"'{kind} {parameter.name}' points to no address space; write device, constant or threadgroup"
        )
        source.report(parameter.position, f"{function.name}: {message}")
    if written is not None:
        try:
            index = int(written, 0)
        except ValueError:
            message = f"the index of {parameter.name} must be a number, not '{written}'"
            source.report(parameter.position, f"{function.name}: {message}")
    free[table] = index + 1
    writable = space != "constant" and not re.search(r"\bconst\b", pointee)
    atomic = "atomic" in pointee
    optional = "function_constant" in parameter.attributes
    function.arguments.append(Argument(space or "device", index, parameter.name, writable, atomic, optional))
    dereference = "*" if kind.endswith("&") else ""
    function.call.append(f"{dereference}({pointee}*)msl_{table}(thread_context, {index})")


def _check_table(source: Source, function: Function) -> None:
    optional = {p.name for p in function.parameters if "function_constant" in p.attributes}
    for table, limit in (("buffer", BUFFERS), ("threadgroup", THREADGROUP_BUFFERS)):
        taken: dict[int, str] = {}
        for argument in function.arguments:
            if (argument.space == "threadgroup") != (table == "threadgroup"):
                continue
            parameter = next(p for p in function.parameters if p.name == argument.name)
            if argument.index >= limit:
                message = f"{table} index {argument.index} of {argument.name} is over {limit - 1}"
                source.report(parameter.position, f"{function.name}: {message}")
            other = taken.setdefault(argument.index, argument.name)
            if other != argument.name and not {other, argument.name} <= optional:
                message = f"{other} and {argument.name} both have {table} index {argument.index}"
                source.report(parameter.position, f"{function.name}: {message}")


def _function_constants(source: Source, found: Kernels) -> None:
    """`constant T name [[function_constant(n)]];` is a variable that a launch sets."""
    for position in range(len(source)):
        if source.text(position) != "constant":
            continue
        stop = position + 1
        while source.text(stop) not in (";", "=", "(", ")", "{", "") and source.words(stop, stop + 2) != [
            "[",
            "[",
        ]:
            stop += 1
        attributes, end = source.attributes(stop)
        if "function_constant" not in attributes or source.text(end) != ";":
            continue
        kind = " ".join(
            word for word in source.words(position + 1, stop - 1) if word not in ("constexpr", "const")
        )
        name = source.text(stop - 1)
        try:
            index = int(attributes["function_constant"], 0)
        except ValueError:
            index = 0
            source.report(position, f"the index of function constant {name} must be a number")
        found.constants.append(Constant(index, kind, name))
        if source.text(position - 1) == "static":
            source.put(position - 1, "")
        declared = f"extern constant const {kind} {name}; extern constant const bool {name}_is_defined"
        source.replace(position, end, declared)
    source.index()
    _derived_constants(source, {name for c in found.constants for name in (c.name, f"{c.name}_is_defined")})


def _derived_constants(source: Source, variables: set[str]) -> None:
    """`constant bool x = count > 4;` of a function constant is known at the launch: it becomes a function."""
    derived: set[str] = set()
    for position in range(len(source)):
        if source.text(position) in derived:
            source.put(position, f"msl_derived_{source.text(position)}()")
        if source.text(position) != "constant" or source.text(position - 1) not in ("", ";", "}", "static"):
            continue
        end = source.skip_to(position, ";", "(", ")")
        equals = source.skip_to(position, "=", ";")
        if source.text(end) == "(":
            end = source.skip_to(end, ";")
        if equals >= end or not (variables | derived) & set(source.words(equals, end)):
            continue
        name = source.text(equals - 1)
        kind = " ".join(word for word in source.words(position + 1, equals - 1) if word != "const")
        derived.add(name)
        source.put(position, "MSL_FN")
        source.blank(position + 1, equals - 1)
        source.put(equals - 1, f" {kind} msl_derived_{name}() {{ return")
        source.put(equals, "")
        source.put(end, "; }")
        if source.text(position - 1) == "static":
            source.put(position - 1, "")
    source.index()


def entry_points(source: Source, kernels: Kernels, prefix: str | None) -> str:
    """Write the functions that a launch calls, `prefix` and a number each, in the order of the instances.

    Without a prefix they are CUDA's, by the host's names.
    """
    lines = [""]
    for function in kernels.functions.values():
        template = f"template <{function.template}> " if function.template else ""
        arguments = _own_arguments(function.template)
        lines.append(f'# {function.where[1]} "{function.where[0]}"')
        lines.append(
            f"{template}MSL_FN void msl_call_{function.name}(msl_thread_context thread_context) "
            f"{{ {function.name}{arguments}({', '.join(function.call)}); }}"
        )
    for number, instance in enumerate(kernels.instances):
        called = kernels.functions.get(instance.function)
        if called is None:
            message = f"{instance.name} is an instance of {instance.function}, which is no kernel here"
            source.problems.append(Problem(*instance.where, message))
            continue
        if called.template and instance.template_arguments is None:
            continue  # reported where it was found
        arguments = f"<{instance.template_arguments}>" if called.template else ""
        call = f"msl_call_{called.name}{arguments}"
        lines.append(f'# {instance.where[1]} "{instance.where[0]}"')
        if prefix is None:
            lines.append(_cuda_entry(instance.name, called, call))
        else:
            lines.append(f'extern "C" void {prefix}{number}(msl_thread_context c) {{ {call}(c); }}')
    return "\n".join(lines) + "\n"


def _cuda_entry(name: str, function: Function, call: str) -> str:
    """Write a kernel that takes buffer 0 by value, the others' addresses, the threadgroup arguments' places.

    Last comes the address of an indirect dispatch's grid, 0 for none.
    """
    buffers = sorted(a.index for a in function.arguments if a.space != "threadgroup" and a.index)
    places = sorted(a.index for a in function.arguments if a.space == "threadgroup")
    parameters = [
        "msl_arguments arguments",
        *(f"ulong b{i}" for i in buffers),
        *(f"uint t{i}" for i in places),
    ]
    parameters.append("ulong grid")
    body = ["if (msl_outside(grid)) return;", "msl_thread c;", "c.buffers[0] = (ulong)&arguments;"]
    body += [f"c.buffers[{i}] = b{i};" for i in buffers]
    body += [f"c.threadgroup_buffers[{i}] = (ulong)msl_dynamic_memory() + t{i};" for i in places]
    return f'extern "C" __kernel void {name}({", ".join(parameters)}) {{ {" ".join(body)} {call}(&c); }}'


def _own_arguments(template: str | None) -> str:
    """Give the arguments that pass a template's own parameters on: `typename T, int N = 2` -> `<T, N>`."""
    if not template:
        return ""
    names, depth, part = [], 0, ""
    for letter in template + ",":
        depth += (letter in "<([") - (letter in ">)]")
        if letter == "," and depth == 0:
            names.append(re.split(r"\s+|\.\.\.", part.split("=")[0].strip())[-1])
            part = ""
        else:
            part += letter
    return f"<{', '.join(names)}>"
