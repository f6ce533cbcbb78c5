"""The public `dot_general`."""

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
from jax_tcgemm.products.epilogue import check_alone
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
    """A drop-in for `jax.lax.dot_general`: contracts and batches any dimensions of two arrays.

        out[b..., m..., n...] = sum over k... of lhs[b..., m..., k...] * rhs[b..., k..., n...]

    for any order of each operand's dimensions. No operand is copied to be transposed: the order of
    its dimensions becomes strides, wherever they can say it. It can be differentiated any number of
    times, batched by `jax.vmap`, and used in jit, scan, while, cond, remat, shard_map and
    `jax.export`; every derivative is made of the same products.

    Args:
      lhs: array of any shape and numeric dtype, or a `QuantizedArray`.
      rhs: array of any shape and numeric dtype; unlike dtypes go together as in `lax.dot_general`.
        Or a `QuantizedArray`.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
      precision: None (which takes `jax.default_matmul_precision`), a `lax.Precision` or its name, a
        pair of them, or a `lax.DotAlgorithmPreset` or its name. See Numerics.
      preferred_element_type: dtype of the result; None takes the operands', or of quantised ones
        that of their scales.
      out_sharding: sharding of the result, for meshes with explicit axes.
      epilogue: None, or a function of the product, any that JAX can trace; as for `matmul`.
      epilogue_operands: arrays that it takes after the product; as for `matmul`.
      implementation: name of an implementation (`jax_tcgemm.info()` lists them), which then runs
        the product or the call fails; None selects one, and `jax_tcgemm.explain` says which.
        Derivatives inherit it.
      config: a config of that implementation; None selects one. Derivatives do not inherit it.
      batch_invariant: True has the bits of a row depend on nothing but that row and rhs;
        as for `matmul`. Derivatives inherit it.

    Returns:
      The result: batch dimensions in the order given, then the other dimensions of lhs, then those
      of rhs. With an epilogue, what that returns.

    Raises:
      TypeError: for operands that are not numeric arrays or dtypes that do not go together, and for
        an epilogue that is no function or returns something else than arrays.
      ValueError: for dimension numbers or shapes that do not fit (a TypeError, too, as of
        `lax.dot_general`), a dimension over 2**31 - 1, an unknown implementation or config, an
        epilogue together with a preferred_element_type, or, when the program is lowered, an
        implementation that was asked for by name and cannot run the product, with the rule that
        stops it.

    Numerics:
      float16 and bfloat16 are multiplied exactly and accumulated in float32 (in float16 under the
      preset F16_F16_F16), and rounded once. float32 and complex64 use TF32 on CUDA, as XLA does,
      unless the precision is HIGHEST, or BF16_BF16_F32_X3, _X6, _X9 or TF32_TF32_F32_X3: then each
      number is a sum of parts of bfloat16 or TF32, whose products are added in float32, all but
      some that are at most 2**-15, 2**-24, 0 or 2**-21 of |A| |B|. On CPU they are always float32,
      or such sums where an implementation was asked for by name. float64 and complex128
      accumulate in float64. int8 and uint8 accumulate in int32; a narrower integer result is that
      sum modulo its width. float8_e4m3fn and float8_e5m2, also one by the other, are multiplied
      exactly and accumulated in float32: on Hopper, whose tensor core keeps 14 bits of mantissa of
      their sums, these leave it every 128 of K, unless the precision is
      `lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM`. The same program on the same device
      gives the same bits each time. What no implementation covers, such as int32, goes to XLA's own
      dot, and `explain` says so. Quantised operands are multiplied as by `matmul`.

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
    check_alone(op, epilogue, epilogue_operands, preferred_element_type=preferred_element_type)
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
    """Dimension numbers as tuples; raises TypeError or ValueError where they do not fit."""
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
