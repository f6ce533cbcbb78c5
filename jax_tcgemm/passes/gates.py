"""Gated GEMMs of a program: two products of one operand as one call, or one stacked product.

A call takes the operand that both products share as its left operand; the columns of its results
belong to the right operand. Operands are exchanged where the layout of a result requires it. The
gate and up of a stacked product are a dimension of size 2 before the columns, which reshapes the
right operand without a copy.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.gate_up import GateUp
from jax_tcgemm.epilogues.group import Group, Products
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.system.jax_internals import as_jaxpr, new_variable

# The most earlier products of the same operand that are tried as a partner, nearest first.
_MOST_PARTNERS = 3


def products_of(
    equations: Sequence[core.JaxprEqn], can_have_epilogue: Callable[[core.JaxprEqn], bool]
) -> Products:
    """Return the products of a program that can have an epilogue, and queries about them."""
    products = {n: eqn for n, eqn in enumerate(equations) if can_have_epilogue(eqn)}
    known: dict = {}
    alike: dict = collections.defaultdict(list)

    def arranged(number: int) -> core.JaxprEqn | None:
        if number not in known:
            known[number] = by_columns(products[number])
        return known[number]

    for number in products:
        if (eqn := arranged(number)) is not None:
            alike[_key(eqn)].append(number)

    def product(number: int) -> core.Var | None:
        return products[number].outvars[0] if number in products else None

    def lines(number: int) -> tuple[frozenset[int], frozenset[int]]:
        lhs, rhs = map(frozenset, _dims(products[number]))
        is_divided = any(not x.aval.sharding.mesh.empty for x in products[number].invars)
        return (frozenset(),) * 2 if is_divided else (lhs, rhs)

    @functools.cache
    def before() -> dict[int, int]:
        return _products_before(equations, products)

    def partners(number: int) -> Sequence[int]:
        if (eqn := arranged(number)) is None:
            return ()
        found = [other for other in reversed(alike[_key(eqn)]) if other < number]
        # A product that depends on the other one cannot be its partner.
        return [other for other in found[:_MOST_PARTNERS] if not before()[number] >> other & 1]

    def can_split(number: int, gate_up: GateUp) -> bool:
        found = _with_columns_last(products[number], gate_up)
        return found is not None and _are_column_blocks(*found)

    return Products(product, lines, partners, can_split)


def call_of(equations: Sequence[core.JaxprEqn], group: Group):
    """Return the operands of a group's call, their encoding, and equations that prepare them.

    Returns:
      At most one equation to run first; the operands; their encoding.
    """
    eqn = equations[group.products[0]]
    if group.gate_up is None and len(group.products) == 1:
        return [], eqn.invars, _encoding(eqn, eqn.params)
    if group.gate_up is None:
        eqn, other = by_columns(eqn), by_columns(equations[group.products[1]])
        operands = [*eqn.invars, other.invars[1]]
        return [], operands, _encoding(eqn, eqn.params, num_rhs=2)
    eqn, gate_up = _with_columns_last(eqn, group.gate_up)
    pair = gate_up.dimension + gate_up.is_interleaved
    before, rhs, params = _with_pair(eqn, gate_up)
    return before, [eqn.invars[0], rhs], _encoding(eqn, params, pair=pair)


def _encoding(eqn: core.JaxprEqn, params: dict, **fields) -> Plain:
    lhs, rhs = (x.aval for x in eqn.invars)
    keys = "dimension_numbers", "permutation", "precision", "out_sharding"
    return Plain.of(lhs, rhs, **{key: params[key] for key in keys}, **fields)


def _products_before(equations: Sequence[core.JaxprEqn], products) -> dict[int, int]:
    """Return for each product the earlier products that it depends on, as a bit mask."""
    made: dict = {}
    found = {}
    for number, eqn in enumerate(equations):
        bits = 0
        for x in eqn.invars:
            if isinstance(x, core.Var):
                bits |= made.get(x, 0)
        if number in products:
            found[number] = bits
            bits |= 1 << number
        if bits:
            made.update(dict.fromkeys(eqn.outvars, bits))
    return found


def _key(eqn: core.JaxprEqn) -> tuple:
    """Return a key that is equal for two products that one call can compute."""
    (lhs, rhs), (out,) = eqn.invars, eqn.outvars
    rows = eqn.params["options"].invariant_rows
    params = tuple(sorted((eqn.params | {"options": rows}).items()))
    return lhs, rhs.aval, out.aval, params


# --- rows and columns -----------------------------------------------------------------------------


def _ranks(eqn: core.JaxprEqn) -> tuple[int, int, int]:
    """Return the numbers of batch dimensions, left free and right free dimensions of the result."""
    contract, batch = eqn.params["dimension_numbers"]
    free = [
        x.aval.ndim - len(contracted) - len(batched)
        for x, contracted, batched in zip(eqn.invars, contract, batch, strict=True)
    ]
    return len(batch[0]), *free


def _dims(eqn: core.JaxprEqn) -> tuple[list[int], list[int]]:
    """Return the result's left free and right free dimensions, without those of size 1."""
    num_batch, num_lhs, _ = _ranks(eqn)
    (out,) = eqn.outvars
    found: tuple[list[int], list[int]] = [], []
    for dim, natural in enumerate(eqn.params["permutation"]):
        if natural >= num_batch and out.aval.shape[dim] != 1:
            found[natural >= num_batch + num_lhs].append(dim)
    return found


def by_columns(eqn: core.JaxprEqn) -> core.JaxprEqn | None:
    """Return a product whose right free dimensions come last in the result; None if impossible.

    The operands are exchanged if the left free dimensions come last.
    """
    lhs, rhs = _dims(eqn)
    if rhs and max(lhs, default=-1) < min(rhs):
        return eqn
    return _exchanged(eqn) if lhs and max(rhs, default=-1) < min(lhs) else None


def rows_and_columns(eqn: core.JaxprEqn) -> tuple[list[int], list[int]]:
    """Return the dimensions of the result that are rows and columns of a product `by_columns`."""
    lhs, rhs = _dims(by_columns(eqn))
    return lhs, rhs


def _exchanged(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Return a product with its operands exchanged, and the same result."""
    num_batch, num_lhs, num_rhs = _ranks(eqn)

    def moved(natural: int) -> int:
        if natural < num_batch:
            return natural
        return natural + num_rhs if natural < num_batch + num_lhs else natural - num_lhs

    params, precision = eqn.params, eqn.params["precision"]
    changed = {
        "dimension_numbers": tuple((right, left) for left, right in params["dimension_numbers"]),
        "permutation": tuple(map(moved, params["permutation"])),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return eqn.replace(invars=eqn.invars[::-1], params=params | changed)


# --- gate and up of a stacked product -------------------------------------------------------------


def _with_columns_last(eqn: core.JaxprEqn, gate_up: GateUp) -> tuple[core.JaxprEqn, GateUp] | None:
    """Return a stacked product `by_columns` with its gate and up; None if no columns are last.

    A stacking dimension that is indexed away may be anywhere in the result. If it comes before the
    rows, as in an einsum to "cbtj" with two entries of c, it is moved to the first of the columns.
    """
    found = by_columns(eqn)
    if found is not None or not gate_up.is_dropped:
        return None if found is None else (found, gate_up)
    pair, (out,) = gate_up.dimension, eqn.outvars
    # A batch dimension is among neither operand's columns.
    columns = next((dims for dims in _dims(eqn) if pair in dims), [])
    others = [dim for dim in columns if dim != pair]
    if not others or not out.aval.sharding.mesh.empty:
        return None
    order = [dim for dim in range(out.aval.ndim) if dim != pair]
    place = order.index(others[0])
    order.insert(place, pair)
    permutation = tuple(eqn.params["permutation"][dim] for dim in order)
    shape = tuple(out.aval.shape[dim] for dim in order)
    moved = new_variable(out, out.aval.update(shape=shape))
    found = by_columns(
        eqn.replace(outvars=[moved], params=eqn.params | {"permutation": permutation})
    )
    return None if found is None else (found, dataclasses.replace(gate_up, dimension=place))


def _are_column_blocks(eqn: core.JaxprEqn, gate_up: GateUp) -> bool:
    """Return whether gate and up are column blocks of the right operand that need no copy.

    The stacking dimension must be the first of the columns, or select one of two consecutive
    arrays; or gate and up columns are interleaved, and each column is contiguous in memory. The
    operands must not be sharded over explicit mesh axes.
    """
    _, columns = _dims(eqn)
    dimension = gate_up.dimension
    has_two_last = gate_up.is_dropped and len(columns) > 1
    if dimension == columns[-1] and (gate_up.is_interleaved or has_two_last):
        return _are_interleaved_columns(eqn, columns)
    if gate_up.is_interleaved:
        return False
    is_divided = any(not x.aval.sharding.mesh.empty for x in eqn.invars)
    if columns[0] != dimension or is_divided or eqn.params["out_sharding"] is not None:
        return False
    axes = [_axis(eqn, dim) for dim in columns]
    if eqn.outvars[0].aval.shape[dimension] == 2 and axes[0] == 0:
        axes = axes[1:] or axes
    shape = eqn.invars[1].aval.shape
    between = [axis for axis in range(axes[0], axes[-1] + 1) if shape[axis] != 1]
    return axes == between


def _are_interleaved_columns(eqn: core.JaxprEqn, columns) -> bool:
    """Return whether columns are adjacent axes of the right operand, each column contiguous."""
    is_divided = any(not x.aval.sharding.mesh.empty for x in eqn.invars)
    if is_divided or eqn.params["out_sharding"] is not None:
        return False
    (_, contract), _ = eqn.params["dimension_numbers"]
    axes = [_axis(eqn, dim) for dim in columns]
    last = range(axes[-1] + 1, eqn.invars[1].aval.ndim)
    return axes == list(range(axes[0], axes[-1] + 1)) and sorted(contract) == list(last)


def _axis(eqn: core.JaxprEqn, dimension: int) -> int:
    """Return the right operand's axis of a dimension of the result."""
    num_batch, num_lhs, _ = _ranks(eqn)
    contract, batch = eqn.params["dimension_numbers"]
    taken = {*contract[1], *batch[1]}
    free = [axis for axis in range(eqn.invars[1].aval.ndim) if axis not in taken]
    return free[eqn.params["permutation"][dimension] - num_batch - num_lhs]


def _with_pair(eqn: core.JaxprEqn, gate_up: GateUp):
    """Return the right operand with a dimension for gate and up, its reshape, and parameters."""
    params, rhs = eqn.params, eqn.invars[1]
    if gate_up.is_dropped:
        return [], rhs, params
    contract, batch = params["dimension_numbers"]
    natural = params["permutation"][gate_up.dimension]
    axis, shape = _axis(eqn, gate_up.dimension), list(rhs.aval.shape)
    size = shape[axis] // 2
    shape[axis : axis + 1] = (size, 2) if gate_up.is_interleaved else (2, size)
    reshape = _reshape(rhs.aval, tuple(shape))
    made = new_variable(reshape.outvars[0])
    reshape = reshape.replace(invars=[rhs], outvars=[made], source_info=eqn.source_info)

    def moved(axes):
        return tuple(x + (x > axis) for x in axes)

    order = [(x,) if x < natural else (x + 1,) for x in params["permutation"]]
    order[gate_up.dimension] = natural, natural + 1
    changed = {
        "dimension_numbers": ((contract[0], moved(contract[1])), (batch[0], moved(batch[1]))),
        "permutation": tuple(x for axes in order for x in axes),
    }
    return [reshape], made, params | changed


@functools.lru_cache(maxsize=1024)
def _reshape(aval, shape: tuple[int, ...]) -> core.JaxprEqn:
    jaxpr = jax.make_jaxpr(lambda x: lax.reshape(x, shape))(aval)
    (eqn,) = as_jaxpr(jaxpr).eqns
    return eqn
