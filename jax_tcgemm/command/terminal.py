"""Output of the commands, and their end on errors."""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape


@contextlib.contextmanager
def errors_as_text() -> Iterator[None]:
    """End the command with the message of an error that the user can act on, and no traceback."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(1) from error


def run(app: typer.Typer, name: str) -> None:
    """Run a command line; tolerate characters that cannot be encoded, and a closed pipe."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")
    try:
        try:
            app(prog_name=name)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes again at exit, into the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def output() -> Console:
    """Return a console on standard output, 150 columns wide where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=150)
