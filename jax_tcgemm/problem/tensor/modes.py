"""Subscripts: the names of arrays' modes, read and checked.

`"mhkn,ukvh->munv"` names the modes of each operand and of the result; a mode is one letter. What
the primitives carry are numbers: modes count from 0 in the order in which they first appear.
"""

from collections.abc import Sequence

# Of one array: cuTENSOR's limit.
MAX_MODES = 64

Modes = tuple[int, ...]


def parse(op: str, subscripts, names: Sequence[str], shapes) -> tuple[tuple[Modes, ...], Modes]:
    """The modes of each operand and of the result.

    Args:
      op: the public function, for messages.
      subscripts: such as "ij,jk->ik".
      names: what the operands are called in messages.
      shapes: their shapes.

    Raises:
      TypeError: when the subscripts are not a string.
      ValueError: for subscripts that are malformed or do not fit the shapes.
    """
    if not isinstance(subscripts, str):
        raise TypeError(
            f"{op}: subscripts must be a string, got {type(subscripts).__name__}; "
            'write such as "ij,jk->ik"'
        )
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(names) or "," in output or "->" in output:
        form = ",".join("ijk"[i : i + 2] or "k" for i in range(len(names)))
        raise ValueError(
            f"{op}: subscripts must name the modes of {_and(names)} and of the result, got "
            f'{subscripts=}; write such as "{form}->ik"'
        )
    for letter in (*inputs.replace(",", ""), *output):
        if not letter.isalpha():
            raise ValueError(
                f"{op}: modes must be letters, got {letter!r} in {subscripts=}; "
                "only jax_tcgemm.tensor.einsum takes an ellipsis"
            )
    for name, term, shape in zip(names, terms, shapes, strict=True):
        _check_array(op, name, term, shape)
    repeated = sorted({letter for letter in output if output.count(letter) > 1})
    if repeated:
        raise ValueError(
            f"{op}: modes of the result must be distinct, for else its elements overlap, got "
            f"{output!r} with {_and(repeated)} repeated; name each once"
        )
    _check_extents(op, names, terms, shapes)
    missing = [letter for letter in output if letter not in inputs]
    if missing:
        raise ValueError(
            f"{op}: modes of the result must be modes of an operand, got {_and(missing)} in the "
            f"result of {subscripts=}; broadcast with jax.numpy.broadcast_to"
        )
    numbers = {letter: i for i, letter in enumerate(dict.fromkeys(inputs.replace(",", "")))}
    *operands, result = (tuple(numbers[letter] for letter in term) for term in (*terms, output))
    return tuple(operands), result


def letters(modes: Modes) -> str:
    """Modes for people to read; the inverse of `parse` but for the choice of letters."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return "".join(
        alphabet[mode] if mode < len(alphabet) else chr(0x391 + mode - len(alphabet))
        for mode in modes
    )


def extents(modes: Sequence[Modes], shapes) -> tuple[int, ...]:
    """The extent of each mode, in order."""
    found = {}
    for operand, shape in zip(modes, shapes, strict=True):
        found |= dict(zip(operand, shape, strict=True))
    return tuple(found[mode] for mode in sorted(found))


def _check_array(op, name, term, shape):
    if len(term) > MAX_MODES or len(shape) > MAX_MODES:
        raise ValueError(
            f"{op}: {name} must have at most {MAX_MODES} modes, got {name}.ndim={len(shape)}; "
            "reshape neighboring modes into one"
        )
    if len(term) != len(shape):
        raise ValueError(
            f"{op}: subscripts of {name} must name each of its modes, got {term!r} for "
            f"{name}.shape={tuple(shape)}; write {len(shape)} letters"
        )
    repeated = sorted({letter for letter in term if term.count(letter) > 1})
    if repeated:
        raise ValueError(
            f"{op}: modes of {name} must be distinct, got {term!r} with {_and(repeated)} repeated; "
            "take the diagonal with jax.numpy.diagonal, or use jax_tcgemm.tensor.einsum"
        )


def _check_extents(op, names, terms, shapes):
    first = {}
    for name, term, shape in zip(names, terms, shapes, strict=True):
        for letter, extent in zip(term, shape, strict=True):
            other, other_extent = first.setdefault(letter, (name, extent))
            if extent != other_extent:
                raise ValueError(
                    f"{op}: a mode must have one extent, got {letter!r} with {other_extent} in "
                    f"{other} and {extent} in {name}; give different modes different letters"
                )


def _and(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else str(last)
