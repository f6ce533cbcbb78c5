"""A function that the command line names, and its arguments by their shapes."""

import importlib
import inspect
import itertools
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import typer

from jax_tcgemm.command.terminal import errors_as_text

_NAMES = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64"),
    *("complex64", "complex128", "bool"),
)


def _short(name: str) -> str:
    """Return a dtype's name as jaxprs print it, such as bf16."""
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        name = name.replace(long, short)
    return name


# Signed integers also have the names that XLA and `explain` give them, such as s8.
_DTYPES = {_short(name): jnp.dtype(name) for name in _NAMES}
_DTYPES |= {
    f"s{jnp.iinfo(dtype).bits}": dtype
    for dtype in list(_DTYPES.values())
    if jnp.issubdtype(dtype, jnp.signedinteger)
}


def parse_shape(text: str) -> jax.ShapeDtypeStruct:
    """Return the array that a text such as "bf16[4096,2304]" or "f32[]" describes."""
    matched = re.fullmatch(r"(\w+)\[([0-9]+(?:,[0-9]+)*)?\]", text.replace(" ", ""))
    if matched is None:
        raise typer.BadParameter(
            f"explain: shape must be DTYPE[SIZE,...], got {text!r}; write 'bf16[4096,2304]', "
            "or 'f32[]' for a scalar, in quotes"
        )
    dtype, sizes = matched.groups()
    if dtype not in _DTYPES:
        raise typer.BadParameter(
            f"explain: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r} in {text!r}"
        )
    shape = tuple(map(int, sizes.split(","))) if sizes else ()
    return jax.ShapeDtypeStruct(shape, _DTYPES[dtype])


def load_function(name: str) -> Callable:
    """Return the function that MODULE:FUNCTION names, imported as `python -m MODULE` would."""
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in f"{module_name}.{path}".split(".")):
        raise typer.BadParameter(
            f"explain: function must be MODULE:FUNCTION, got {name!r}; write model:loss for "
            "loss in model.py, parts.model:loss for loss in parts/model.py"
        )
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name in itertools.accumulate(module_name.split("."), "{}.{}".format):
            raise typer.BadParameter(
                f"explain: module must be importable, got {module_name!r}; name it without .py, "
                f"and run the command in its folder or add that to PYTHONPATH (here: {folder})"
            ) from error
        with errors_as_text():
            raise ModuleNotFoundError(
                f"explain: {module_name} must be importable, got: {error}; install what it imports"
            ) from error
    try:
        function = operator.attrgetter(path)(module)
    except AttributeError as error:
        raise typer.BadParameter(
            f"explain: function must be an attribute of {module_name}, got {path!r}: {error}"
        ) from error
    if not callable(function):
        raise typer.BadParameter(
            f"explain: {name} must be a function, got an object of type {type(function).__name__}"
        )
    return function


def check_count(name: str, function: Callable, shapes: Sequence[str]) -> None:
    """Raise BadParameter where a function takes more or fewer arguments than there are shapes."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # Not every callable has one.
        return
    try:
        signature.bind(*shapes)
    except TypeError as error:
        raise typer.BadParameter(
            f"explain: each argument of {name}{signature} must have a shape, got {len(shapes)} of "
            f"them: {error}"
        ) from error


def _is_inexact(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def with_gradients(
    function: Callable, arguments: Sequence[jax.ShapeDtypeStruct]
) -> tuple[Callable, tuple]:
    """Return a function's result with its gradients, as a function, and that one's arguments.

    The gradients are those of all floating-point arguments. The cotangents of the floating-point
    results are arguments, too, because those of a sum would be ones, which simplify products.
    """
    indices = [i for i, x in enumerate(arguments) if _is_inexact(x)]
    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    cotangents = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results if _is_inexact(x)]
    if not (indices and cotangents):
        what = "result" if indices else "argument"
        raise typer.BadParameter(
            f"explain: with --grad f must have a floating-point {what}, got none; leave it out"
        )

    def result_and_gradients(arguments, cotangents):
        def of_floats(*floats):
            values = list(arguments)
            for i, x in zip(indices, floats, strict=True):
                values[i] = x
            leaves = jax.tree.leaves(function(*values))
            return (
                [x for x in leaves if _is_inexact(x)],
                [x for x in leaves if not _is_inexact(x)],
            )

        result, pull, rest = jax.vjp(of_floats, *(arguments[i] for i in indices), has_aux=True)
        return result, rest, pull(cotangents)

    return result_and_gradients, (list(arguments), cotangents)


def place_of(error: BaseException, function: Callable) -> str:
    """Return " (FILE:LINE)" of the innermost call in a function's file; "" where there is none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if code is not None and frame.filename == code.co_filename
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
