"""Expression graph of a jaxpr, with data movement as a single kind of node.

A `Value` is an array of the jaxpr, whose code is emitted for one element at a time. A value without
elementwise code is `Opaque`; this is an error only if its elements are needed.

"""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.extend import core

from jax_tcgemm.epilogues.code import places
from jax_tcgemm.epilogues.code.places import Places
from jax_tcgemm.system.jax_internals import source_line


@dataclasses.dataclass(eq=False, frozen=True)
class Value:
    """Array of a jaxpr.

    Attributes:
      shape: shape of the array.
      dtype: dtype of the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(eq=False, frozen=True)
class Accumulator(Value):
    """Accumulator of product `number`."""

    number: int


@dataclasses.dataclass(eq=False, frozen=True)
class Operand(Value):
    """Operand `number`, or an array that the function closes over."""

    number: int | jax.Array


@dataclasses.dataclass(eq=False, frozen=True)
class Constant(Value):
    """Array whose elements are all equal to one number."""

    number: np.generic


@dataclasses.dataclass(eq=False, frozen=True)
class Index(Value):
    """Row-major index along some dimensions, shifted right by `shift` bits."""

    dimensions: tuple[int, ...]
    shift: int = 0


@dataclasses.dataclass(eq=False, frozen=True)
class View(Value):
    """Elements of another value.

    Attributes:
      of: the other value.
      move: function from the places of elements in this value, and the result's shape, to their
        places in `of`.
      keeps_order: whether the view has all elements of `of`, in the same order.
    """

    of: Value
    move: Callable[[Places, tuple[int, ...]], Places]
    keeps_order: bool = False


@dataclasses.dataclass(eq=False, frozen=True)
class Apply(Value):
    """Elementwise primitive.

    Attributes:
      primitive: a key of `expressions.EXPRESSIONS`.
      operands: values of the same rank, or scalars; dimensions of size 1 broadcast.
      params: parameters of the primitive.
      equation: the equation, for error messages.
      expanded: the primitive whose expansion contains this one, such as "polynomial", or "".
    """

    primitive: str
    operands: tuple[Value, ...]
    params: dict
    equation: "Equation"
    expanded: str = ""


@dataclasses.dataclass(eq=False, frozen=True)
class Member(Value):
    """Result `number` of an `Apply` that has two."""

    of: Value
    number: int


@dataclasses.dataclass(eq=False, frozen=True)
class Reduced(Value):
    """Sums ("sum"), maxima ("max") or minima ("min") of another value along some dimensions."""

    of: Value
    kind: str
    dimensions: tuple[int, ...]
    equation: "Equation"


@dataclasses.dataclass(eq=False, frozen=True)
class Opaque(Value):
    """Value without elementwise code, and the rule that its equation breaks."""

    equation: "Equation | str"
    rule: str


@dataclasses.dataclass(eq=False, frozen=True)
class Keys(Value):
    """Random keys: their two words, each an array of uint32."""

    words: tuple[Value, Value]


@dataclasses.dataclass(frozen=True)
class Equation:
    """Equation as error messages name it; `call` is the call that contains it."""

    eqn: core.JaxprEqn
    call: "Equation | None" = None

    def __str__(self) -> str:
        types = ", ".join(_type(x.aval) for x in self.eqn.invars)
        where = self.where
        return f"{self.eqn.primitive.name}({types})" + (f" at {where}" if where else "")

    @property
    def where(self) -> str:
        """Return "file:line" of the equation, or of the call of a JAX function that contains it."""
        return source_line(self.eqn) or (self.call.where if self.call else "")


def _type(aval) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def keys_of(aval, data: Value) -> Keys:
    """Return keys whose words are along the last dimension of a value."""

    def word(number: int) -> Value:
        def move(at: Places, result) -> Places:
            return (*at, places.first(len(result)).moved(number))

        return view_of(data, aval.shape, move)

    return Keys(aval.shape, aval.dtype, (word(0), word(1)))


def view_of(of: Value, shape, move, *, keeps_order: bool = False) -> Value:
    """Return a value whose elements lie at the places in `of` that `move` returns."""
    if isinstance(of, Keys):
        return Keys(tuple(shape), of.dtype, tuple(view_of(word, shape, move) for word in of.words))
    return View(tuple(shape), of.dtype, of, move, keeps_order)


def broadcast(x: Value, shape, dimensions) -> Value:
    """Return a value broadcast to a shape, as `lax.broadcast_in_dim` does."""

    def move(at: Places, result) -> Places:
        pairs = zip(x.shape, dimensions, strict=True)
        zero = places.first(len(result))
        return tuple(zero if extent == 1 else at[dim] for extent, dim in pairs)

    return view_of(x, shape, move, keeps_order=math.prod(shape) == math.prod(x.shape))


def sliced(x: Value, shape, starts, strides) -> Value:
    """Return a slice of a value."""

    def move(at: Places, result) -> Places:
        triples = zip(at, starts, strides, strict=True)
        return tuple(place.scaled(stride).moved(start) for place, start, stride in triples)

    return view_of(x, shape, move)
