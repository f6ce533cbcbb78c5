"""The public `matmul`."""

from collections.abc import Callable, Sequence

from jax_tcgemm.products.arguments import (
    ShapeError,
    call_options,
    canonical_element_type,
    promoted_type,
    weakened,
)
from jax_tcgemm.products.epilogue import check_alone
from jax_tcgemm.products.linear import product
from jax_tcgemm.products.packed import is_packed, kind_of
from jax_tcgemm.products.quantized import as_operand, as_weight, is_any, squeezed, with_epilogue


def matmul(
    a,
    b,
    *,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    bias=None,
    activation=None,
    residual=None,
    alpha: float = 1.0,
    donate_residual: bool = False,
    epilogue: Callable | None = None,
    epilogue_operands: Sequence = (),
    implementation: str | None = None,
    config: str | None = None,
    batch_invariant: bool | int | None = None,
):
    """A drop-in for `jax.numpy.matmul`: the product of matrices, vectors and batches of them.

        out[..., m, n] = sum over k of a[..., m, k] * b[..., k, n]

    With more arguments than `jax.numpy.matmul` has, what follows the product is done by the same
    call: f(alpha * a b + bias) + residual, as by `linear`, or any function of the product that JAX
    can trace::

        out = epilogue(acc, *epilogue_operands)

    where acc is the product of the shape above before it is rounded. Where a kernel can compute the
    function, and that should take less time, it does so before it writes; elsewhere XLA does, and
    `jax_tcgemm.explain` says why.

    A 1-D `a` is a row and a 1-D `b` a column, whose dimension the result lacks. Batch dimensions
    broadcast, and a broadcast operand is read in place, never repeated in memory, unless three or
    more batch dimensions alternate between the operands; then the result is transposed once.
    It can be differentiated any number of times, batched by `jax.vmap`, and used in jit, scan,
    while, cond, remat, shard_map and `jax.export`.

    Args:
      a: array of shape (k,) or (..., m, k), of any numeric dtype, or a `QuantizedArray`.
      b: array of shape (k,) or (..., k, n), of any numeric dtype, a `QuantizedArray`, or a
        `PackedWeight` of shape (k, n).
      precision: None (which takes `jax.default_matmul_precision`), a `lax.Precision` or its name, a
        pair of them, or a `lax.DotAlgorithmPreset` or its name; see Numerics.
      preferred_element_type: dtype of the result; None takes what the dtypes of `a` and `b`
        promote to, of quantised ones those of their scales.
      out_sharding: sharding of the result, for meshes with explicit axes; as for `linear`.
      bias: None, or an array that broadcasts to the result.
      activation: None, or as for `linear`.
      residual: None, or an array that broadcasts to the result.
      alpha: a number.
      donate_residual: as for `linear`.
      epilogue: None, or a function of acc and of the operands, which takes the place of bias,
        activation, residual and alpha. acc has the dtype that the product accumulates in, float32
        for narrower floats and int32 for 8-bit integers; of quantised operands it is multiplied by
        their scales already, in float32. It returns an array or a pytree of arrays,
        each of the shape of acc and any dtype, or a sum, maximum or minimum of such an array over
        some dimensions. Arrays that it closes over are operands, too, but an eager call then traces
        and compiles it each time.
      epilogue_operands: arrays that broadcast to the shape of acc, of any dtypes, or random keys;
        the function gets them as they are.
      implementation: name of an implementation (`jax_tcgemm.info()` lists them), which then runs
        the product or the call fails; None selects one, and `jax_tcgemm.explain` says which.
        Derivatives inherit it.
      config: a config of that implementation; None selects one. Derivatives do not inherit it.
      batch_invariant: True has the bits of a row depend on nothing but that row and b; or
        for how many rows the config that gives them is chosen, True being 4096. None takes
        `jax_tcgemm.batch_invariant`. Derivatives inherit it.

    Returns:
      The product, with the shape, dtype and weak type that `jax.numpy.matmul` gives; with an
      epilogue, what that returns.

    Raises:
      TypeError: for operands that are not numeric arrays or dtypes that do not go together, for
        an activation of a result that is not real floating point, and for an epilogue that is no
        function or returns something else than arrays.
      ValueError: for 0-D operands, contracted sizes that differ, batch dimensions that do not
        broadcast, a dimension over 2**31 - 1, an unknown implementation or config, an epilogue
        together with what it takes the place of, with effects, or with operands or results of other
        shapes, or, when the program is lowered, an implementation that was asked for by name and
        cannot run the product, with the rule that stops it.

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
      dot, and `explain` says so.
      Quantised operands are multiplied as they are where their scales are the same along what is
      contracted, and beside wider ones in the dtype of those; the sums are multiplied by the scales
      in float32, and rounded once. Scales of blocks of it are those of `scaled_matmul`. What has a
      zero point, or dtypes of which neither is true, is dequantised first.
      By a `PackedWeight` float16 and bfloat16 are multiplied as `docs/packed-weights.md` says, and
      the result has the dtype of `a` unless another one is asked for.
      An epilogue's operations round to their own dtypes, as JAX means them. Its derivatives keep
      acc, in its own dtype, or what follows it in fewer bytes, if they depend on it. The cotangent
      of acc is rounded to the dtype of the operands before it is multiplied by them; in forward
      mode the tangent of acc is.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> a, b = jnp.ones((8, 3, 5), jnp.bfloat16), jnp.ones((5, 4), jnp.bfloat16)
      >>> jax.jit(jax_tcgemm.matmul)(a, b).shape
      (8, 3, 4)
      >>> def cap(acc, slope):
      ...     return (30 * jnp.tanh(slope * acc / 30)).astype(jnp.bfloat16), acc.max(-1)
      >>> capped, largest = jax_tcgemm.matmul(a, b, epilogue=cap, epilogue_operands=(jnp.ones(4),))
      >>> capped.dtype, capped.shape, largest.shape
      (dtype(bfloat16), (8, 3, 4), (8, 3))
    """
    op = "matmul"
    a, b = as_operand(op, "a", a), as_weight(op, "b", b)
    kind = kind_of(b)
    options = call_options(op, implementation, config, batch_invariant, kind)
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            raise ValueError(
                f"{op}: {name} must have at least one dimension, got {name}.shape=(); "
                "multiply scalars with *"
            )
    replaced = {
        **{"bias": bias, "activation": activation, "residual": residual, "alpha": alpha},
        "donate_residual": donate_residual,
        "preferred_element_type": preferred_element_type,
    }
    check_alone(op, epilogue, epilogue_operands, **replaced)
    result_type, is_weak = canonical_element_type(op, preferred_element_type), False
    if result_type is None and not is_any(a, b):
        result_type, is_weak = promoted_type(op, a, b)

    (a, b), dimension_numbers, permutation = _as_dot_general(op, a, b)
    if epilogue is not None:
        return with_epilogue(
            options,
            a,
            b,
            epilogue,
            epilogue_operands,
            dimension_numbers=dimension_numbers,
            permutation=permutation,
            precision=precision,
            out_sharding=out_sharding,
        )
    out = product(
        options,
        a,
        b,
        dimension_numbers=dimension_numbers,
        permutation=permutation,
        bias=bias,
        activation=activation,
        residual=residual,
        alpha=alpha,
        donate_residual=donate_residual,
        precision=precision,
        preferred_element_type=result_type,
        out_sharding=out_sharding,
    )
    return weakened(out) if is_weak and bias is None and residual is None else out


def _as_dot_general(op: str, a, b):
    """The operands of a dot_general, its dimension numbers, and how its result is permuted.

    A batch dimension of size 1 that broadcasts is dropped, so that the primitive sees a free
    dimension of the other operand.
    """
    if is_packed(b) and b.ndim > 2:
        raise ValueError(
            f"{op}: b must be a matrix where it is a packed weight, got b.shape={b.shape}; use "
            "linear"
        )
    contract = a.ndim - 1, max(b.ndim - 2, 0)
    if a.shape[contract[0]] != b.shape[contract[1]]:
        which = "last but one" if b.ndim > 1 else "only"
        raise ShapeError(
            f"{op}: the last dimension of a must equal the {which} one of b, got a.shape={a.shape} "
            f"and b.shape={b.shape}; transpose or reshape one"
        )
    sources = _sources(op, a, b)
    batch = [source for source in sources if None not in source]
    sources += [(a.ndim - 2, None)] if a.ndim > 1 else []
    sources += [(None, b.ndim - 1)] if b.ndim > 1 else []
    kept, free = [], []
    for x, contracted, side in ((a, contract[0], 0), (b, contract[1], 1)):
        axes = {source[side] for source in sources} | {contracted}
        kept.append([axis for axis in range(x.ndim) if axis in axes])
        batched = {source[side] for source in batch} | {contracted}
        free.append([axis for axis in kept[side] if axis not in batched])
    natural = [*batch, *((axis, None) for axis in free[0]), *((None, axis) for axis in free[1])]
    numbers = (
        tuple((own.index(axis),) for own, axis in zip(kept, contract, strict=True)),
        tuple(tuple(own.index(pair[i]) for pair in batch) for i, own in enumerate(kept)),
    )
    operands = [
        squeezed(x, [axis for axis in range(x.ndim) if axis not in own])
        for x, own in zip((a, b), kept, strict=True)
    ]
    return operands, numbers, [natural.index(source) for source in sources]


def _sources(op: str, a, b) -> list[tuple[int | None, int | None]]:
    """For each batch dimension of the result, the axes of a and b that it comes from."""
    num_batch = max(a.ndim, b.ndim, 2) - 2
    sources = []
    for a_axis, b_axis in zip(
        _aligned_axes(a, num_batch), _aligned_axes(b, num_batch), strict=True
    ):
        if a_axis is not None and b_axis is not None and a.shape[a_axis] != b.shape[b_axis]:
            if a.shape[a_axis] == 1:
                a_axis = None
            elif b.shape[b_axis] == 1:
                b_axis = None
            else:
                raise ShapeError(
                    f"{op}: batch dimensions must broadcast, got a.shape={a.shape} and "
                    f"b.shape={b.shape}; sizes must be equal or 1"
                )
        sources.append((a_axis, b_axis))
    return sources


def _aligned_axes(x, num_batch: int) -> list[int | None]:
    """For each batch dimension of the result, the axis of `x` that it comes from, or None."""
    own = max(x.ndim - 2, 0)
    return [None] * (num_batch - own) + list(range(own))
