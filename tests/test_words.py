"""Docstrings and guides are written in the words of the field."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jax_tcgemm"

# A first line says what the function does, as an imperative or a noun phrase.
OPENING = re.compile(r"(What|That of|Those of|The same|As of|Of)\s")

# Words for which the field has a better one, and that mean nothing else here.
WORDS = {
    r"(de)?quantis\w+": "(de)quantize",
    r"(col|neighb|behavi|fav)our\w*": "-or",
    r"(general|initial|normal|optim|recogn|serial|special)is(e|ed|es|ing|ation)": "-ize",
    r"carried kernels?": "embedded cubin",
    r"divided over": "sharded over, partitioned over",
    r"(is|are) left to XLA": "falls back to XLA",
    r"sharers?": "multicast",
    r"(into|sums of) parts": "terms, split-precision emulation",
    r"turned round": "swap_ab, transposed",
    r"whole 16 bytes": "16-byte-aligned",
}
FORBIDDEN = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)


def docstrings(path):
    """Pairs of a name and its docstring, of a module and its classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "name", "the module"), text


def openings() -> dict[str, list[str]]:
    """Offending first lines of each module that has any, by its path in jax_tcgemm."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = [f"{name}: {text.splitlines()[0]}" for name, text in docstrings(path)]
        if own := [line for line in lines if OPENING.match(line.split(": ", 1)[1])]:
            found[path.relative_to(PACKAGE).as_posix()] = own
    return found


def test_docstrings_open_with_what_a_function_does():
    assert not openings()


def forbidden(text: str) -> list[str]:
    found = (match[0] for match in FORBIDDEN.finditer(re.sub(r"\s+", " ", text)))
    advice = lambda word: next(w for p, w in WORDS.items() if re.fullmatch(p, word, re.I))  # noqa: E731
    return [f"{word!r}: say {advice(word)}" for word in found]


def test_docstrings_use_the_words_of_the_field():
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, text in docstrings(path):
            assert not forbidden(text), f"{path}, {name}"


def test_guides_use_the_words_of_the_field():
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        assert not forbidden(path.read_text("utf-8")), path
