"""Functions that follow products, their operands, and how results are compared."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tcgemm

M, K, N = 12, 20, 16
KEY = jax.random.key(3)
NN = (((1,), (0,)), ((), ()))


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype)))


def soft_cap(acc):
    return 30 * jnp.tanh(acc / 30)


def swish(acc, slope):
    return acc * jax.nn.sigmoid(slope * acc)


def dropout_of_closed_key(acc):
    return jnp.where(jax.random.bernoulli(KEY, 0.75, acc.shape), acc / 0.75, 0)


def dropout(acc, key):
    return jnp.where(jax.random.bernoulli(key, 0.75, acc.shape), acc / 0.75, 0)


def position_bias(acc):
    query, key = (lax.broadcasted_iota(jnp.int32, acc.shape, acc.ndim - i) for i in (2, 1))
    return acc - 0.25 * abs(query - key)


def clipped_swiglu(acc):
    return jnp.clip(acc, -7, 7) * jax.nn.sigmoid(1.702 * acc)


def quantize(acc, scale):
    return jnp.clip(jnp.round(acc / scale), -127, 127).astype(jnp.int8)


def two_results(acc, bias):
    z = acc + bias
    return {"out": jax.nn.gelu(z), "kept": (z.astype(jnp.bfloat16), z > 0)}


def row_maxima(acc):
    return acc, jnp.max(acc, -1)


def column_sums(acc, bias):
    z = jax.nn.relu(acc + bias)
    return z, jnp.sum(z, 0)


def masked(acc, mask):
    return jnp.where(mask, acc, -1e3)


def scaled_residual(acc, residual, scale, shift):
    return residual + scale * acc + shift


# Their operands, of float dtypes where they are.
OPERANDS = {
    soft_cap: lambda dtype: (),
    swish: lambda dtype: (normal(2, N, dtype=dtype),),
    dropout_of_closed_key: lambda dtype: (),
    dropout: lambda dtype: (jax.random.key(7),),
    position_bias: lambda dtype: (),
    clipped_swiglu: lambda dtype: (),
    quantize: lambda dtype: (abs(normal(2, M, 1, dtype=dtype)) / 8 + 0.125,),
    two_results: lambda dtype: (normal(2, N, dtype=dtype),),
    row_maxima: lambda dtype: (),
    column_sums: lambda dtype: (normal(2, N, dtype=dtype),),
    masked: lambda dtype: (normal(2, M, N) > 0,),
    scaled_residual: lambda dtype: tuple(
        normal(i, *shape, dtype=dtype) for i, shape in enumerate(((M, N), (N,), (1, N)), 2)
    ),
}
FUNCTIONS = pytest.mark.parametrize("function", OPERANDS, ids=lambda f: f.__name__)
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])

# Of products of K terms: what is summed in float32, and what derivatives round to the operands'.
ROUNDING = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2e-6}
ROUNDING_OF_DERIVATIVES = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 2**-6}


def ours(function, *, product=jax_tcgemm.matmul, **how):
    """A function of two factors and of the operands."""

    def run(x, w, *operands):
        return product(x, w, epilogue=function, epilogue_operands=operands, **how)

    return run


def theirs(function):
    def run(x, w, *operands):
        return function(jnp.matmul(x, w, precision="highest"), *operands)

    return run


def arguments(function, dtype):
    x, w = normal(0, M, K, dtype=dtype), normal(1, K, N, dtype=dtype)
    return x, w, *OPERANDS[function](dtype)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def wide(args):
    return [jax.device_put(np.asarray(x, np.float64)) if is_float(x) else x for x in args]


def loss(f):
    """A number that depends on every result with fractions, in float64."""

    def run(*args):
        leaves = [x for x in jax.tree.leaves(f(*args)) if is_float(x)]
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float64) / 3)) for x in leaves)

    return run


def moving(args):
    """The arguments that have derivatives."""
    return tuple(i for i, x in enumerate(args) if is_float(x))


def assert_near(got, expected, rounding):
    """Within a few roundings of the largest element; results may be narrower."""

    def check(x, y):
        assert x.shape == y.shape
        eps = 2**-7 if x.dtype == jnp.bfloat16 else 0
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        limit = max(4 * rounding, eps) * max(np.abs(y).max(initial=0.0), 1.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=limit)

    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(check, got, expected)


def params_of(f, *args, name="tcgemm_epilogue_product"):
    """Of every call of the primitive in a traced function, its equation."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return [x for x in jaxpr.eqns if x.primitive.name == name]


def mesh_of(axis_type):
    devices = jax.devices("cpu")[:8]
    types = (axis_type,) * 3
    return jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=types, devices=devices)


def collectives(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return text, sorted(re.findall(rf" ({kinds})(?:-start)?\(", text))
