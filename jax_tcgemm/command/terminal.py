"""What the commands print on, and how they end."""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape


@contextlib.contextmanager
def errors_as_text() -> Iterator[None]:
    """Ends the command with the message of an error the user can act on, and no traceback."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(1) from error


def run(app: typer.Typer, name: str) -> None:
    """Runs a command line, whatever its output can encode and however soon its reader leaves."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")
    try:
        try:
            app(prog_name=name)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more, into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def output() -> Console:
    """The standard output; wide enough for every table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=150)
