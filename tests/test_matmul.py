"""matmul against float64 references, and its shapes and dtypes against jnp.matmul."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_tcgemm

DTYPES = [
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "uint8", "int32", "complex64", "complex128", "bool", "float8_e4m3fn"),
]
# What the host implementation takes; the default and "xla" take every dtype.
HOST_DTYPES = ("bfloat16", "float32", "int8", "complex64")
MORE_HOST_DTYPES = ("float16", "float64", "uint8", "complex128")
# Every pair of ranks, broadcasting on either side and both, and empty dimensions.
SHAPES = [
    ((7,), (7,)),
    ((7,), (7, 5)),
    ((3, 7), (7,)),
    ((3, 7), (7, 5)),
    ((33, 70), (70, 65)),
    ((1, 7), (7, 1)),
    ((4, 3, 7), (7, 5)),
    ((3, 7), (4, 7, 5)),
    ((4, 3, 7), (4, 7, 5)),
    ((4, 3, 7), (1, 7, 5)),
    ((4, 1, 3, 7), (1, 2, 7, 5)),
    ((2, 1, 2, 3, 7), (2, 3, 1, 7, 5)),
    ((4, 3, 7), (7,)),
    ((7,), (4, 7, 5)),
    ((0, 7), (7, 5)),
    ((3, 0), (0, 5)),
    ((0, 3, 7), (1, 7, 5)),
]
SHAPE_IDS = ["x".join(map(str, a)) + "@" + "x".join(map(str, b)) for a, b in SHAPES]


def make(shape, dtype, seed):
    """Random values: normal for floats, the whole range for integers."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return jnp.asarray(rng.random(shape) < 0.5)
    if jnp.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return jnp.asarray(rng.integers(max(info.min, -999), min(info.max, 999), shape), dtype)
    values = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, np.complexfloating):
        values = values + 1j * rng.standard_normal(shape)
    return jnp.asarray(values, dtype)


def wide(x):
    """The same values in a type that holds them and the sums of their products."""
    x = np.asarray(x)
    if x.dtype.kind in "biu":
        return x.astype(np.int64)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def assert_product(out, reference, magnitude, num_terms, accumulator=np.float32):
    """Exact for integers; else one rounding to the result's dtype, plus at most `num_terms`
    roundings of the accumulator, each relative to the sum of the products' magnitudes."""
    if out.dtype.kind in "biu":
        np.testing.assert_array_equal(np.asarray(out), reference.astype(out.dtype))
        return
    eps = float(jnp.finfo(out.dtype).eps)
    eps_sum = max(float(jnp.finfo(accumulator).eps), 2.0**-53)
    bound = eps * np.abs(reference) + (num_terms + 4) * eps_sum * magnitude + 1e-30
    if out.dtype == jnp.float16:
        bound = bound + 1e-7  # Subnormals.
    error = np.abs(wide(out) - reference)
    assert np.all(error <= bound), f"error {error.max()} exceeds {bound.flat[error.argmax()]}"


def check(a, b, out, accumulator=np.float32):
    reference = np.matmul(wide(a), wide(b))
    magnitude = np.matmul(np.abs(wide(a)), np.abs(wide(b)))
    assert_product(out, reference, magnitude, 2 * a.shape[-1], accumulator)


def accumulator_of(dtype):
    return np.float64 if dtype in ("float64", "complex128") else np.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES, ids=SHAPE_IDS)
def test_is_jnp_matmul(a_shape, b_shape, dtype, x64):
    a, b = make(a_shape, dtype, 1), make(b_shape, dtype, 2)
    ours = jax.eval_shape(jax_tcgemm.matmul, a, b)
    theirs = jax.eval_shape(jnp.matmul, a, b)
    assert (ours.shape, ours.dtype, ours.weak_type) == (
        theirs.shape,
        theirs.dtype,
        theirs.weak_type,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_by_default(dtype, x64):
    if dtype in ("bool", "float8_e4m3fn"):
        a, b = make((9, 4), dtype, 1), make((4, 6), dtype, 2)
        expected = np.asarray(jnp.matmul(a, b))
        np.testing.assert_array_equal(np.asarray(jax_tcgemm.matmul(a, b)), expected)
    else:
        a, b = make((33, 70), dtype, 1), make((70, 65), dtype, 2)
        check(a, b, jax_tcgemm.matmul(a, b), accumulator_of(dtype))


HOST_CASES = [
    pytest.param(*shapes, dtype, id=f"{shapes_id} {dtype}")
    for shapes, shapes_id in zip(SHAPES, SHAPE_IDS, strict=True)
    for dtype in HOST_DTYPES + (MORE_HOST_DTYPES if shapes[0] in ((33, 70), (4, 3, 7)) else ())
]


@pytest.mark.parametrize(("a_shape", "b_shape", "dtype"), HOST_CASES)
def test_host_against_float64(a_shape, b_shape, dtype, x64):
    a, b = make(a_shape, dtype, 3), make(b_shape, dtype, 4)
    out = jax.jit(functools.partial(jax_tcgemm.matmul, implementation="host"))(a, b)
    check(a, b, out, accumulator_of(dtype))


@pytest.mark.parametrize("implementation", [None, "host"])
@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_preferred_element_type(dtype, out, implementation):
    a, b = make((17, 40), dtype, 1), make((40, 9), dtype, 2)
    result = jax_tcgemm.matmul(
        a, b, preferred_element_type=out, implementation=implementation, precision="highest"
    )
    assert result.dtype == out
    if implementation is None and {dtype, out} == {"bfloat16", "float16"}:
        return  # XLA:CPU rounds the operands to the result's dtype first.
    check(a, b, result, np.float32)


@pytest.mark.parametrize("implementation", [None, "host"])
@pytest.mark.parametrize("out", ["int8", "uint8", "int16", "int32", "uint32"])
@pytest.mark.parametrize("rhs_dtype", ["int8", "uint8"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers_are_exact_modulo_their_width(dtype, rhs_dtype, out, implementation):
    a, b = make((17, 300), dtype, 1), make((300, 9), rhs_dtype, 2)
    result = jax_tcgemm.matmul(a, b, preferred_element_type=out, implementation=implementation)
    assert result.dtype == out
    np.testing.assert_array_equal(result, (wide(a) @ wide(b)).astype(out))


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"),
    [
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("int8", "float32"),
        ("int32", "bfloat16"),
        ("int8", "uint8"),
        ("bool", "float16"),
        ("float32", "complex64"),
    ],
)
def test_mixed_dtypes_promote_as_jnp(a_dtype, b_dtype):
    a, b = make((9, 20), a_dtype, 1), make((20, 5), b_dtype, 2)
    ours, theirs = jax_tcgemm.matmul(a, b), jnp.matmul(a, b)
    assert ours.dtype == theirs.dtype
    check(a, b, ours, ours.dtype if ours.dtype.itemsize < 4 else np.float32)


@pytest.mark.parametrize("value", [1, 1.0, 1j])
@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float32", "complex64", None])
def test_weak_types_promote_as_jnp(value, dtype):
    weak = jnp.broadcast_to(jnp.asarray(value), (2, 3))
    weak = jnp.full((2, 3), 0) * value if not jax.typeof(weak).weak_type else weak
    other = weak.T if dtype is None else make((3, 4), dtype, 1)
    for a, b in ((weak, other), (other.T, weak.T)):
        ours, theirs = jax.eval_shape(jax_tcgemm.matmul, a, b), jax.eval_shape(jnp.matmul, a, b)
        assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)


@pytest.mark.parametrize("signed", ["int8", "int16", "int32", "int64"])
def test_floats_that_integers_promote_to_are_weak(signed, x64):
    x, y = jnp.full((2, 3), -2, signed), jnp.full((3, 4), 2**40 + 1, "uint64")
    for a, b in ((x, y), (y.T, x.T)):
        ours, theirs = jax_tcgemm.matmul(a, b), jnp.matmul(a, b)
        assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
        np.testing.assert_array_equal(ours, theirs)
        assert (ours + jnp.float32(0)).dtype == (theirs + jnp.float32(0)).dtype


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_what_is_added_makes_a_weak_product_strong(name):
    weak = jnp.full((2, 2), 0) * 1.0
    assert jax.typeof(weak).weak_type
    out = jax.eval_shape(jax_tcgemm.matmul, weak, weak, **{name: jnp.ones(2)})
    assert (out.dtype, out.weak_type) == (jnp.float32, False)


def test_numpy_arrays_are_operands():
    a = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(jax_tcgemm.matmul(a, a.T), np.full((2, 2), 3))


def test_wrapped_arrays_are_operands():
    class Parameter:
        def __jax_array__(self):
            return jnp.ones((3, 2))

    np.testing.assert_array_equal(jax_tcgemm.matmul(jnp.ones(3), Parameter()), [3, 3])


@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.booleans(), st.booleans()), max_size=4),
    m=st.none() | st.integers(0, 5),
    n=st.none() | st.integers(0, 5),
    k=st.integers(0, 5),
    drop=st.integers(0, 4),
)
def test_any_broadcast(batch, m, n, k, drop):
    a_batch = [1 if a_is_1 else size for size, a_is_1, _ in batch]
    b_batch = [1 if b_is_1 else size for size, _, b_is_1 in batch][drop:]
    a_shape = (k,) if m is None else (*a_batch, m, k)
    b_shape = (k,) if n is None else (*b_batch, k, n)
    a, b = make(a_shape, "float32", 1), make(b_shape, "float32", 2)
    for implementation in ("host", "xla"):
        out = jax_tcgemm.matmul(a, b, implementation=implementation)
        assert out.shape == np.matmul(a, b).shape
        check(a, b, out)


def test_a_broadcast_operand_is_not_repeated():
    a, b = jnp.ones((4, 1, 3, 7)), jnp.ones((1, 2, 7, 5))
    jaxpr = str(jax.make_jaxpr(jax_tcgemm.matmul)(a, b))
    assert "broadcast_in_dim" not in jaxpr
    assert "transpose" not in jaxpr
    (call,) = jax_tcgemm.explain(
        functools.partial(jax_tcgemm.matmul, implementation="host"), a, b, platform="cpu"
    )
    assert call.copies == ()
    assert call.problem.a.inner_stride == call.problem.b.outer_stride == 0
