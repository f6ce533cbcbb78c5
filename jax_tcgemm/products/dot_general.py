"""Public `dot_general`."""

from collections.abc import Callable, Sequence
from operator import index

from jax_tcgemm.primitives import dot_general as primitive
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import (
    ShapeError,
    call_options,
    canonical_element_type,
    canonical_sharding,
)
from jax_tcgemm.products.epilogue import check_epilogue
from jax_tcgemm.products.packed import kind_of
from jax_tcgemm.products.quantized import as_operand, as_weight, is_any, product, with_epilogue


def dot_general(
    lhs,
    rhs,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    *,
    out_sharding=None,
    epilogue: Callable | None = None,
    epilogue_operands: Sequence = (),
    implementation: str | None = None,
    config: str | None = None,
    batch_invariant: bool | int | None = None,
):
    """Contraction over any dimensions of two arrays: a drop-in for `jax.lax.dot_general`.

        out[b..., m..., n...] = sum over k... of lhs[b..., m..., k...] * rhs[b..., k..., n...]

    The dimensions of each operand may be in any order. The kernel reads an operand through its
    strides instead of transposing it, unless strides cannot express the order.

    `dot_general` can be differentiated any number of times, batched by `jax.vmap`, and used in jit,
    scan, while, cond, remat, shard_map and `jax.export`. Every derivative consists of such
    products.

    Args:
      lhs: array of any shape and numeric dtype, or a `QuantizedArray`.
      rhs: array of any shape and numeric dtype, or a `QuantizedArray`. Different dtypes combine as
        in `lax.dot_general`.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
      precision: None (uses `jax.default_matmul_precision`), a `lax.Precision` or its name, a pair
        of these, or a `lax.DotAlgorithmPreset` or its name; see Numerics.
      preferred_element_type: dtype of the result. None selects the dtype of the operands, or of the
        scales of quantized operands.
      out_sharding: sharding of the result, for meshes with explicit axes.
      epilogue: None, or a function of the product that JAX can trace; see `matmul`.
      epilogue_operands: arrays that the epilogue receives after the product; see `matmul`.
      implementation: name of the implementation that must run the product (`jax_tcgemm.info()`
        lists the names); the call fails if the implementation cannot. None selects an
        implementation, which `jax_tcgemm.explain` reports. Derivatives inherit the implementation.
      config: name of a config of that implementation. None selects a config. Derivatives do not
        inherit the config.
      batch_invariant: True makes the bits of a row of the result depend on that row of lhs and on
        rhs alone; see `matmul`. Derivatives inherit the setting.

    Returns:
      The result. Its dimensions are the batch dimensions in the given order, the remaining
      dimensions of lhs, and the remaining dimensions of rhs. With an epilogue, the results of the
      epilogue.

    Raises:
      TypeError: if operands are not numeric arrays, dtypes do not combine, or the epilogue is not a
        function or returns something other than arrays.
      ValueError: if dimension numbers or shapes do not match (the exception is a TypeError, too, as
        in `lax.dot_general`), a dimension exceeds `2**31 - 1`, an implementation or config is
        unknown, or an epilogue is combined with preferred_element_type. Also, at lowering, if the
        named implementation cannot run the product; the message says which rule was violated.

    Numerics:
      Accumulators, rounding and quantized operands follow `matmul`. The same program gives the same
      bits on the same device.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> q, k = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 20, 4, 8))
      >>> scores = jax_tcgemm.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2))))
      >>> scores.shape
      (2, 4, 16, 20)
    """
    op = "dot_general"
    lhs, rhs = as_operand(op, "lhs", lhs), as_weight(op, "rhs", rhs)
    kind = kind_of(rhs)
    options = call_options(op, implementation, config, batch_invariant, kind)
    dimension_numbers = canonical_dimension_numbers(op, dimension_numbers, lhs, rhs)
    check_epilogue(op, epilogue, epilogue_operands, preferred_element_type=preferred_element_type)
    if epilogue is not None:
        return with_epilogue(
            options,
            lhs,
            rhs,
            epilogue,
            epilogue_operands,
            dimension_numbers=dimension_numbers,
            precision=precision,
            out_sharding=out_sharding,
        )
    preferred_element_type = canonical_element_type(op, preferred_element_type)
    if is_any(lhs, rhs):
        return product(
            options,
            lhs,
            rhs,
            dimension_numbers=dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
    ndim = primitive.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers)
    return primitive.dot_general(
        lhs,
        rhs,
        options=options,
        dimension_numbers=dimension_numbers,
        precision=canonical_precision(op, precision),
        preferred_element_type=preferred_element_type,
        out_sharding=canonical_sharding(op, out_sharding, ndim),
    )


def canonical_dimension_numbers(op: str, dimension_numbers, lhs, rhs):
    """Return dimension numbers as tuples; raise TypeError or ValueError where they do not match."""
    try:
        if not isinstance(dimension_numbers, list | tuple):
            raise TypeError
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        canonical = (
            (tuple(map(index, lhs_contract)), tuple(map(index, rhs_contract))),
            (tuple(map(index, lhs_batch)), tuple(map(index, rhs_batch))),
        )
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, "
            f"rhs_batch)), got {dimension_numbers=}; see jax.lax.dot_general"
        ) from None
    for kind, lhs_axes, rhs_axes in (("contracting", *canonical[0]), ("batch", *canonical[1])):
        if len(lhs_axes) != len(rhs_axes):
            raise ShapeError(
                f"{op}: {kind} dimensions must come in pairs, got {lhs_axes} of lhs and "
                f"{rhs_axes} of rhs; name as many of each"
            )
        for lhs_axis, rhs_axis in zip(lhs_axes, rhs_axes, strict=True):
            for name, x, axis in (("lhs", lhs, lhs_axis), ("rhs", rhs, rhs_axis)):
                if not 0 <= axis < x.ndim:
                    raise ShapeError(
                        f"{op}: {kind} dimensions of {name} must be in [0, {x.ndim}), got {axis} "
                        f"for {name}.shape={x.shape}; count from the front"
                    )
            if lhs.shape[lhs_axis] != rhs.shape[rhs_axis]:
                raise ShapeError(
                    f"{op}: {kind} dimensions must have equal sizes, got lhs.shape[{lhs_axis}]="
                    f"{lhs.shape[lhs_axis]} and rhs.shape[{rhs_axis}]={rhs.shape[rhs_axis]}; "
                    f"the shapes are {lhs.shape} and {rhs.shape}"
                )
    for name, axes in (
        ("lhs", canonical[0][0] + canonical[1][0]),
        ("rhs", canonical[0][1] + canonical[1][1]),
    ):
        if len(set(axes)) != len(axes):
            raise ShapeError(
                f"{op}: contracting and batch dimensions of {name} must be distinct, got {axes}; "
                "name each at most once"
            )
    return canonical
