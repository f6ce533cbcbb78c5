"""The README's examples run, and its tables name what there is."""

import re
from pathlib import Path

from jax_tcgemm import selection
from jax_tcgemm.system import switches

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def names_in_table(heading: str) -> list[str]:
    """The first column of the table that begins with a heading, without what follows a =."""
    table = README[README.index(f"| {heading} |") :].split("\n\n")[0]
    return re.findall(r"^\| `([^`=]+)", table, re.MULTILINE)


def test_examples_run(capsys, cpu_rule):
    namespace: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert [line.split()[1] for line in printed.splitlines() if "bf16->bf16" in line] == [
        "4096x2048x1024",
        "1024x2048x4096",
        "4096x1024x2048",
    ]


def test_every_implementation_is_in_the_table():
    assert sorted(names_in_table("name")) == sorted(selection.IMPLEMENTATIONS)


def test_every_debug_switch_is_in_the_table():
    assert names_in_table("variable | meaning") == list(switches.SWITCHES)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_marked_command_installs_and_tests():
    marked = re.search(r"<!-- ci:test -->\n```sh\n(.*?)\n```", README)
    assert marked[1] == "pip install '.[test]' && pytest"
