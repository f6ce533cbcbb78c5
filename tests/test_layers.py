"""What imports what: the contracts in pyproject.toml, and the page that explains them."""

import re
import tomllib
from pathlib import Path

from importlinter import cli

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = ROOT / "pyproject.toml"


def test_imports_keep_the_contracts():
    status = cli.lint_imports(config_filename=str(CONTRACTS), no_cache=True)
    assert status == cli.EXIT_STATUS_SUCCESS


def test_the_page_has_the_folders_in_their_order():
    with CONTRACTS.open("rb") as file:
        contract = tomllib.load(file)["tool"]["importlinter"]["contracts"][0]
    layers = [name for layer in contract["layers"] for name in layer.split(" | ")]
    page = (ROOT / "docs" / "structure.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)", row)] == layers
