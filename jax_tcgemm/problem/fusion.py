"""What a fused product does besides multiplying, in terms of its result's dimensions.

`Fusion` says it for a primitive of any rank, `epilogue.Epilogue` for the folded problem. The
arithmetic here is the unfused one: what every fused kernel is held to.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.problem.activations import ACTIVATIONS
from jax_tcgemm.problem.dtypes import wide_dtype

# The operands after lhs and rhs, in this order, of which a call has any.
OPTIONAL_OPERANDS = ("rhs_up", "residual", "bias", "aux_in")


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What happens to a product.

    With P the product in the order of its result, f the activation and Z = alpha * P + bias:

        forward            D = f(Z) + residual                        aux_out = Z
        derivative         D = f'(aux_in) * Z + residual
        gated              D = f(Z_gate) * Z_up + residual            aux_out = Z
        gated, derivative  D = [f'(gate) * up * Z | f(gate) * Z] + residual, [gate | up] = aux_in

    A gated forward Z has a dimension of extent 2, `pair`, which D lacks: that of rhs or, with the
    operand rhs_up, a new one for the two products. In a gated derivative D and aux_in have it.

    Attributes:
      activation: a name in `activations.ACTIVATIONS`.
      derivative: multiply by the derivative, at the operand aux_in.
      pair: the dimension of Z, or of aux_in, that tells gate and up apart; None when not gated.
      alpha: factor of the product.
      is_alpha_negative: its sign, also where it is zero.
      operands: which of OPTIONAL_OPERANDS the call has.
      bias_axes: for each dimension of the operand bias the dimension of Z, in ascending order.
      aux_out: whether Z is a result too.
      sum_axes: the dimensions of D over which another result sums it; None for no such result.
      in_place: whether D takes the place in memory of residual, or without one of aux_in. XLA
        copies that first where it is needed afterwards, or belongs to a caller who does not donate
        it.
    """

    activation: str = "none"
    derivative: bool = False
    pair: int | None = None
    alpha: float = 1.0
    is_alpha_negative: bool = dataclasses.field(init=False, repr=False)
    operands: tuple[str, ...] = ()
    bias_axes: tuple[int, ...] = ()
    aux_out: bool = False
    sum_axes: tuple[int, ...] | None = None
    in_place: bool = False

    def __post_init__(self):
        # Equal ones are one program, which 0.0 and -0.0 are not.
        object.__setattr__(self, "is_alpha_negative", math.copysign(1.0, self.alpha) < 0)

    @property
    def is_linear(self) -> bool:
        """Whether D is linear in Z."""
        return self.derivative or (self.activation == "none" and self.pair is None)

    @property
    def num_results(self) -> int:
        """D and what else is asked for."""
        return 1 + self.aux_out + (self.sum_axes is not None)


def broadcast_to(x: jax.Array, like: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """`x`, whose dimensions are `axes` of `like`, in its shape and divided over devices like it."""
    sharding = jax.typeof(like).sharding
    is_divided = any(axis is not None for axis in sharding.spec.partitions)
    out_sharding = sharding if is_divided else None
    return lax.broadcast_in_dim(x, like.shape, axes, out_sharding=out_sharding)


def activated(activation: str, zs: Sequence[jax.Array]) -> jax.Array:
    """f(Z), or, of both halves of a pair, f(Z_gate) * Z_up."""
    gate, *up = zs
    value = ACTIVATIONS[activation](gate)
    return value * up[0] if up else value


def push_forward(activation: str, z: jax.Array, dz: jax.Array, pair: int | None) -> jax.Array:
    """The tangent of f(Z), or f(Z_gate) * Z_up, for the tangent dz of Z."""
    if pair is None:
        return _value_and_slope(activation, z)[1] * dz
    (gate, up), (dgate, dup) = halves(z, pair), halves(dz, pair)
    value, slope = _value_and_slope(activation, gate)
    return slope * up * dgate + value * dup


def halves(z: jax.Array, pair: int) -> list[jax.Array]:
    """Gate and up, which a dimension tells apart."""
    return [lax.squeeze(half, (pair,)) for half in lax.split(z, (1, 1), pair)]


def _value_and_slope(activation, x):
    return jax.jvp(ACTIVATIONS[activation], (x,), (jnp.ones_like(x),))


def finish(fusion: Fusion, z: jax.Array, given: dict[str, jax.Array], dtype) -> list[jax.Array]:
    """All results from alpha * P, in its dtype: what happens after the product.

    Args:
      fusion: what to do.
      z: alpha * P, with its dimension `pair`.
      given: the optional operands by name.
      dtype: dtype of D and aux_out.
    """
    has_two = fusion.pair is not None and not fusion.derivative
    zs = halves(z, fusion.pair) if has_two else [z]
    ds, kept, sums = finish_parts(fusion, zs, given, dtype)
    if has_two and kept:  # Not cut apart to be put together again.
        if "bias" in given:
            z = z + broadcast_to(given["bias"].astype(z.dtype), z, fusion.bias_axes)
        kept = [z.astype(dtype)]
    return join_parts(fusion, ds, kept, sums)


def finish_parts(
    fusion: Fusion, zs: Sequence[jax.Array], given: dict[str, jax.Array], dtype
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """The same of what the dimension `pair` tells apart: D, Z and the sums, or none, in halves.

    `zs`: alpha * P, or both halves of it.
    """
    z_dtype, pair = zs[0].dtype, fusion.pair
    if "bias" in given:
        bias = given["bias"].astype(z_dtype)
        zs = [z + _bias_of(fusion, bias, z, half, len(zs)) for half, z in enumerate(zs)]
    if fusion.derivative:
        saved = given["aux_in"].astype(z_dtype)
        ds = pull_back(fusion.activation, [saved] if pair is None else halves(saved, pair), *zs)
    else:
        ds = [activated(fusion.activation, zs)]
    if "residual" in given:
        residual = given["residual"].astype(z_dtype)
        added = [residual] if len(ds) == 1 else halves(residual, pair)
        ds = [d + x for d, x in zip(ds, added, strict=True)]
    ds = [d.astype(dtype) for d in ds]
    sums = []
    if fusion.sum_axes is not None:
        axes, wide = fusion.sum_axes, wide_dtype(dtype)
        if len(ds) == 2:
            axes = tuple(axis - (axis > pair) for axis in axes if axis != pair)
        sums = [jnp.sum(d.astype(wide), axes) for d in ds]
    return ds, [z.astype(dtype) for z in zs] if fusion.aux_out else [], sums


def join_parts(fusion: Fusion, ds, zs, sums) -> list[jax.Array]:
    """The results from halves of them, of which those that are arrays already are one each."""
    pair = fusion.pair
    results = [x[0] if len(x) == 1 else jnp.stack(x, pair) for x in (ds, zs) if x]
    if len(sums) == 2 and pair in fusion.sum_axes:
        return [*results, sums[0] + sums[1]]
    if len(sums) == 2:
        return [*results, jnp.stack(sums, pair - sum(axis < pair for axis in fusion.sum_axes))]
    return [*results, *sums]


def _bias_of(fusion: Fusion, bias: jax.Array, z: jax.Array, half: int, num_halves: int):
    """That of Z, or of a half of it, in its shape."""
    axes, pair = fusion.bias_axes, fusion.pair
    if num_halves == 2:
        if pair in axes:
            bias = lax.index_in_dim(bias, half, axes.index(pair), keepdims=False)
        axes = tuple(axis - (axis > pair) for axis in axes if axis != pair)
    return broadcast_to(bias, z, axes)


def pull_back(activation: str, saved: Sequence[jax.Array], g: jax.Array) -> list[jax.Array]:
    """The cotangent of Z, or of both halves of it, for the cotangent g of f(Z) or f(gate) * up."""
    gate, *up = saved
    value, slope = _value_and_slope(activation, gate)
    return [slope * up[0] * g, value * g] if up else [slope * g]
