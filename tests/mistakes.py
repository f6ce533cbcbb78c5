"""Mistakes that tests plant in the sources of kernels: see tests/emulator/README.md."""

import dataclasses
import itertools
import re


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake planted in a source of csrc, which a test must find.

    Attributes:
      file: below csrc.
      marker: a name in its comment `// mutant: ...`, at the statement that is changed.
      old: the text that is replaced, once in that statement; without it the whole statement.
      new: the text in its place.
      case: the case that shows the mistake, as the test that plants it takes it.
      finds: a pattern of the error that is then raised.
      number: of those that `mutant` chooses from: see `as_mutants`.
    """

    file: str
    marker: str
    old: str | None = None
    new: str = ""
    case: object = None
    finds: str = "wrong"
    number: int = 0

    def __str__(self) -> str:
        return self.marker

    def change(self, text: str) -> tuple[tuple[int, int], str]:
        """Where the source's text is that the mistake replaces, begin and end, and the new text.

        As a mutant, a part of an expression is replaced with what is around it, and of two calls of
        one function the arguments alone: the call may be an initializer, which is no expression.
        """
        begin, end = place = self.place(text)
        if self.old is None or not self.number:
            return place, self.new or ("" if self.old else ";")
        if arguments := _arguments(self.old, self.new):
            first, new = arguments
            return (begin + first, end - 1), new
        if not _is_part(self.old, self.new):
            return place, self.new
        begin, end = _expression(text, *place)
        return (begin, end), text[begin : place[0]] + self.new + text[place[1] : end]

    def place(self, text: str) -> tuple[int, int]:
        """Where the source's text is that the mistake is about: begin and end."""
        statements = marked_statements(text).get(self.marker, [])
        if len(statements) != 1:
            got = f"got {len(statements)}"
            raise ValueError(f"{self.file} must have one marker {self.marker}, {got}")
        ((begin, end),) = statements
        if self.old is None:
            return begin, end
        if (count := text.count(self.old, begin, end)) != 1:
            where = f"the statement marked {self.marker} in {self.file}"
            raise ValueError(f"{where} must have {self.old!r} once, got {count}")
        begin = text.index(self.old, begin, end)
        return begin, begin + len(self.old)

    def instead_of(self, old: str, new: str) -> str:
        """The code in place of `old`."""
        if not self.number:
            return new
        if self.old is None or self.old.endswith(";"):
            return f"if (emulator::is_mutant({self.number})) {{ {new} }} else {{ {old} }}"
        return f"(emulator::is_mutant({self.number}) ? ({new}) : ({old}))"


def as_mutants(mistakes) -> list[Mistake]:
    """Return the mistakes so that a program makes that one which `mutant` says, counted from 1.

    Each changes an expression that no constant depends on, or replaces a whole statement.
    """
    return [dataclasses.replace(mistake, number=i) for i, mistake in enumerate(mistakes, 1)]


def _is_part(old: str, new: str) -> bool:
    """Whether a text that ends in an operator, or is left out, is only a part of an expression."""
    operator = r"[-+*/%&|<>=]"
    return not new or bool(re.search(rf"^ *{operator}|{operator} *$|[+]=", old))


def _arguments(old: str, new: str) -> tuple[int, str] | None:
    """Where the arguments begin of the function that both texts call, and the new ones."""
    calls = [re.fullmatch(r"(\w+\()([^()]+)\)", x) for x in (old, new)]
    if not all(calls) or calls[0][1] != calls[1][1]:
        return None
    return len(calls[0][1]), calls[1][2]


def _expression(text: str, begin: int, end: int) -> tuple[int, int]:
    """Where the smallest expression is that text[begin:end] is a part of, in brackets or not."""
    depth = 0
    for match in reversed(list(re.finditer(rf"{_LIMITS}|[()\[\]{{}}]", text[:begin]))):
        depth += (match[0] in ")]}") - (match[0] in "([{")
        if depth < 0 or (depth == 0 and match[0] not in ")]}([{"):
            first = match.end()
            break
    depth = 0
    for match in re.compile(rf"{_LIMITS}|[()\[\]{{}}]").finditer(text, end):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if depth < 0 or (depth == 0 and match[0] not in ")]}([{"):
            last = match.start()
            break
    return first + len(text[first:begin]) - len(text[first:begin].lstrip()), last


# What is at neither side of an expression.
_LIMITS = r"[,;?]|(?<!:):(?!:)|(?<![-=!<>+*/%&|])=(?!=)|\breturn\b"
_MARKER = re.compile(r"^ *(?P<code>.*?) *// mutant: (?P<names>.+)$", re.MULTILINE)
# From a line that is no comment to the end of one that ends a statement or opens a block.
_STATEMENT = re.compile(
    r"^ *(?! |//)(?P<code>.+?[;{}])(?= *(?://[^\n]*)?$)", re.MULTILINE | re.DOTALL
)


def marked_statements(text: str) -> dict[str, list[tuple[int, int]]]:
    """Where a source's statements with markers begin and end, by the markers' names."""
    found = {}
    for match in _MARKER.finditer(text):
        # A marker on its own line is of the statement that follows.
        own = match if match["code"] else _STATEMENT.search(text, match.end() + 1)
        for name in match["names"].split(", "):
            found.setdefault(name, []).append(own.span("code"))
    return found


def plant(text: str, mistakes) -> str:
    """Return a source with mistakes of it; those at one place must be of `as_mutants`."""
    changed = {}
    for mistake in mistakes:
        place, new = mistake.change(text)
        changed[place] = mistake.instead_of(changed.get(place, text[slice(*place)]), new)
    places = sorted(changed)
    if any(last[1] > first[0] for last, first in itertools.pairwise(places)):
        raise ValueError(f"mistakes must not overlap, got {', '.join(map(str, mistakes))}")
    for begin, end in reversed(places):
        text = text[:begin] + changed[begin, end] + text[end:]
    return text
