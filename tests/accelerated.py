"""What `accelerate` makes of functions, and whether that computes what they do."""

import re

import jax
import numpy as np
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.system.jax_internals import as_jaxpr

_OURS = re.compile(r" tcgemm_(?:dot_general|epilogue_product)\[")
_THEIRS = re.compile(r" dot_general\[")
EPILOGUE = "tcgemm_epilogue_product"
M, K, N = 12, 20, 16


def layer(x, w, bias, residual):
    return residual + jax.nn.gelu(x @ w + bias)


LAYER = normal(M, K), normal(K, N, seed=1), normal(N, seed=2), normal(M, N, seed=3)


def equations(f, *args, **how):
    return as_jaxpr(jax.make_jaxpr(jax_tcgemm.accelerate(f, **how))(*args)).eqns


def groups(f, *args, **how):
    return [eqn for eqn in equations(f, *args, **how) if eqn.primitive.name == EPILOGUE]


def names(function):
    return [eqn.primitive.name for eqn in as_jaxpr(function).eqns]


def check(f, *args, exact=False, tolerance=1e-5, **how):
    """The values of a function, accelerated, jitted or not."""
    expected = jax.jit(f)(*args)
    for run in (jax_tcgemm.accelerate(f, **how), jax.jit(jax_tcgemm.accelerate(f, **how))):
        got = run(*args)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert jax.typeof(x).weak_type == jax.typeof(y).weak_type
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            if exact:
                np.testing.assert_array_equal(x, y)
            else:
                scale = max(1.0, abs(y).max(initial=0))
                np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)


def num_ours(program):
    """The products of ours in a program's text: two of those with two right operands."""
    return len(_OURS.findall(program)) + program.count(" num_rhs=2")


def num_theirs(program):
    """JAX's products in a program's text."""
    return len(_THEIRS.findall(program))


def check_every_product(f, *args):
    """All products are ours, as many as before, and none is JAX's."""
    before = str(jax.make_jaxpr(f)(*args))
    after = str(jax.make_jaxpr(jax_tcgemm.accelerate(f))(*args))
    assert num_theirs(before)
    assert not num_theirs(after)
    assert num_ours(after) == num_theirs(before)


def kinds(calls):
    """Return for each call with an epilogue "one" product, "two" products, or "stacked" for one."""
    return [
        "two" if own.num_rhs == 2 else "one" if own.pair is None else "stacked"
        for own in (eqn.params["encoding"] for eqn in calls)
    ]
