"""What imports what: the contracts in pyproject.toml."""

from pathlib import Path

from importlinter import cli

CONTRACTS = Path(__file__).resolve().parents[1] / "pyproject.toml"


def test_imports_keep_the_contracts():
    status = cli.lint_imports(config_filename=str(CONTRACTS), no_cache=True)
    assert status == cli.EXIT_STATUS_SUCCESS
