"""Rules of Metal that clang's front end does not know, read off its syntax tree and off the code it makes."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.metal.clang import LANGUAGE
from tools.metal.kernels import Kernels
from tools.metal.tokens import Problem

THREADGROUP_LIMIT = 32768
LOCATION = re.compile(r"[<, ](?:([^:<>,\s]+\.\w+):(\d+):\d+|line:(\d+):\d+)")
DECLARATION = re.compile(r"(?:FunctionDecl|CXXMethodDecl) (0x\w+).*? ([\w~]+|operator\S+) '")
REFERENCE = re.compile(r"DeclRefExpr .*? (?:Function|CXXMethod) (0x\w+) '(\w+)'")
MEMBER = re.compile(r"MemberExpr .*? (?:->|\.)(\w+) (0x\w+)$")
SPACE = re.compile(r"__(global|local)\b")
NO_SPACE = "a pointer or reference without an address space is `thread`, and cannot hold a {space} address"
# Statement or declaration in the tree: what to say.
FORBIDDEN = {
    "GotoStmt": "Metal has no goto",
    "GCCAsmStmt": "Metal has no inline assembly",
    "CXXDynamicCastExpr": "Metal has no dynamic_cast",
    "CXXNewExpr": "Metal has no new",
    "CXXDeleteExpr": "Metal has no delete",
}
# Where a class is copied or called, the front end itself moves between address spaces.
OWN_CONVERSIONS = ("CXXConstructExpr", "CXXOperatorCallExpr", "CXXMemberCallExpr")


@dataclass
class _Function:
    name: str
    file: str
    line: int
    calls: set[str] = field(default_factory=set)
    is_kernel: bool = False
    threadgroup_variable: tuple[str, int] | None = None


def _space(kind: str, is_reference: bool) -> str | None:
    """Give the address space of what a reference to this type, or a pointer of this type, stands for."""
    while (plain := re.sub(r"<[^<>]*>", "", kind)) != kind:  # template arguments have spaces of their own
        kind = plain
    parts = kind.split("*")
    found = SPACE.search(parts[-1] if is_reference else parts[-2] if len(parts) > 1 else "")
    return {"global": "device", "local": "threadgroup"}[found[1]] if found else None


class Tree:
    """Reads clang's -ast-dump line by line, and keeps the problems found."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self.problems: list[Problem] = []
        self._functions: dict[str, _Function] = {}
        self._function: _Function | None = None
        self._function_depth = 0
        self._stack: list[tuple[int, str]] = []  # depth and text of the nodes above
        self._conversion: tuple[bool, bool, Problem | None] | None = (
            None  # is it a reference, a copy; what to say
        )
        self._file, self._line = "", 0

    def read(self, lines: Iterable[str]) -> list[Problem]:
        """Read the whole tree, and give what is wrong with it."""
        for line in lines:
            self._node(line.rstrip())
        self._threadgroup_variables()
        self._recursion()
        unique = {(p.file, p.line, p.message): p for p in self.problems}
        return sorted(unique.values(), key=lambda p: (p.file, p.line))

    @property
    def _is_users(self) -> bool:
        return not LANGUAGE.search(self._file)

    def _node(self, line: str) -> None:
        depth = max(0, line.find("-"))
        text = line[depth + 1 :] if depth else line
        for file, at, later in LOCATION.findall(text[:300]):
            self._file, self._line = (file, int(at)) if file else (self._file, int(later))
        while self._stack and self._stack[-1][0] >= depth:
            self._stack.pop()
        parent = self._stack[-1][1] if self._stack else ""
        self._stack.append((depth, text))
        self._address_spaces(text, parent)
        if self._is_users:
            self._statement(text)
        self._calls(text, depth)

    def _say(self, message: str) -> None:
        self.problems.append(Problem(self._file, self._line, message))

    def _statement(self, text: str) -> None:
        kind = text.split(" ", 1)[0]
        if kind in FORBIDDEN:
            self._say(FORBIDDEN[kind])
        implicit = (
            kind == "ImplicitCastExpr" and "<FloatingCast>" in text and "part_of_explicit_cast" not in text
        )
        if implicit and re.search(r"'(?:[\w:]+'(?::'__bf16)|__bf16)'", text):
            self._say("Metal does not convert to bfloat implicitly: write bfloat(x)")

    def _address_spaces(self, text: str, parent: str) -> None:
        """Find a device or threadgroup address that goes into clang's generic space, which Metal lacks."""
        if self._conversion:
            is_reference, is_copy, problem = self._conversion
            self._conversion = None
            kinds = re.findall(r"'([^']*)'", text)
            space = next(filter(None, (_space(kind, is_reference) for kind in kinds)), None)
            if space and problem and not is_copy:
                problem.message = problem.message.format(space=space)
                self.problems.append(problem)
        if "<AddressSpaceConversion>" in text and "__generic" in text:
            kind = re.search(r"'([^']*)'", text)
            is_copy = kind is not None and "*" not in kind[1] and parent.startswith(OWN_CONVERSIONS)
            problem = Problem(self._file, self._line, NO_SPACE) if self._is_users else None
            self._conversion = (" lvalue " in text, is_copy, problem)

    def _calls(self, text: str, depth: int) -> None:
        if depth <= self._function_depth:
            self._function = None
        declared = DECLARATION.match(text)
        if (
            declared and self._function is None
        ):  # what lies in a function, such as a lambda, counts as the function
            address, name = declared.groups()
            self._function = self._functions.setdefault(address, _Function(name, self._file, self._line))
            self._function_depth = depth
            return
        if self._function is None:
            return
        if text.startswith("AnnotateAttr") and '"metal:kernel"' in text:
            self._function.is_kernel = True
        reference, member = REFERENCE.match(text), MEMBER.match(text.strip())
        if reference:
            self._function.calls.add(reference.group(1))
            if reference.group(2) == "msl_threadgroup_memory" and self._is_users:
                self._function.threadgroup_variable = (self._file, self._line)
        elif member:
            self._function.calls.add(member.group(2))

    def _threadgroup_variables(self) -> None:
        for function in self._functions.values():
            if function.threadgroup_variable and not function.is_kernel:
                message = f"a threadgroup variable may be declared in a kernel only, not in {function.name}"
                self.problems.append(Problem(*function.threadgroup_variable, message))

    def _recursion(self) -> None:
        """Follow the calls depth first, without recursion of our own."""
        done: set[str] = set()
        for start in self._functions:
            path: list[tuple[str, list[str]]] = (
                [(start, sorted(self._functions[start].calls))] if start not in done else []
            )
            open_now = {start}
            while path:
                address, calls = path[-1]
                if not calls:
                    path.pop()
                    open_now.discard(address)
                    done.add(address)
                    continue
                called = calls.pop()
                if called in open_now and not LANGUAGE.search(self._functions[called].file):
                    function = self._functions[called]
                    self.problems.append(
                        Problem(
                            function.file,
                            function.line,
                            f"Metal has no recursion: {function.name} calls itself",
                        )
                    )
                elif called in self._functions and called not in done and called not in open_now:
                    open_now.add(called)
                    path.append((called, sorted(self._functions[called].calls)))


def threadgroup_memory(code: str, kernels: Kernels, fallback: str) -> list[Problem]:
    """Add up the threadgroup variables of every kernel instance in its LLVM code."""
    sizes: dict[str, dict[int, int]] = {}
    function = ""
    for line in code.splitlines():
        begin = re.match(r'define .*?@"?([\w.$]+)"?\(', line)
        function = begin.group(1) if begin else function
        variable = re.search(
            r"@msl_threadgroup_memory\(i64 noundef (\d+), i32 noundef \d+, i32 noundef (\d+)\)", line
        )
        if variable:
            sizes.setdefault(function, {})[int(variable.group(2))] = int(variable.group(1))
    problems = []
    for mangled, variables in sizes.items():
        total = sum(variables.values())
        plain = re.match(r"_Z(\d+)", mangled)
        name = mangled[plain.end() : plain.end() + int(plain.group(1))] if plain else mangled
        file, at = kernels.functions[name].where if name in kernels.functions else (fallback, 1)
        if total > THREADGROUP_LIMIT:
            message = f"{name} has {total} bytes of threadgroup memory; the limit is {THREADGROUP_LIMIT}"
            problems.append(Problem(file, at, message))
    return problems
