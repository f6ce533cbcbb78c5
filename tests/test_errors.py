"""Bad input is refused while tracing, in one format: `op: what must rule, got value; remedy`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.device.dense import call as dense_call
from jax_tcgemm.problem.gemm import Operand, Problem

NN = (((1,), (0,)), ((), ()))
X = jax.ShapeDtypeStruct((4, 4), jnp.float32)
FORMAT = re.compile(r"^(matmul|dot_general): .+ must .+, got .+; .+")


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("a", "b", "kwargs", "error", "says"),
    [
        (struct(), X, {}, ValueError, "a.shape=()"),
        (X, struct(), {}, ValueError, "b.shape=()"),
        (struct(4, 5), X, {}, ValueError, "a.shape=(4, 5) and b.shape=(4, 4)"),
        (struct(5), X, {}, ValueError, "last but one"),
        (X, struct(5), {}, ValueError, "only one of b"),
        (struct(2, 4, 4), struct(3, 4, 4), {}, ValueError, "must broadcast"),
        (X, X, {"implementation": "magic"}, ValueError, "implementation='magic'"),
        (X, X, {"implementation": 3}, TypeError, "implementation=3"),
        (X, X, {"config": "portable"}, ValueError, "config must come with an implementation"),
        (X, X, {"implementation": "host", "config": "magic"}, ValueError, "config='magic'"),
        (X, X, {"precision": "magic"}, ValueError, "precision='magic'"),
        (X, X, {"preferred_element_type": "magic"}, TypeError, "preferred_element_type='magic'"),
        (struct(2**31, 1), struct(1, 1), {}, ValueError, "a.shape[0]=2147483648"),
        (struct(1, 1), struct(1, 2**31), {}, ValueError, "b.shape[1]=2147483648"),
        (jax.eval_shape(lambda: jax.random.key(0)), X, {}, TypeError, "numeric dtype"),
    ],
)
def test_matmul_refuses(a, b, kwargs, error, says):
    with pytest.raises(error) as info:
        jax.eval_shape(lambda a, b: jax_tcgemm.matmul(a, b, **kwargs), a, b)
    assert says in str(info.value)
    assert FORMAT.match(str(info.value)), str(info.value)


@pytest.mark.parametrize(
    ("lhs", "rhs", "numbers", "error", "says"),
    [
        (X, X, (((1,), (0,)),), TypeError, "dimension_numbers must be"),
        (X, X, (((1,), ()), ((), ())), ValueError, "must come in pairs"),
        (X, X, (((2,), (0,)), ((), ())), ValueError, "must be in [0, 2)"),
        (X, X, (((-1,), (0,)), ((), ())), ValueError, "got -1"),
        (X, X, (((1, 1), (0, 1)), ((), ())), ValueError, "must be distinct"),
        (X, X, (((1,), (0,)), ((1,), (1,))), ValueError, "must be distinct"),
        (X, struct(5, 4), NN, ValueError, "lhs.shape[1]=4 and rhs.shape[0]=5"),
        (X, struct(4, 5), (((1,), (0,)), ((0,), (1,))), ValueError, "batch dimensions"),
        (struct(2**31), struct(1), (((), ()), ((), ())), ValueError, "2**31 - 1"),
    ],
)
def test_dot_general_refuses(lhs, rhs, numbers, error, says):
    with pytest.raises(error) as info:
        jax.eval_shape(lambda x, y: jax_tcgemm.dot_general(x, y, numbers), lhs, rhs)
    assert says in str(info.value)
    assert FORMAT.match(str(info.value)), str(info.value)


@pytest.mark.parametrize(
    "bad", ["abc", [1.0, 2.0], None, object()], ids=lambda bad: type(bad).__name__
)
def test_operands_must_be_arrays(bad):
    with pytest.raises(TypeError, match=r"matmul: a must .*, got .*; "):
        jax_tcgemm.matmul(bad, jnp.ones(3))


def test_unlike_dtypes_are_refused_as_by_lax():
    with pytest.raises(TypeError, match="must not be narrower"):
        jax_tcgemm.matmul(
            jnp.ones((2, 2), jnp.int32),
            jnp.ones((2, 2), jnp.int8)[0:2],
            **{"preferred_element_type": jnp.int8},
        )


def test_unknown_keywords_are_errors():
    with pytest.raises(TypeError, match="transpose_a"):
        jax_tcgemm.matmul(jnp.ones(3), jnp.ones(3), transpose_a=True)


@pytest.mark.parametrize(
    ("implementation", "dtype", "says"),
    [
        ("wgmma", "float32", "wgmma cannot run this: it runs on cuda, not on cpu"),
        ("host", "int32", "host cannot run this: no implementation multiplies int32"),
        ("host", "float8_e4m3fn", "host cannot run this: the operands' dtype must be f16, bf16"),
    ],
)
def test_a_forced_implementation_that_cannot_run_says_why(implementation, dtype, says):
    x = jnp.zeros((4, 4), dtype)
    with pytest.raises(ValueError, match=re.escape(says)) as info:
        jax.jit(lambda x: jax_tcgemm.matmul(x, x, implementation=implementation))(x)
    assert FORMAT.match(str(info.value))


def test_local_gemm_needs_c_for_beta():
    dense = Operand("f32", False, 4)
    problem = Problem(1, 1, 4, 4, 4, dense, dense, "f32", "f32", beta=2.0)
    choice = selection.Choice("host", "auto", "")
    with pytest.raises(ValueError, match="c must be given"):
        dense_call.local_gemm(problem, np.ones(16), np.ones(16), choice=choice)
