"""Products of operands that are sums of terms: one product with a contracted dimension more.

    sum over pairs p and k of lhs_p[..., k] * rhs_p[k, ...]

Each operand is rewritten once, with the dimension of its terms in front of those that are
contracted, so that both fold into K wherever these do. Of complex operands the dimension has real
and imaginary parts, too, and the right operand, and so the result, another one for those of the
result:

    (re, im) = (lhs_re, lhs_im) * ((rhs_re, rhs_im), (-rhs_im, rhs_re))
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device.call import call
from jax_tcgemm.device.request import Plan, Request, make_plan
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES, DTYPES
from jax_tcgemm.problem.precision import Numerics
from jax_tcgemm.problem.split import SplitProblem
from jax_tcgemm.selection import Device

_EXPONENT_BITS = 8


class Layout(NamedTuple):
    """A product of terms: what of it is said to `fold`, and where its result is complex.

    `stored` has the extents of the arrays that hold the operands, whose last dimension is filled
    up by zeros so that rows are 16-byte aligned. A contracted one is that long in the product,
    too, and so is one of the right operand of complex numbers, whose result is cut.
    """

    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    dimension_numbers: tuple
    permutation: tuple[int, ...]
    stored: tuple[tuple[int, ...], tuple[int, ...]]
    component: int | None = None


def split_on(device: Device, numerics: Numerics) -> Numerics:
    """Return numerics whose terms, if any, are split by a kernel where one can."""
    if numerics.terms is None or device.platform != "cuda":
        return numerics
    return _with_splitter(numerics, device)


def split_by_xla(numerics: Numerics) -> Numerics:
    """Return numerics whose terms XLA splits."""
    return _with_splitter(numerics, None)


def _with_splitter(numerics: Numerics, device: Device | None) -> Numerics:
    return dataclasses.replace(numerics, terms=dataclasses.replace(numerics.terms, device=device))


def layout(lhs_shape, rhs_shape, dimension_numbers, permutation, numerics: Numerics) -> Layout:
    """The product of operands of these shapes, or of their terms."""
    terms, (contract, batch), shapes = numerics.terms, dimension_numbers, (lhs_shape, rhs_shape)
    if terms is None:
        return Layout(lhs_shape, rhs_shape, dimension_numbers, permutation, shapes)
    new_shapes, new_contract, new_batch, stored = [], [], [], []
    multiple = 1 if terms.device is None else _ALIGNMENT // numerics.lhs_dtype.itemsize
    is_along_rows = len(contract[0]) == 1 and any(
        len(shape) - 1 in own for shape, own in zip(shapes, contract, strict=True)
    )
    for shape, own, own_batch, is_rhs in zip(shapes, contract, batch, (False, True), strict=True):
        places = _places(len(shape), own, own_batch, has_component=is_rhs and terms.is_complex)
        extents = {_TERMS: terms.number, _COMPONENT: 2} | dict(enumerate(shape))
        if is_along_rows:
            extents[own[0]] = _up_to(extents[own[0]], multiple)
        last = places[-1]
        filled = _up_to(extents[last], multiple) if last not in own else extents[last]
        if _COMPONENT in places:
            extents[last] = filled  # Columns of re and im are to lie at one stride.
        new_shapes.append(tuple(extents[axis] for axis in places))
        new_contract.append(tuple(places.index(axis) for axis in (_TERMS, *own)))
        new_batch.append(tuple(places.index(axis) for axis in own_batch))
        stored.append((*new_shapes[-1][:-1], filled))
    numbers, stored = (tuple(new_contract), tuple(new_batch)), tuple(stored)
    if not terms.is_complex:
        return Layout(*new_shapes, numbers, permutation, stored)
    # It is the first of the right operand's own dimensions, and stays that in the result.
    first = len(lhs_shape) - len(contract[0])
    order = [axis + (axis >= first) for axis in permutation]
    component = next((i for i, axis in enumerate(order) if axis > first), len(order))
    order.insert(component, first)
    return Layout(*new_shapes, numbers, tuple(order), stored, component)


_TERMS, _COMPONENT = "terms", "component"
_ALIGNMENT = 16  # bytes of which rows of stored terms are a multiple


def _up_to(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


def _places(ndim: int, contract: Sequence[int], batch: Sequence[int], *, has_component) -> list:
    """The dimensions of a split operand, in order."""
    places = list(range(ndim))
    places.insert(min(contract, default=ndim), _TERMS)
    if has_component:
        own = [axis for axis in range(ndim) if axis not in (*contract, *batch)]
        places.insert(places.index(own[0]) if own else 0, _COMPONENT)
    return places


@dataclasses.dataclass(frozen=True)
class Split:
    """An operand that is split into terms.

    Attributes:
      options: options of the product's call.
      numerics: of the product.
      is_rhs: which of the operands it is.
      shape: its own.
      contract: its contracted dimensions, before the first of which the terms lie.
      batch: its batch dimensions.
      stored: the extents of the terms, filled up by zeros.
    """

    options: CallOptions
    numerics: Numerics
    is_rhs: bool
    shape: tuple[int, ...]
    contract: tuple[int, ...]
    batch: tuple[int, ...]
    stored: tuple[int, ...]

    @functools.cached_property
    def plan(self) -> Plan | None:
        """Plan of the split; None if XLA splits, since no device with such kernels was named."""
        device = self.numerics.terms.device
        request = Request("split", self.options.selecting(), _problem(self))
        return device and make_plan(request, device)

    @property
    def is_of_xla(self) -> bool:
        """Whether XLA splits it."""
        return self.plan is None or self.plan.runs_by_xla

    def __str__(self) -> str:
        """Who splits it, and why, where that is XLA on a device that has a kernel for it."""
        if self.plan is None:
            return "XLA"
        choice = self.plan.choice
        if self.is_of_xla:
            return f"XLA, since {choice.why}"
        return f"{choice.implementation}/{choice.config}"


def split(x: jax.Array, how: Split) -> jax.Array:
    """Carries out a plan: the terms of x, in the order of the pairs, as they are stored."""
    if not how.is_of_xla:
        problem = how.plan.problem
        wide = lax.convert_element_type(x, DTYPES[problem.in_dtype])
        (d,) = call(problem, how.plan.choice, [wide], list(problem.results().values()))
        return d.reshape(how.stored)
    x = stacked(x, how.numerics, how.contract, how.batch, is_rhs=how.is_rhs)
    added = [(0, s - e, 0) for s, e in zip(how.stored, x.shape, strict=True)]
    return lax.pad(x, np.zeros((), x.dtype), added)


def _problem(how: Split) -> SplitProblem | str:
    """Return the problem of the kernel that splits, or why no kernel does."""
    terms, shape, stored, is_rhs = how.numerics.terms, how.shape, how.stored, how.is_rhs
    if math.prod(shape) == 0:
        return "there is nothing to split"
    has_component = is_rhs and terms.is_complex
    places = _places(len(shape), how.contract, how.batch, has_component=has_component)
    if places[-1] in (_TERMS, _COMPONENT):
        return "nothing follows the terms of a number"
    dtype = (how.numerics.lhs_dtype, how.numerics.rhs_dtype)[is_rhs]
    if stored[-1] * dtype.itemsize % _ALIGNMENT:
        return f"rows of terms must be of whole {_ALIGNMENT} bytes, got {stored[-1]} of {dtype}"
    # Runs of dimensions between those that are inserted, the last one apart.
    runs, kept = [[]], [[]]
    for axis, extent in zip(places[:-1], stored, strict=False):
        if axis in (_TERMS, _COMPONENT):
            runs.append([])
            kept.append([])
        else:
            runs[-1].append(shape[axis])
            kept[-1].append(extent)
    outer, middle, inner = (math.prod(run) for run in (*runs, [])[:3])
    forms = ["real", "left", "right"]
    form = forms[terms.is_complex + (terms.is_complex and is_rhs)]
    if form == "right" and places.index(_COMPONENT) < places.index(_TERMS):
        form = "right_first"
    return SplitProblem(
        form=form,
        outer=outer,
        middle=middle,
        inner=inner,
        columns=shape[places[-1]],
        depth=math.prod(kept[2 if form == "right_first" else 1]),
        pitch=stored[-1],
        terms=tuple(pair[is_rhs] for pair in terms.pairs),
        in_dtype="c64" if terms.is_complex else "f32",
        out_dtype=DTYPE_NAMES[dtype],
    )


def stacked(x: jax.Array, numerics: Numerics, contract, batch, *, is_rhs: bool) -> jax.Array:
    """The terms of an operand side by side, which XLA makes and nothing fills up."""
    terms, dtype = numerics.terms, (numerics.lhs_dtype, numerics.rhs_dtype)[is_rhs]
    numbers = [pair[is_rhs] for pair in terms.pairs]
    axis = min(contract, default=x.ndim)
    if not terms.is_complex:
        return jnp.stack(_terms_of(x, numbers, terms.mantissa_bits, dtype), axis)
    both = [_terms_of(y, numbers, terms.mantissa_bits, dtype) for y in (jnp.real(x), jnp.imag(x))]
    pairs = list(zip(*both, strict=True))
    if not is_rhs:
        return jnp.stack([y for pair in pairs for y in pair], axis)
    results = (
        jnp.stack([y for re, im in pairs for y in (re, -im)], axis),
        jnp.stack([y for re, im in pairs for y in (im, re)], axis),
    )
    places = _places(x.ndim, contract, batch, has_component=True)
    return jnp.stack(results, places.index(_COMPONENT))


def _terms_of(x: jax.Array, numbers: Sequence[int], mantissa_bits: int, dtype) -> list[jax.Array]:
    """For each product of a pair the term that it takes: numbers[-1] is 0, of the largest ones.

    Infinities and NaNs are part of the largest product only, as which it is what float32 would
    give; elsewhere they would be multiplied by zeros and by numbers of either sign. Roundings are
    ones that XLA may not leave out.
    """
    x = lax.convert_element_type(x, jnp.float32)
    # That a term can hold: what is above must not round to infinity.
    largest = (2 - 2.0**-mantissa_bits) * 2.0**127
    is_finite = jnp.isfinite(x)
    rest = jnp.where(is_finite, x, 0)
    found = []
    for number in range(max(numbers) + 1):
        bounded = jnp.clip(rest, -largest, largest) if number == 0 else rest
        term = lax.reduce_precision(bounded, _EXPONENT_BITS, mantissa_bits)
        rest = rest - term
        found.append(term)
    first = jnp.where(is_finite, found[0], x)
    taken = [*(found[number] for number in numbers[:-1]), first]
    return [lax.convert_element_type(term, dtype) for term in taken]


def with_components(d: jax.Array, component: int | None, shape: tuple[int, ...]) -> jax.Array:
    """The result of a product of terms, complex where it has a dimension for that.

    Args:
      d: what the product made, which may have more columns.
      component: the dimension of real and imaginary part.
      shape: of the result.
    """
    if component is None:
        return d
    components = (lax.index_in_dim(d, i, component, keepdims=False) for i in range(2))
    return lax.complex(*(lax.slice(x, [0] * x.ndim, shape) for x in components))
