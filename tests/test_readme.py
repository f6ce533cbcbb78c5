"""The README's examples run, and its tables name what there is."""

import re
from pathlib import Path

from jax_tcgemm import selection
from jax_tcgemm.system import switches

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def names_in_table(page: str, heading: str) -> list[str]:
    """The first column of the table that begins with a heading, without what follows a =."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text[text.index(f"| {heading} |") :].split("\n\n")[0]
    return re.findall(r"^\| `([^`=]+)", table, re.MULTILINE)


def test_examples_run(capsys, cpu_rule):
    namespace: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    products = [line.split()[1] for line in printed.splitlines() if "f32->f32" in line]
    assert sorted(products) == [
        *("1024x256x128", "128x1024x256", "128x1024x256", "128x256x1024", "256x1024x128")
    ]


def test_every_implementation_is_in_the_table():
    assert sorted(names_in_table("implementations.md", "name")) == sorted(selection.IMPLEMENTATIONS)


def test_every_debug_switch_is_in_the_table():
    assert names_in_table("debugging.md", "variable | meaning") == list(switches.SWITCHES)


def test_it_is_short():
    assert len(README.splitlines()) < 200


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_marked_command_installs_and_tests():
    marked = re.search(r"<!-- ci:test -->\n```sh\n(.*?)\n```", README)
    assert marked[1] == "pip install '.[test]' && pytest"
