"""Epilogues of layers, as functions of the accumulators, and the libraries' epilogues among them.

With P the product, f the activation and Z = alpha * P + bias:

    Layer              D = f(Z) + residual
    gated Layer        D = f(Z_gate) * Z_up + residual
    PullBack           dZ = f'(Z) * P                               for a saved Z
    gated PullBack     dZ = [f'(gate) * up * P | f(gate) * P]       for saved [gate | up]

Instances are hashable: calls with equal epilogues share one trace.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from jax_tcgemm.epilogues import EpilogueSource, emit
from jax_tcgemm.epilogues.code.source import Read
from jax_tcgemm.problem.activations import ACTIVATIONS
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.system.jax_internals import as_jaxpr


@dataclasses.dataclass(frozen=True)
class Layer:
    """Epilogue of a layer: D = f(Z) + residual, computed in `wide_dtype` and rounded once.

    Its arguments are the accumulator, or two of them, gate first; the biases; the residual.

    The derivative with respect to Z is taken at Z as rounded to `dtype`.

    Attributes:
      dtype: of the results.
      activation: a name in `activations.ACTIVATIONS`.
      alpha: factor of the product.
      gated: whether there are two accumulators.
      num_biases: 0; 1, which broadcasts to the accumulator, or of a gated layer has shape (2, n);
        or 2 that broadcast to the accumulators.
      has_residual: whether there is a residual.
      keeps_z: whether Z is a second result, in which gate and up are stacked before the columns.
    """

    dtype: np.dtype
    activation: str = "none"
    alpha: float = 1.0
    gated: bool = False
    num_biases: int = 0
    has_residual: bool = False
    keeps_z: bool = False

    # Operands need no more checks than those of the function that made them operands.
    is_checked = True

    def xla_dtype(self, *operands) -> np.dtype | None:
        """Return the dtype of an unfused layer's values between XLA's product and its result.

        That of the result: then XLA may add a bias and apply relu or gelu inside cuBLASLt's kernel.
        None, for `wide_dtype`, where an operand is wider, or where a product of float16 could
        overflow before alpha.
        """
        may_overflow = self.alpha != 1.0 and self.dtype == np.float16
        has_others = any(x.dtype != self.dtype for x in operands)
        return None if may_overflow or has_others else self.dtype

    def __call__(self, *arguments):
        """Return D and, with `keeps_z`, Z."""
        accs, rest = arguments[: 1 + self.gated], list(arguments[1 + self.gated :])
        wide = wide_dtype(self.dtype)
        zs = [acc.astype(wide) for acc in accs]
        if self.alpha != 1.0:
            zs = [self.alpha * z for z in zs]
        if self.num_biases:
            biases, rest = rest[: self.num_biases], rest[self.num_biases :]
            biases = gate_and_up(biases[0], 0) if len(biases) < len(zs) else biases
            zs = [z + broadcast_to(b.astype(z.dtype), z) for z, b in zip(zs, biases, strict=True)]
        d = _activated(self.activation, self.dtype, zs)
        if self.has_residual:
            d = d + broadcast_to(rest.pop(0).astype(d.dtype), d)
        d = d.astype(self.dtype)
        if not self.keeps_z:
            return d
        zs = [z.astype(self.dtype) for z in zs]
        return d, (jnp.stack(zs, zs[0].ndim - 1) if self.gated else zs[0])


def rounded_dtype(epilogue: Callable) -> np.dtype | None:
    """Return the dtype that an epilogue rounds the product to, if that is all that it does."""
    is_rounding = isinstance(epilogue, Layer) and epilogue == Layer(epilogue.dtype)
    return epilogue.dtype if is_rounding else None


@dataclasses.dataclass(frozen=True)
class PullBack:
    """Epilogue of the product whose value is the cotangent of f(Z): the cotangent of Z.

    Its arguments are the accumulator and the saved Z.

    Attributes:
      dtype: of dZ.
      activation: f.
      pair: None, or the dimension of Z and dZ that tells gate and up apart.
      sum_axes: None, or the dimensions of the accumulator over which dZ is summed for the gradient
        of the bias: one more result in `wide_dtype`, or two of a gated layer.
    """

    dtype: np.dtype
    activation: str
    pair: int | None = None
    sum_axes: tuple[int, ...] | None = None

    def xla_dtype(self, saved) -> np.dtype | None:
        """Return the dtype in which XLA computes the unfused epilogue; None for `wide_dtype`."""
        return self.dtype if saved.dtype == self.dtype else None

    def __call__(self, acc, saved):
        """Return dZ, followed by its sums if `sum_axes` is not None."""
        saved = saved.astype(acc.dtype)
        zs = [saved] if self.pair is None else gate_and_up(saved, self.pair)
        dzs = [dz.astype(self.dtype) for dz in pull_back(self.activation, zs, acc)]
        dz = dzs[0] if self.pair is None else jnp.stack(dzs, self.pair)
        if self.sum_axes is None:
            return [dz]
        wide = wide_dtype(self.dtype)
        return [dz, *(jnp.sum(x.astype(wide), self.sum_axes) for x in dzs)]


# --- activations and their derivatives ------------------------------------------------------------


def activated(activation: str, zs: Sequence[jax.Array]) -> jax.Array:
    """Return f(Z), or f(Z_gate) * Z_up of two."""
    gate, *up = zs
    value = ACTIVATIONS[activation](gate)
    return value * up[0] if up else value


def push_forward(activation: str, zs: Sequence[jax.Array], dzs: Sequence) -> jax.Array | None:
    """Return the tangent of `activated`; tangents that are None are zero, as is the result then."""
    value, slope = _value_and_slope(activation, zs[0])
    slopes = [slope] if len(zs) == 1 else [slope * zs[1], value]
    terms = [x * dz for x, dz in zip(slopes, dzs, strict=True) if dz is not None]
    return functools.reduce(lax.add, terms) if terms else None


def pull_back(activation: str, zs: Sequence[jax.Array], g: jax.Array) -> list[jax.Array]:
    """Return the cotangents of Z, or of gate and up, for the cotangent g of `activated`."""
    gate, *up = zs
    value, slope = _value_and_slope(activation, gate)
    return [slope * up[0] * g, value * g] if up else [slope * g]


def _value_and_slope(activation: str, x: jax.Array):
    return jax.jvp(ACTIVATIONS[activation], (x,), (jnp.ones_like(x),))


def _activated(activation: str, dtype: np.dtype, zs: Sequence[jax.Array]) -> jax.Array:
    """As `activated`, with its derivative at Z rounded to `dtype`."""
    is_linear = activation == "none" and len(zs) == 1
    return zs[0] if is_linear else _activated_at(activation, dtype, *zs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _activated_at(activation: str, dtype: np.dtype, *zs: jax.Array) -> jax.Array:
    del dtype
    return activated(activation, zs)


def _jvp(activation: str, dtype: np.dtype, primals, tangents):
    zs = [z.astype(dtype).astype(z.dtype) for z in primals]
    dzs = [None if isinstance(dz, SymbolicZero) else dz for dz in tangents]
    out = _activated_at(activation, dtype, *primals)
    tangent = push_forward(activation, zs, dzs)
    return out, jnp.zeros_like(out) if tangent is None else tangent


_activated_at.defjvp(_jvp, symbolic_zeros=True)


# --- shapes ---------------------------------------------------------------------------------------


def gate_and_up(z: jax.Array, pair: int) -> list[jax.Array]:
    """Return gate and up, which a dimension of size 2 tells apart."""
    return [lax.squeeze(half, (pair,)) for half in lax.split(z, (1, 1), pair)]


def broadcast_to(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return `x` broadcast to the shape of `like`, and sharded like it."""
    first = like.ndim - x.ndim
    kept = [axis for axis, size in enumerate(x.shape) if size == like.shape[first + axis]]
    x = lax.squeeze(x, [axis for axis in range(x.ndim) if axis not in kept])
    axes = tuple(first + axis for axis in kept)
    sharding = jax.typeof(like).sharding
    is_sharded = any(axis is not None for axis in sharding.spec.partitions)
    if x.shape == like.shape and (not is_sharded or jax.typeof(x).sharding == sharding):
        return x
    out_sharding = sharding if is_sharded else None
    return lax.broadcast_in_dim(x, like.shape, axes, out_sharding=out_sharding)


# --- what libraries compute themselves ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scaling:
    """An epilogue that is alpha and beta of a library: D = alpha * P + C, rounded.

    Attributes:
      alpha: factor of the product.
      residual: the number of the epilogue's operand that is C; None where there is none.
      dtype: of D.
    """

    alpha: float
    residual: int | None
    dtype: np.dtype


@functools.lru_cache(maxsize=1024)
def scaling_of(function: core.ClosedJaxpr, num_accumulators: int = 1) -> Scaling | None:
    """Return what alpha and beta make of an epilogue; None where it does more than that."""
    jaxpr = as_jaxpr(function)
    if num_accumulators != 1 or len(jaxpr.outvars) != 1:
        return None
    acc, *operands = jaxpr.invars
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}

    def inputs(x, *names):
        """The inputs of the equation that makes x if it is one of these primitives."""
        eqn = None if isinstance(x, core.Literal) else made_by.get(x)
        return eqn.invars if eqn is not None and eqn.primitive.name in names else None

    def converted(x):
        source = inputs(x, "convert_element_type")
        return source[0] if source else x

    (result,) = jaxpr.outvars
    if isinstance(result, core.Literal) or result.aval.shape != acc.aval.shape:
        return None
    dtype = np.dtype(result.aval.dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or wide_dtype(dtype) != acc.aval.dtype:
        return None
    terms, residual = [converted(result)], None
    if (added := inputs(terms[0], "add", "add_any")) is not None:
        terms = [x for x in added if converted(x) not in operands]
        of_operands = [converted(x) for x in added if converted(x) in operands]
        if len(terms) != 1 or of_operands[0].aval != result.aval:
            return None
        residual = operands.index(of_operands[0])
    alpha, (scaled,) = 1.0, terms
    if (factors := inputs(scaled, "mul")) is not None:
        numbers = [x for x in factors if isinstance(x, core.Literal) and np.ndim(x.val) == 0]
        if len(numbers) != 1:
            return None
        alpha = float(numbers[0].val)
        (scaled,) = (x for x in factors if x is not numbers[0])
    return Scaling(alpha, residual, dtype) if scaled is acc else None


def library_epilogue(source: EpilogueSource, shape: tuple[int, ...]) -> str:
    """Return the name in csrc/core/problem.h of the library's epilogue that computes the same.

    "none" where there is no such epilogue. `shape` is that of the accumulator.
    """
    is_known = len(source.accumulators) == 1 and len(source.reads) <= 1
    is_known &= len({x.dtype for x in source.results}) == 1
    is_known &= all(jnp.issubdtype(dtype, jnp.floating) for dtype in source.accumulators)
    if not is_known or source.results[0].dtype not in _LIBRARY_DTYPES:
        return "none"
    known = _library_epilogues(len(shape), source.accumulators[0], source.results[0].dtype)
    name, reads = known.get(dataclasses.replace(source, reads=()), ("none", ()))
    lie_alike = _placed(source.reads, shape) == _placed(reads, shape)
    return name if lie_alike else "none"


def _placed(reads: Sequence[Read], shape: tuple[int, ...]):
    """Where elements are read, without dimensions of size 1, in which it makes no difference."""
    found = []
    for read in reads:
        places = [
            (place.offset, tuple(f * (n > 1) for f, n in zip(place.factors, shape, strict=True)))
            for place in read.places
        ]
        found.append((read.dtype, [x for x in places if x[0] or any(x[1])]))
    return found


_LIBRARY_DTYPES = frozenset(map(np.dtype, (jnp.bfloat16, np.float16, np.float32)))


@functools.lru_cache(maxsize=64)
def _library_epilogues(rank: int, accumulator: np.dtype, dtype: np.dtype):
    """Return the names of libraries' epilogues by their code, for accumulators of this rank."""
    acc = jax.ShapeDtypeStruct((2,) * rank, accumulator)
    bias, like_acc = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2,), acc.shape))
    found = {}

    def add(name, epilogue, *operands):
        source, _ = emit(jax.make_jaxpr(epilogue)(acc, *operands))
        found[dataclasses.replace(source, reads=())] = name, source.reads

    for operands, end in (((), ""), ((bias,), "_bias")):
        relu, gelu, aux = (
            Layer(dtype, activation, num_biases=len(operands), keeps_z=keeps_z)
            for activation, keeps_z in (("relu", False), ("gelu_tanh", False), ("gelu_tanh", True))
        )
        add(f"relu{end}", relu, *operands)
        add(f"gelu{end}", gelu, *operands)
        add(f"gelu_aux{end}", aux, *operands)
    add("bias", Layer(dtype, num_biases=1), bias)
    add("dgelu", PullBack(dtype, "gelu_tanh"), like_acc)
    return found
