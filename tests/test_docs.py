"""The documentation's Python code runs, and its reference names everything public."""

import re
from pathlib import Path

import pytest
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

import jax_tcgemm

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text("utf-8")]


@pytest.mark.all_cases
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs(page, cpu_rule_of_module):
    """Each page is one program: its blocks run in order and share their names."""
    for example in Document.parse(str(page), PythonCodeBlockParser()).examples():
        example.evaluate()


def test_everything_public_is_in_the_reference():
    """A function by its own line, a module by those of what is in it."""
    reference = (DOCS / "reference.md").read_text("utf-8")
    listed = re.findall(r"^::: jax_tcgemm\.([\w.]+)$", reference, re.MULTILINE)
    named = {part for path in listed for part in path.split(".")}
    assert set(jax_tcgemm.__all__) <= named
