"""Products of operands that are sums of parts: one product with a contracted dimension more.

    sum over pairs p and k of lhs_p[..., k] * rhs_p[k, ...]

Each operand is rewritten once, with the dimension of its parts in front of those that are
contracted, so that both fold into K wherever these do. Of complex operands the dimension has real
and imaginary parts, too, and the right operand, and so the result, another one for those of the
result:

    (re, im) = (lhs_re, lhs_im) * ((rhs_re, rhs_im), (-rhs_im, rhs_re))
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.problem.precision import Numerics, Parts

_EXPONENT_BITS = 8


class Layout(NamedTuple):
    """A product of parts: what of it is said to `fold`, and where its result is complex."""

    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    dimension_numbers: tuple
    permutation: tuple[int, ...]
    component: int | None = None


def layout(lhs_shape, rhs_shape, dimension_numbers, permutation, parts: Parts | None) -> Layout:
    """The product of the parts of operands of these shapes."""
    if parts is None:
        return Layout(lhs_shape, rhs_shape, dimension_numbers, permutation)
    (contract, batch), shapes = dimension_numbers, (lhs_shape, rhs_shape)
    new_shapes, new_contract, new_batch = [], [], []
    for shape, own, own_batch, is_rhs in zip(shapes, contract, batch, (False, True), strict=True):
        places = _places(len(shape), own, own_batch, has_component=is_rhs and parts.is_complex)
        extents = {_PARTS: parts.number, _COMPONENT: 2} | dict(enumerate(shape))
        new_shapes.append(tuple(extents[axis] for axis in places))
        new_contract.append(tuple(places.index(axis) for axis in (_PARTS, *own)))
        new_batch.append(tuple(places.index(axis) for axis in own_batch))
    numbers = tuple(new_contract), tuple(new_batch)
    if not parts.is_complex:
        return Layout(*new_shapes, numbers, permutation)
    # It is the first of the right operand's own dimensions, and stays that in the result.
    first = len(lhs_shape) - len(contract[0])
    order = [axis + (axis >= first) for axis in permutation]
    component = next((i for i, axis in enumerate(order) if axis > first), len(order))
    order.insert(component, first)
    return Layout(*new_shapes, numbers, tuple(order), component)


_PARTS, _COMPONENT = "parts", "component"


def _places(ndim: int, contract: Sequence[int], batch: Sequence[int], *, has_component) -> list:
    """The dimensions of a split operand, in order."""
    places = list(range(ndim))
    places.insert(min(contract, default=ndim), _PARTS)
    if has_component:
        own = [axis for axis in range(ndim) if axis not in (*contract, *batch)]
        places.insert(places.index(own[0]) if own else 0, _COMPONENT)
    return places


def split(x: jax.Array, numerics: Numerics, contract, batch, *, is_rhs: bool) -> jax.Array:
    """The parts of an operand, in the order of the pairs, as `layout` has them."""
    parts, dtype = numerics.parts, (numerics.lhs_dtype, numerics.rhs_dtype)[is_rhs]
    numbers = [pair[is_rhs] for pair in parts.pairs]
    axis = min(contract, default=x.ndim)
    if not parts.is_complex:
        return jnp.stack(_parts(x, numbers, parts.mantissa_bits, dtype), axis)
    both = [_parts(y, numbers, parts.mantissa_bits, dtype) for y in (jnp.real(x), jnp.imag(x))]
    pairs = list(zip(*both, strict=True))
    if not is_rhs:
        return jnp.stack([y for pair in pairs for y in pair], axis)
    results = (
        jnp.stack([y for re, im in pairs for y in (re, -im)], axis),
        jnp.stack([y for re, im in pairs for y in (im, re)], axis),
    )
    places = _places(x.ndim, contract, batch, has_component=True)
    return jnp.stack(results, places.index(_COMPONENT))


def _parts(x: jax.Array, numbers: Sequence[int], mantissa_bits: int, dtype) -> list[jax.Array]:
    """For each product of a pair the part that it takes: numbers[-1] is 0, of the largest ones.

    Infinities and NaNs are part of the largest product only, as which it is what float32 would
    give; elsewhere they would be multiplied by zeros and by numbers of either sign. Roundings are
    ones that XLA may not leave out.
    """
    x = lax.convert_element_type(x, jnp.float32)
    # That a part can hold: what is above must not round to infinity.
    largest = (2 - 2.0**-mantissa_bits) * 2.0**127
    is_finite = jnp.isfinite(x)
    rest = jnp.where(is_finite, x, 0)
    found = []
    for number in range(max(numbers) + 1):
        bounded = jnp.clip(rest, -largest, largest) if number == 0 else rest
        part = lax.reduce_precision(bounded, _EXPONENT_BITS, mantissa_bits)
        rest = rest - part
        found.append(part)
    first = jnp.where(is_finite, found[0], x)
    taken = [*(found[number] for number in numbers[:-1]), first]
    return [lax.convert_element_type(part, dtype) for part in taken]


def joined(d: jax.Array, component: int | None) -> jax.Array:
    """The result of a product of parts, complex where it has a dimension for that."""
    if component is None:
        return d
    return lax.complex(*(lax.index_in_dim(d, i, component, keepdims=False) for i in range(2)))
