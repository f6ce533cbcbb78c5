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

    def place(self, text: str) -> tuple[int, int]:
        """Where the source's text is that the mistake replaces: begin and end."""
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

    def instead_of(self, old: str) -> str:
        """The code in place of `old`."""
        if not self.number:
            return self.new or ("" if self.old else ";")
        if self.old is None or self.old.endswith(";"):
            return f"if (emulator::is_mutant({self.number})) {{ {self.new} }} else {{ {old} }}"
        return f"(emulator::is_mutant({self.number}) ? ({self.new}) : ({old}))"


def as_mutants(mistakes) -> list[Mistake]:
    """Return the mistakes so that a program makes that one which `mutant` says, counted from 1.

    Each replaces an expression by another, or a whole statement.
    """
    return [dataclasses.replace(mistake, number=i) for i, mistake in enumerate(mistakes, 1)]


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
        place = mistake.place(text)
        changed[place] = mistake.instead_of(changed.get(place, text[slice(*place)]))
    places = sorted(changed)
    if any(last[1] > first[0] for last, first in itertools.pairwise(places)):
        raise ValueError(f"mistakes must not overlap, got {', '.join(map(str, mistakes))}")
    for begin, end in reversed(places):
        text = text[:begin] + changed[begin, end] + text[end:]
    return text
