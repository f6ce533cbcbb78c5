"""Workloads of products with a function as their epilogue.

A group has these keys::

    m, n, k, function      a name in FUNCTIONS; each may be a list

`auto` is the product with the function as our choice runs it, those of TILES the same in one call
by a tile of each kind, `bare` our plain product with the function left to XLA, `xla` the
expression under jit. `product`, the plain product alone, is timed beside them: what one call can at
best take.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed

# Configs of wgmma: two warpgroups that take turns at the tensor cores, and two that share a tile.
TILES = ("128x128x64_c2x1x1_pp", "128x256x64_c2x1x1_co")


@dataclasses.dataclass(frozen=True)
class Function:
    """An epilogue, as the caller of a library writes it.

    Attributes:
      call: of the product and of operands.
      operands: for each, which extents it has ("m1": a column, "n": a row, "mn": a matrix, "key":
        the two numbers of a random key), and its dtype.
    """

    call: Callable
    operands: tuple[tuple[str, str], ...] = ()


def _alibi(acc):
    row, column = (jax.lax.broadcasted_iota(jnp.float32, acc.shape, dim) for dim in (0, 1))
    return (acc - abs(row - column) * 2.0**-12).astype(jnp.bfloat16)


def _dropout(acc, key):
    kept = jax.random.bernoulli(key, 0.9, acc.shape)
    return jnp.where(kept, acc / 0.9, 0).astype(jnp.bfloat16)


def _clipped_swish(acc, alpha):
    x = jnp.minimum(acc, 7)
    return (x * jax.nn.sigmoid(alpha * x)).astype(jnp.bfloat16)


def _causal(acc):
    row, column = (jax.lax.broadcasted_iota(jnp.int32, acc.shape, dim) for dim in (0, 1))
    return jnp.where(column <= row, acc, -3).astype(jnp.bfloat16)


def _backward_of_gelu(acc, z):
    (dz,) = jax.vjp(jax.nn.gelu, z.astype(jnp.float32))[1](acc.astype(jnp.float32))
    return dz.astype(jnp.bfloat16)


def _elementwise(function: Callable[[jax.Array], jax.Array]) -> Function:
    return Function(lambda acc: function(acc).astype(jnp.bfloat16))


# Elementwise functions of many instructions, by jax.numpy or numpy.
ELEMENTWISE = {
    "sin": lambda z, xp: xp.sin(z),
    "cos": lambda z, xp: xp.cos(z),
    "mish": lambda z, xp: z * xp.tanh(xp.logaddexp(z, 0.0)),
    "log-cosh": lambda z, xp: xp.logaddexp(z, -z) - math.log(2),
    "pow": lambda z, xp: xp.power(xp.abs(z) + 0.5, 1.7),
}
FUNCTIONS = {
    "soft cap": Function(lambda acc: (2 * jnp.tanh(acc / 2)).astype(jnp.bfloat16)),
    "learned swish": Function(
        lambda acc, slope: (acc * jax.nn.sigmoid(slope * acc)).astype(jnp.bfloat16),
        (("n", "float32"),),
    ),
    "dropout": Function(_dropout, (("key", "uint32"),)),
    "ALiBi": Function(_alibi),
    "causal mask": Function(_causal),
    "clipped swish": Function(_clipped_swish, (("", "float32"),)),
    # So many steps that one of them is less than the tolerance.
    "int8 by rows": Function(
        lambda acc, scale: jnp.clip(jnp.round(acc * scale * 99), -127, 127).astype(jnp.int8),
        (("m1", "float32"),),
    ),
    "two results": Function(lambda acc: (acc.astype(jnp.bfloat16), jnp.exp(-abs(acc)))),
    "row maxima": Function(lambda acc: (acc.astype(jnp.bfloat16), acc.max(-1))),
    "column sums": Function(lambda acc: (acc.astype(jnp.bfloat16), acc.sum(0))),
    "bias, exact gelu, residual": Function(
        lambda acc, bias, x: (jax.nn.gelu(acc + bias, approximate=False) + x).astype(jnp.bfloat16),
        (("n", "float32"), ("mn", "bfloat16")),
    ),
    "scales of rows and columns": Function(
        lambda acc, row, column: (acc * row * column).astype(jnp.bfloat16),
        (("m1", "float32"), ("n", "float32")),
    ),
    "backward of gelu": Function(_backward_of_gelu, (("mn", "bfloat16"),)),
    "erf": _elementwise(jax.scipy.special.erf),
    **{name: _elementwise(functools.partial(f, xp=jnp)) for name, f in ELEMENTWISE.items()},
}


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key or function.
    """
    keys = ("m", "n", "k", "function")
    check_keys(f"a group of {suite}", group, ("name", *keys))
    for m, n, k, name in itertools.product(*(listed(group[key]) for key in keys)):
        check_value("function", name, FUNCTIONS)
        yield _workload(suite, group.get("name", ""), dtype, m, n, k, name)


def _workload(suite, label, dtype, m, n, k, name) -> Workload:
    function, element_type = FUNCTIONS[name], DTYPES[dtype][0]
    shapes = {"m1": (m, 1), "n": (n,), "mn": (m, n), "": (), "key": (2,)}
    operands = [jax.ShapeDtypeStruct((m, k), element_type)]
    operands += [jax.ShapeDtypeStruct((k, n), element_type)]
    operands += [jax.ShapeDtypeStruct(shapes[dims], kind) for dims, kind in function.operands]

    def draw(key):
        x, w, *rest = (
            reference.random(each, x.shape, x.dtype)
            if x.dtype != jnp.uint32
            else jax.random.bits(each, x.shape, x.dtype)
            for each, x in zip(jax.random.split(key, len(operands)), operands, strict=True)
        )
        return x, w * jnp.asarray(k**-0.5, w.dtype), *rest

    def given(rest):
        """The operands in their own dtypes; the numbers of a key are that."""
        for own, x in zip(operands[2:], rest, strict=True):
            is_key = own.dtype == jnp.uint32
            yield jax.random.wrap_key_data(x) if is_key else x.astype(own.dtype)

    def expression(product):
        return lambda x, w, *rest: function.call(product(x, w), *given(rest))

    def fused(x, w, *rest, **how):
        how |= {"epilogue": function.call, "epilogue_operands": tuple(given(rest))}
        return jax_tcgemm.matmul(x, w, **how)

    by_tile = {
        tile: functools.partial(fused, implementation="wgmma", config=tile) for tile in TILES
    }
    wide = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    ours = functools.partial(jax_tcgemm.matmul, preferred_element_type=jnp.float32)
    return Workload(
        suite=suite,
        label=f"{label} {name}".strip(),
        dtype=dtype,
        shape=f"{m}×{n}×{k}",
        sizes={"m": m, "n": n, "k": k},
        operands=tuple(operands),
        ours={"auto": fused, **by_tile, "bare": expression(ours)},
        peers={"xla": expression(wide)},
        parts={"product": lambda x, w, *_: jax_tcgemm.matmul(x, w)},
        reference=expression(functools.partial(jnp.matmul, precision="highest")),
        # A rounding of the result, one step of integers among 127, and float32 accumulation.
        tolerance=2 * float(jnp.finfo(element_type).eps) + 1e-4 * math.sqrt(k / 4096),
        flops=2 * m * n * k,
        draw=draw,
    )
