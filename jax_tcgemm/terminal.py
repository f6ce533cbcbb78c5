"""What the commands print on, and how they end in an error."""

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape


@contextlib.contextmanager
def errors_as_text() -> Iterator[None]:
    """Ends the command with the message of an error the user can act on, and no traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(1) from error


def output() -> Console:
    """The standard output; wide enough for every table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=150)
