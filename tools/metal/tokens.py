"""A preprocessed Metal source as tokens: matching brackets, template lists, attributes, places."""

import re
from dataclasses import dataclass

OPENING = {"(": ")", "[": "]", "{": "}"}
CLOSING = {")", "]", "}"}
TOKEN = re.compile(
    r"""(?P<space>\s+) | (?P<line>\#[^\n]*) | (?P<string>"(?:\\.|[^"\\])*") | (?P<char>'(?:\\.|[^'\\])*')
      | (?P<number>\.?[0-9](?:[eEpP][+-]|[\w.'])*) | (?P<name>[A-Za-z_]\w*)
      | (?P<mark><<=|>>=|\.\.\.|->\*|::|->|\+\+|--|<<|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.VERBOSE | re.DOTALL,
)
LINE_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')


@dataclass
class Problem:
    """A fault in a source; reads as compilers write theirs."""

    file: str
    line: int
    message: str
    is_error: bool = True

    def __str__(self) -> str:
        """Write it as a compiler would."""
        kind = "error" if self.is_error else "warning"
        return f"{self.file}:{self.line}: {kind}: {self.message}"


@dataclass
class Token:
    """A piece of source; an edited one may hold several, until Source.index() takes the text apart again."""

    kind: str
    text: str


class Source:
    """The tokens of one translation unit. Positions count the significant ones: no space, no line marker."""

    def __init__(self, text: str) -> None:
        """Take a text apart."""
        self.problems: list[Problem] = []
        self.tokens: list[Token] = []
        self._take_apart(text)

    def _take_apart(self, text: str) -> None:
        self.tokens = [Token(found.lastgroup or "", found.group()) for found in TOKEN.finditer(text)]
        self.significant = [i for i, token in enumerate(self.tokens) if token.kind not in ("space", "line")]
        self._closer: dict[int, int] = {}
        open_at: list[int] = []
        for position, i in enumerate(self.significant):
            if self.tokens[i].text in OPENING:
                open_at.append(position)
            elif self.tokens[i].text in CLOSING and open_at:
                self._closer[open_at.pop()] = position

    def index(self) -> None:
        """Take the edited text apart again, so that positions and brackets are right."""
        self._take_apart(str(self))

    def __str__(self) -> str:
        """Give the text, as edited."""
        return "".join(token.text for token in self.tokens)

    def __len__(self) -> int:
        """Count the significant tokens."""
        return len(self.significant)

    def text(self, position: int) -> str:
        """Give a token's text; empty outside the source, so that looking ahead needs no check."""
        return self.tokens[self.significant[position]].text if 0 <= position < len(self) else ""

    def kind(self, position: int) -> str:
        """Give a token's kind: a group of TOKEN."""
        return self.tokens[self.significant[position]].kind if 0 <= position < len(self) else ""

    def is_name(self, position: int) -> bool:
        """Tell whether a token is an identifier or a keyword."""
        return self.kind(position) == "name"

    def adjacent(self, position: int) -> bool:
        """Tell whether nothing lies between this token and the next."""
        following = position + 1 < len(self)
        return following and self.significant[position] + 1 == self.significant[position + 1]

    def between(self, begin: int, end: int) -> str:
        """Give the text of positions [begin, end) on one line."""
        if end <= begin:
            return ""
        tokens = self.tokens[self.significant[begin] : self.significant[end - 1] + 1]
        return "".join(" " if token.kind in ("line", "space") else token.text for token in tokens)

    def words(self, begin: int, end: int) -> list[str]:
        """Give the texts of positions [begin, end)."""
        return [self.text(position) for position in range(begin, end)]

    def put(self, position: int, text: str) -> None:
        """Write another text in a token's place."""
        self.tokens[self.significant[position]].text = text

    def blank(self, begin: int, end: int) -> None:
        """Remove positions [begin, end); line ends stay, so that lines keep their numbers."""
        for position in range(begin, end):
            self.put(position, "")

    def replace(self, begin: int, end: int, text: str) -> None:
        """Write a text in the place of positions [begin, end)."""
        self.blank(begin, end)
        self.put(begin, text)

    def close(self, position: int) -> int:
        """Give the position of the bracket that closes the one here."""
        if position not in self._closer:
            self.report(position, f"nothing closes this '{self.text(position)}'")
            return len(self) - 1
        return self._closer[position]

    def close_angle(self, position: int) -> int:
        """Give the position of the > that closes the template list opened here; -1 if it is a comparison."""
        depth = 0
        while position < len(self):
            text = self.text(position)
            if text in OPENING:
                position = self.close(position)
            elif text == "<" and self.text(position - 1) != ")":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return position
            elif text == ";" or text in CLOSING:
                return -1
            position += 1
        return -1

    def skip_to(self, position: int, *stops: str) -> int:
        """Give the first position from here on that holds a stop, outside brackets opened on the way."""
        while position < len(self) and self.text(position) not in stops:
            position = self.close(position) + 1 if self.text(position) in OPENING else position + 1
        return position

    def split(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Cut [begin, end) at its commas, not at those inside brackets or template lists."""
        parts, start, position = [], begin, begin
        while position < end:
            text = self.text(position)
            if text in OPENING:
                position = self.close(position)
            elif text == "<" and self.is_name(position - 1):
                closer = self.close_angle(position)
                position = closer if 0 < closer < end else position
            elif text == ",":
                parts.append((start, position))
                start = position + 1
            position += 1
        if start < end:
            parts.append((start, end))
        return parts

    def attributes(self, position: int) -> tuple[dict[str, str], int]:
        """Read the [[...]] lists that start here: their names and arguments, and the position after them."""
        found: dict[str, str] = {}
        while self.text(position) == "[" and self.text(position + 1) == "[":
            end = self.close(position)
            for begin, stop in self.split(position + 2, end - 1):
                found[self.text(begin)] = self.between(begin + 2, stop - 1) if stop - begin > 1 else ""
            position = end + 1
        return found, position

    def where(self, position: int) -> tuple[str, int]:
        """Give file and line of a token."""
        file, line = "", 1
        for token in self.tokens[: self.significant[min(position, len(self) - 1)] if len(self) else 0]:
            marker = LINE_MARKER.match(token.text) if token.kind == "line" else None
            if marker:
                file, line = marker.group(2), int(marker.group(1)) - 1
            else:
                line += token.text.count("\n")
        return file, line

    def report(self, position: int, message: str) -> None:
        """Note a fault at a token."""
        self.problems.append(Problem(*self.where(position), message))
