"""Errors whose message begins with the public function that was called."""

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)


def of_call(kind: type[_Error], function: str, message: str) -> _Error:
    """Return an error of a kind, with the public function before the message."""
    return naming(kind(f"{function}: {message}"), function)


def naming(error: _Error, function: str) -> _Error:
    """Mark an error whose message begins with a public function, and return it."""
    error.jax_tcgemm_function = function
    return error


def is_naming(error: Exception) -> bool:
    """Return whether an error is marked by `naming`."""
    return hasattr(error, "jax_tcgemm_function")
