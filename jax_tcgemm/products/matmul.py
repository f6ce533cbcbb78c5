"""Public `matmul`."""

from collections.abc import Callable, Sequence

from jax_tcgemm.products.arguments import (
    ShapeError,
    call_options,
    canonical_element_type,
    promoted_type,
    weakened,
)
from jax_tcgemm.products.epilogue import check_epilogue
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
    """Matrix product of arrays: a drop-in for `jax.numpy.matmul`.

        out[..., m, n] = sum over k of a[..., m, k] * b[..., k, n]

    One call can also compute an epilogue. Either bias, activation, residual and alpha give f(alpha
    * a b + bias) + residual, as in `linear`, or `epilogue` is any function that JAX can trace::

        out = epilogue(acc, *epilogue_operands)

    Here, acc is the accumulator of the product, before rounding. The kernel computes the epilogue
    if the epilogue can be compiled into a kernel and the fused kernel has the shorter estimated
    time. Otherwise, XLA computes the epilogue, and `jax_tcgemm.explain` reports the reason.

    A 1-D `a` is a row and a 1-D `b` is a column; the result lacks that dimension. Batch dimensions
    broadcast. A broadcast operand is read in place and never repeated in memory. If three or more
    batch dimensions alternate between the operands, the result is transposed once.

    `matmul` can be differentiated any number of times, batched by `jax.vmap`, and used in jit,
    scan, while, cond, remat, shard_map and `jax.export`.

    Args:
      a: array of shape (k,) or (..., m, k), of any numeric dtype, or a `QuantizedArray`.
      b: array of shape (k,) or (..., k, n), of any numeric dtype, a `QuantizedArray`, or a
        `PackedWeight` of shape (k, n).
      precision: None (uses `jax.default_matmul_precision`), a `lax.Precision` or its name, a pair
        of these, or a `lax.DotAlgorithmPreset` or its name; see Numerics.
      preferred_element_type: dtype of the result. None selects the dtype that `a` and `b` promote
        to. For quantized operands, the dtypes of the scales count.
      out_sharding: sharding of the result, for meshes with explicit axes; see `linear`.
      bias: None, or an array that broadcasts to the result.
      activation: None, or an activation; see `linear`.
      residual: None, or an array that broadcasts to the result.
      alpha: a number.
      donate_residual: whether the result may reuse the residual's memory; see `linear`.
      epilogue: None, or a function of acc and the epilogue operands, in place of bias, activation,
        residual and alpha. acc has the dtype of the accumulator: float32 for narrower floats, int32
        for 8-bit integers. For quantized operands, acc is float32 and already multiplied by the
        scales. The function returns an array or a pytree of arrays. Each array has the shape of acc
        and any dtype, or is a sum, maximum or minimum of such an array over some dimensions. Arrays
        that the function closes over are operands, too, but an eager call then traces and compiles
        the function each time.
      epilogue_operands: arrays that broadcast to the shape of acc, of any dtypes, or random keys.
        The function receives the operands without broadcasting.
      implementation: name of the implementation that must run the product (`jax_tcgemm.info()`
        lists the names); the call fails if the implementation cannot. None selects an
        implementation, which `jax_tcgemm.explain` reports. Derivatives inherit the implementation.
      config: name of a config of that implementation. None selects a config. Derivatives do not
        inherit the config.
      batch_invariant: True makes the bits of a row of the result depend on that row of a and on b
        alone. A number does the same with the config that is selected for that number of rows; True
        means 4096. None uses the setting of `jax_tcgemm.batch_invariant`. Derivatives inherit the
        setting.

    Returns:
      The product, with the shape, dtype and weak type of `jax.numpy.matmul`. With an epilogue, the
      results of the epilogue.

    Raises:
      TypeError: if operands are not numeric arrays, dtypes do not promote, an activation is given
        for a result that is not real floating point, or the epilogue is not a function or returns
        something other than arrays.
      ValueError: if an operand is 0-D, contracted sizes differ, batch dimensions do not broadcast,
        a dimension exceeds `2**31 - 1`, or an implementation or config is unknown. Also if an
        epilogue is combined with an argument that it replaces, has effects, or has operands or
        results of other shapes. Also, at lowering, if the named implementation cannot run the
        product; the message says which rule was violated.

    Numerics:
      - float16 and bfloat16 are multiplied exactly, accumulated in float32 (in float16 under the
        preset F16_F16_F16), and rounded once.
      - float32 and complex64 use TF32 on CUDA, like XLA, unless the precision is HIGHEST or a
        preset of split-precision emulation: BF16_BF16_F32_X3, _X6, _X9 or TF32_TF32_F32_X3. Under
        such a preset, each number is split into BF16 or TF32 terms, and the products of terms are
        added in float32. The omitted products are at most `2**-15`, `2**-24`, 0 or `2**-21` of
        |A| |B|. On a CPU, float32 is multiplied in float32, except that a named implementation uses
        the preset.
      - float64 and complex128 accumulate in float64.
      - int8 and uint8 accumulate in int32. A narrower integer result is the accumulator modulo
        `2**bits`.
      - float8_e4m3fn and float8_e5m2, also mixed, are multiplied exactly and accumulated in
        float32. Hopper's tensor core keeps 14 bits of mantissa in the accumulator; the accumulator
        is therefore promoted to float32 registers every 128 elements of k, unless the precision is
        `lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM`.
      - Dtypes that no implementation supports, such as int32, fall back to XLA, and `explain`
        reports the reason.
      - Quantized operands whose scales are constant along the contracted dimensions are multiplied
        without dequantization. Beside a wider operand, the quantized values are converted to the
        wider dtype. The accumulator is multiplied by the scales in float32 and rounded once. Block
        scales along k follow `scaled_matmul`. Operands with zero points, and combinations of dtypes
        not listed here, are dequantized first.
      - With a `PackedWeight`, float16 and bfloat16 are multiplied as `docs/packed-weights.md`
        describes. The result has the dtype of `a` unless preferred_element_type is given.
      - The epilogue's operations round to their own dtypes, as in JAX. If derivatives of the
        epilogue depend on acc, acc is stored in its own dtype, or values computed from acc are
        stored if these take fewer bytes. The cotangent of acc is rounded to the dtype of the
        operands before the products with the operands; in forward mode, the tangent of acc is
        rounded to that dtype.
      - The same program gives the same bits on the same device.

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
    check_epilogue(op, epilogue, epilogue_operands, **replaced)
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
