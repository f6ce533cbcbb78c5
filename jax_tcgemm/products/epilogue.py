"""Products with a function of JAX as their epilogue: the part that the public functions share."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.encodings import Encoding
from jax_tcgemm.primitives.encodings.packed import Packed
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.primitives.encodings.ragged import Ragged
from jax_tcgemm.primitives.encodings.ragged_block_scaled import RaggedBlockScaled
from jax_tcgemm.primitives.epilogue_product import epilogue_product, with_layer
from jax_tcgemm.primitives.ragged_dot import RaggedOperands
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.layers import Layer
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import (
    as_array,
    canonical_sharding,
    check_broadcasts,
)
from jax_tcgemm.sharding import shardings
from jax_tcgemm.system.exact import Exactly
from jax_tcgemm.system.jax_internals import trace_context

# Defaults of the arguments that an epilogue replaces; other arguments default to None.
_DEFAULTS = {"alpha": 1.0, "donate_residual": False}


def check_epilogue(op: str, epilogue, epilogue_operands, **replaced) -> None:
    """Check an epilogue and its operands, and that no argument is given that it replaces.

    Raises:
      TypeError: if the epilogue is not a function, or its operands are not a tuple or list.
      ValueError: if operands are given without an epilogue, or an argument in `replaced` is given
        with an epilogue.
    """
    if not isinstance(epilogue_operands, tuple | list):
        raise TypeError(
            f"{op}: epilogue_operands must be a tuple or list of arrays, got epilogue_operands of "
            f"type {type(epilogue_operands).__name__}; put one array into a tuple"
        )
    if epilogue is None:
        if epilogue_operands:
            raise ValueError(
                f"{op}: epilogue_operands must be () without an epilogue, got "
                f"{len(epilogue_operands)} operands; set epilogue to a function of them"
            )
        return
    if not callable(epilogue):
        raise TypeError(
            f"{op}: epilogue must be a function of arrays or None, got epilogue of type "
            f"{type(epilogue).__name__}; pass its arguments as epilogue_operands"
        )
    for name, value in replaced.items():
        default = _DEFAULTS.get(name)
        if value is not default and not _equal(value, default):
            raise ValueError(
                f"{op}: {name} must be {default} beside an epilogue, got {name} of type "
                f"{type(value).__name__}; let the epilogue do it"
            )


def _equal(value, default) -> bool:
    return default is not None and isinstance(value, bool | int | float) and value == default


def with_epilogue(
    options: CallOptions,
    lhs: jax.Array,
    rhs: jax.Array,
    epilogue: Callable,
    epilogue_operands: Sequence,
    *,
    dimension_numbers,
    rhs_up=None,
    pair: int | None = None,
    permutation=None,
    precision=None,
    out_sharding=None,
    in_place: int | None = None,
):
    """Trace an epilogue, check its operands and results, and bind the primitive.

    Args:
      options: options of the call.
      lhs: left operand.
      rhs: right operand.
      epilogue: a function that `check_epilogue` has checked; of a gated product, it takes both
        accumulators.
      epilogue_operands: the operands of the epilogue, a tuple or list.
      dimension_numbers: canonical.
      rhs_up: None, or the second right operand of a gated product.
      pair: None, or the dimension of the product that separates gate and up.
      permutation: order of the result's dimensions.
      precision: as for `matmul`.
      out_sharding: sharding of the accumulator, as for `matmul`.
      in_place: None, or for a `Layer` the index of the operand whose memory the result may reuse.

    Returns:
      What the epilogue returns.
    """
    op = options.function
    ndim = plain.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers)
    out_sharding = canonical_sharding(op, out_sharding, ndim - (pair is not None))
    if pair is not None:
        out_sharding = shardings.with_dimension(out_sharding, pair, ndim)
    rights = (rhs,) if rhs_up is None else (rhs, rhs_up)
    encoding = Plain.of(
        lhs,
        rhs,
        dimension_numbers,
        permutation=permutation,
        num_rhs=len(rights),
        pair=pair,
        precision=canonical_precision(op, precision),
        out_sharding=out_sharding,
    )
    operands = (lhs, *rights)
    if isinstance(epilogue, Layer):
        (out,) = with_layer(
            encoding, operands, epilogue_operands, options, epilogue, in_place=in_place
        )
        return out
    return with_encoded_epilogue(options, encoding, operands, epilogue, epilogue_operands)


def applied(op: str, accs: Sequence[jax.Array], epilogue: Callable, operands: Sequence):
    """Apply an epilogue to accumulators that are arrays, after the checks of `with_epilogue`."""
    traced, operands = _checked(op, tuple(map(jax.typeof, accs)), epilogue, operands)
    out = core.jaxpr_as_fun(traced.function)(*accs, *operands)
    return jax.tree.unflatten(traced.results, out)


def with_encoded_epilogue(
    options: CallOptions,
    encoding: Encoding,
    operands: Sequence[jax.Array],
    epilogue: Callable,
    epilogue_operands: Sequence,
):
    """Run a product of operands in any encoding with an epilogue; see `with_epilogue`.

    Args:
      options: options of the call.
      encoding: how the product's operands are stored.
      operands: the product's operands.
      epilogue: a function that `check_epilogue` has checked; of a gated product, it takes both
        accumulators.
      epilogue_operands: the operands of the epilogue, a tuple or list.

    Returns:
      What the epilogue returns.
    """
    types = encoding.types(operands, options)
    traced, epilogue_operands = _checked(options.function, types, epilogue, epilogue_operands)
    out = epilogue_product(encoding, operands, epilogue_operands, options, traced.function)
    return jax.tree.unflatten(traced.results, out)


def with_encoded_epilogue_of_groups(
    options: CallOptions,
    encoding: Packed | Ragged,
    operands: Sequence[jax.Array],
    epilogue: Callable,
    epilogue_operands: Sequence,
    *,
    groups: int,
):
    """Run a grouped product in any encoding with an epilogue; see `with_encoded_epilogue`.

    Operands of the epilogue may have a value for each group.

    `groups`: the number of groups.
    """
    op, shape = options.function, encoding.shape(operands)
    epilogue_operands, by_group = _operands_of_groups(op, epilogue_operands, groups, shape)
    encoding = dataclasses.replace(encoding, by_group=by_group)
    traced = _trace(epilogue, tuple(encoding.argument_types(operands, epilogue_operands, options)))
    _check_results(op, traced, shape, may_reduce=False)
    out = epilogue_product(encoding, operands, epilogue_operands, options, traced.function)
    return jax.tree.unflatten(traced.results, out)


def with_grouped_epilogue(
    options: CallOptions,
    ragged: RaggedOperands,
    epilogue: Callable,
    epilogue_operands: Sequence,
    *,
    gated: bool,
    blocks=None,
    precision=None,
    out_sharding=None,
):
    """Run a grouped product with ragged rows and an epilogue; see `with_epilogue`.

    Operands of the epilogue may have a value for each group.

    Args:
      options: options of the call.
      ragged: checked, without batch dimensions.
      epilogue: a function that `check_epilogue` has checked; of a gated product, it takes both
        accumulators.
      epilogue_operands: the operands of the epilogue, a tuple or list.
      gated: whether rhs has two matrices for each group.
      blocks: None, or the block shapes of the scales in `ragged`.
      precision: as for `ragged_dot`.
      out_sharding: sharding of the accumulators, as for `ragged_dot`.

    Returns:
      What the epilogue returns.
    """
    op, groups = options.function, ragged.rhs.shape[0]
    how = {
        "gated": gated,
        "precision": canonical_precision(op, precision),
        "out_sharding": canonical_sharding(op, out_sharding, 2),
    }
    if blocks is None:
        encoding = Ragged.of(ragged, **how)
    else:
        encoding = RaggedBlockScaled(groups, blocks=blocks, **how)
    return with_encoded_epilogue_of_groups(
        options, encoding, ragged.given, epilogue, epilogue_operands, groups=groups
    )


def _operands_of_groups(op: str, operands: Sequence, groups: int, shape: tuple[int, int]):
    """Operands of a grouped epilogue, and for each whether it has a value for each group."""
    operands = [_operand(op, f"epilogue_operands[{i}]", x) for i, x in enumerate(operands)]
    return operands, tuple(_is_by_group(op, i, x, groups, shape) for i, x in enumerate(operands))


def _is_by_group(op: str, number: int, x, groups: int, shape: tuple[int, int]) -> bool:
    """Whether an operand has a value for each group, once its shape is checked."""
    name = f"epilogue_operands[{number}]"
    if x.ndim != 3:
        check_broadcasts(op, name, x, shape)
        return False
    if x.shape[0] != groups or x.shape[1] != 1 or x.shape[2] not in (1, shape[1]):
        raise ValueError(
            f"{op}: {name} must have shape ({groups}, 1, {shape[1]}) or ({groups}, 1, 1), a row or "
            f"a number for each group, if it has three dimensions, got {name}.shape={x.shape}; one "
            f"that broadcasts to the rows and columns {shape} has two at most"
        )
    if _is_key(x):
        raise TypeError(
            f"{op}: {name} must have a numeric dtype if it has three dimensions, got {name}.dtype="
            f"{x.dtype}; pass one key for all groups"
        )
    return True


def _checked(op: str, accs: Sequence, epilogue: Callable, operands: Sequence):
    """Return the trace of an epilogue of accumulators of these types, and its operands as arrays.

    The operands broadcast to the accumulators' shape, and the results are what an epilogue may
    return.
    """
    shape = accs[0].shape
    if not getattr(epilogue, "is_checked", False):
        operands = [_operand(op, f"epilogue_operands[{i}]", x) for i, x in enumerate(operands)]
        for i, x in enumerate(operands):
            check_broadcasts(op, f"epilogue_operands[{i}]", x, shape)
    traced = _trace(epilogue, (*accs, *map(jax.typeof, operands)))
    _check_results(op, traced, shape)
    return traced, operands


def _operand(op: str, name: str, x) -> jax.Array:
    return x if isinstance(x, jax.Array) and _is_key(x) else as_array(op, name, x)


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# --- tracing ------------------------------------------------------------------------------------


class _Traced(NamedTuple):
    """Jaxpr of a function, tree of its results, and type of a result that is no array, or ""."""

    function: core.ClosedJaxpr
    results: jax.tree_util.PyTreeDef
    invalid_type: str


class _ClosesOverArraysError(Exception):
    """Raised with a trace that closes over arrays, and therefore must not be cached."""


def _trace(epilogue: Callable, types: tuple) -> _Traced:
    """Trace of a function, cached by the function and its argument types."""
    try:
        key = Exactly(epilogue)
    except TypeError:  # It is not hashable, so that its trace cannot be cached.
        return _trace_uncached(epilogue, types)
    try:
        return _trace_cached(key, types, trace_context())
    except _ClosesOverArraysError as error:
        return error.args[0]


@functools.lru_cache(maxsize=1024)
def _trace_cached(epilogue: Exactly, types: tuple, context) -> _Traced:
    del context
    traced = _trace_uncached(epilogue.value, types)
    if traced.function.consts:
        raise _ClosesOverArraysError(traced)
    return traced


def _trace_uncached(epilogue: Callable, types: tuple) -> _Traced:
    results, invalid_type = None, ""

    def flat(*arguments):
        nonlocal results, invalid_type
        leaves, results = jax.tree.flatten(epilogue(*arguments))
        invalid_type = next((type(x).__name__ for x in leaves if not _is_array(x)), "")
        return () if invalid_type else leaves

    return _Traced(jax.make_jaxpr(flat)(*types), results, invalid_type)


def _is_array(x) -> bool:
    if isinstance(x, bool | int | float | complex):
        return True
    dtype = getattr(x, "dtype", None)
    is_numeric = dtype is not None and (
        jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    )
    return isinstance(x, jax.Array | np.ndarray | np.generic) and is_numeric


def _check_results(
    op: str, traced: _Traced, shape: tuple[int, ...], may_reduce: bool = True
) -> None:
    if traced.invalid_type:
        raise TypeError(
            f"{op}: epilogue must return arrays of numeric dtypes, got a result of type "
            f"{traced.invalid_type}; leave it out"
        )
    results = traced.function.out_avals
    if not results:
        raise ValueError(
            f"{op}: epilogue must return an array at least, got {traced.results}; return what it "
            "computes"
        )
    # NamedAxisEffect only records that an axis of shard_map is in scope.
    if effects := [x for x in traced.function.effects if type(x).__name__ != "NamedAxisEffect"]:
        raise ValueError(
            f"{op}: epilogue must have no effects, got {effects}; print or raise outside of it"
        )
    for i, result in enumerate(results):
        if result.shape == shape:
            continue
        if may_reduce and (_is_reduced(result.shape, shape) or _is_pair(result.shape, shape)):
            continue
        which = f"result {i}" if len(results) > 1 else "one"
        rule = f"{shape} or reduced along some of its dimensions" if may_reduce else f"{shape}"
        raise ValueError(
            f"{op}: epilogue must return arrays of the shape {rule}, got {which} of shape "
            f"{result.shape}; {'reshape' if may_reduce else 'reduce'} it outside"
        )


def _is_reduced(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a shape is another one without some of its dimensions, or with 1 in their place."""
    rest = iter(shape)
    return all(any(extent == other for other in rest) for extent in own if extent != 1)


def _is_pair(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a shape is that of two arrays of another one, as `jnp.stack` makes of them."""
    return any(own == (*shape[:i], 2, *shape[i:]) for i in range(len(shape) + 1))
