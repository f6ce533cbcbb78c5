"""ragged_dot with bias, activation and gathered rows, and gated_ragged_linear."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.problem.activations import ACTIVATIONS

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["host", "xla"])
SIZES = [4, 0, 5, 3]
M, K, N = 14, 6, 5


def operands(gated=False):
    halves = (2,) if gated else ()
    lhs, rhs = normal(M, K), normal(len(SIZES), K, *halves, N, seed=1)
    return lhs, rhs, normal(len(SIZES), *halves, N, seed=2)


def expected(f, lhs, rhs, sizes, bias=None, offset=0):
    """f of each product and bias, one group after the other, in float64."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out = np.zeros((lhs.shape[0], rhs.shape[-1]))
    for g, (begin, end) in enumerate(reference.bounds(sizes, lhs.shape[0], offset, rhs.shape[0])):
        z = np.tensordot(lhs[begin:end], rhs[g], 1)
        z = z if bias is None else z + np.asarray(bias[g], np.float64)
        with jax.enable_x64(True):
            out[begin:end] = f(jnp.asarray(z))
    return out


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
def test_activations(activation, biased):
    lhs, rhs, bias = operands()
    bias = bias if biased else None
    got = jax_tcgemm.ragged_dot(
        lhs, rhs, jnp.array(SIZES), activation=activation, bias=bias, implementation="host"
    )
    want = expected(ACTIVATIONS[activation], lhs, rhs, SIZES, bias)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[sum(SIZES) :], 0)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("activation", ["silu", "sigmoid", jax.nn.gelu])
@IMPLEMENTATIONS
def test_gated(implementation, activation, offset):
    """Groups beyond those that the weights have, and rows of no group, are zero."""
    x, weights, bias = operands(gated=True)
    weights, bias = weights[:3], bias[:3]
    got = jax_tcgemm.gated_ragged_linear(
        x,
        weights,
        jnp.array(SIZES),
        activation,
        group_offset=offset,
        bias=bias,
        implementation=implementation,
    )
    f = activation if callable(activation) else ACTIVATIONS[activation]
    want = expected(lambda z: f(z[:, 0]) * z[:, 1], x, weights, SIZES, bias, offset)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32"])
def test_one_rounding_of_a_16_bit_result(bias_dtype):
    """Bias and activation are applied to the float32 accumulator."""
    lhs, rhs, bias = (x.astype("bfloat16") for x in operands())
    got = jax_tcgemm.ragged_dot(
        lhs, rhs, jnp.array(SIZES), activation="silu", bias=bias.astype(bias_dtype)
    )
    assert got.dtype == jnp.bfloat16
    want = expected(jax.nn.silu, lhs, rhs, SIZES, bias)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-6)


def masked(f, sizes):
    """The same function of every row and group, multiplied by which row is in which group."""
    ends = jnp.cumsum(jnp.array(sizes))
    rows = jnp.arange(M)[:, None]
    mask = (rows < ends) & (rows >= ends - jnp.array(sizes))

    def dense(lhs, rhs, bias):
        z = jnp.einsum("mk,gk...->mg...", lhs, rhs) + bias
        return jnp.einsum("mg,mgn->mn", mask.astype(lhs.dtype), f(z))

    return dense


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("activation", ["sigmoid", "gelu_erf"])
@IMPLEMENTATIONS
def test_gradients(implementation, activation, gated):
    args = operands(gated)
    f = ACTIVATIONS[activation]

    def ours(x, w, b):
        kwargs = {"activation": activation, "bias": b, "implementation": implementation}
        if gated:
            return jax_tcgemm.gated_ragged_linear(x, w, jnp.array(SIZES), **kwargs)
        return jax_tcgemm.ragged_dot(x, w, jnp.array(SIZES), **kwargs)

    theirs = masked((lambda z: f(z[:, :, 0]) * z[:, :, 1]) if gated else f, SIZES)

    def grads(f):
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
        jax.jit(grads(ours))(*args),
        grads(theirs)(*args),
    )
    one = jax.grad(lambda b: jnp.sum(ours(*args[:2], b)))(args[2])  # Of the bias alone.
    np.testing.assert_array_equal(one[1], 0)


@IMPLEMENTATIONS
def test_vmap_of_a_fused_product(implementation):
    x, weights, bias = operands(gated=True)
    f = functools.partial(
        jax_tcgemm.gated_ragged_linear, activation="silu", implementation=implementation
    )
    sizes = jnp.array([SIZES, SIZES[::-1]])
    mapped = jax.vmap(lambda x, b, s: f(x, weights, s, bias=b), (None, 0, 0))
    got = mapped(x, jnp.stack([bias, 2 * bias]), sizes)
    for i in range(2):
        one = f(x, weights, sizes[i], bias=(i + 1) * bias)
        np.testing.assert_allclose(got[i], one, rtol=1e-5, atol=1e-5)


INDICES = np.array([3, 0, 3, 9, 1, 1, 7, 99, -1, 2, 5, 3])


def taken(x):
    """The rows at INDICES, those out of range as zeros."""
    x = np.asarray(x)
    inside = (INDICES >= 0) & (len(x) > INDICES)
    return np.where(inside[:, None], x[np.where(inside, INDICES, 0)], 0)


@IMPLEMENTATIONS
def test_gathered_rows(implementation):
    lhs, rhs, _ = operands()
    sizes = [4, 0, 5, 2]
    f = functools.partial(
        jax_tcgemm.ragged_dot,
        group_sizes=jnp.array(sizes),
        gather_indices=jnp.array(INDICES),
        implementation=implementation,
    )
    out, vjp = jax.vjp(f, lhs, rhs)
    np.testing.assert_allclose(out, reference.rows(taken(lhs), rhs, sizes), rtol=1e-5, atol=1e-5)
    ct = normal(*out.shape, seed=4)
    lhs_bar, rhs_bar = vjp(ct)
    to_rows = reference.rows(ct, np.swapaxes(rhs, 1, 2), sizes)
    want = np.zeros(lhs.shape)
    for i, row in enumerate(INDICES):
        if 0 <= row < len(want):
            want[row] += to_rows[i]
    np.testing.assert_allclose(lhs_bar, want, rtol=1e-5, atol=1e-5)
    want = reference.contraction(taken(lhs), ct, sizes)
    np.testing.assert_allclose(rhs_bar, want, rtol=1e-5, atol=1e-5)


@IMPLEMENTATIONS
def test_rows_gathered_from_nothing_are_zero(implementation):
    _, rhs, _ = operands()
    got = jax_tcgemm.ragged_dot(
        jnp.zeros((0, K)),
        rhs,
        jnp.array(SIZES),
        gather_indices=jnp.arange(M),
        implementation=implementation,
    )
    np.testing.assert_array_equal(got, np.zeros((M, N)))


def test_second_derivatives_through_gathered_rows():
    lhs, rhs, _ = operands()
    sizes = jnp.array([4, 0, 5, 2])

    def loss(f):
        return jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b))), (0, 1))

    def ours(a, b):
        return jax_tcgemm.ragged_dot(a, b, sizes, gather_indices=jnp.array(INDICES))

    def theirs(a, b):
        rows = a.at[jnp.where(INDICES < 0, M, INDICES)].get(mode="fill", fill_value=0)
        return jax_tcgemm.ragged_dot(rows, b, sizes)

    def twice(f):
        return jax.grad(lambda a, b: sum(jnp.sum(g**2) for g in loss(f)(a, b)), (0, 1))

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
        twice(ours)(lhs, rhs),
        twice(theirs)(lhs, rhs),
    )


@IMPLEMENTATIONS
def test_gradient_of_gathered_rows_is_summed_wide(implementation):
    """Many rows of a product from one row of lhs: one rounding of their sum."""
    rng = np.random.default_rng(0)
    lhs, rhs, ct = (
        jnp.asarray(rng.standard_normal(shape)).astype(jnp.bfloat16)
        for shape in ((2, 4), (1, 4, 8), (512, 8))
    )
    how = {"gather_indices": np.arange(512) % 2, "implementation": implementation}
    f = functools.partial(jax_tcgemm.ragged_dot, rhs=rhs, group_sizes=np.array([512]), **how)
    (got,) = jax.vjp(f, lhs)[1](ct)
    parts = (np.asarray(ct, np.float64) @ np.asarray(rhs[0], np.float64).T).reshape(256, 2, 4)
    # Each part is rounded, in no direction, and then their sum.
    bound = 2.0**-9 * (4 * np.sqrt(np.sum(parts**2, 0)) + np.abs(parts.sum(0))) + 1e-3
    assert (np.abs(np.asarray(got, np.float64) - parts.sum(0)) <= bound).all()


def test_gathering_is_batched_by_vmap():
    lhs, rhs, _ = operands()
    indices = jnp.stack([jnp.arange(M), jnp.arange(M)[::-1]])
    f = functools.partial(jax_tcgemm.ragged_dot, lhs, rhs, jnp.array(SIZES))
    got = jax.vmap(lambda i: f(gather_indices=i))(indices)
    for i in range(2):
        np.testing.assert_allclose(got[i], f(gather_indices=indices[i]), rtol=1e-6)


def test_explain_says_how_a_gpu_runs_it(fake_cuda):
    """Without a kernel that does it all: as products of ours and steps around them."""
    x, weights, _ = operands(gated=True)
    (call,) = jax_tcgemm.explain(
        jax_tcgemm.gated_ragged_linear, x, weights, jnp.array(SIZES), platform="cuda"
    )
    assert call.implementation == "xla"
    assert call.why.startswith("unfused: ")
    assert call.epilogue == ("silu", "mul")


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("rows", [64, 1024])
def test_a_gpu_runs_it_in_one_kernel_where_groups_have_rows_enough(rows, gathered, fake_cuda):
    fused = "256x128x64_c1x2x1_co_t"
    fake_cuda.ragged = types.SimpleNamespace(
        implementations=lambda: {"wgmma": ["bare", fused]},
        rejections=lambda name, problem, device: ["it is bare", ""],
        workspace_bytes=lambda *_: 0,
        kernels=lambda *_: (),
    )
    x, weights = jnp.ones((rows, 16), jnp.bfloat16), jnp.ones((4, 16, 2, 8), jnp.bfloat16)
    indices = jnp.arange(rows) if gathered else None
    for implementation in (None, "wgmma"):
        f = functools.partial(
            jax_tcgemm.gated_ragged_linear, gather_indices=indices, implementation=implementation
        )
        (call,) = jax_tcgemm.explain(f, x, weights, jnp.full(4, rows // 4), platform="cuda")
        leaves = implementation is None and rows == 64
        assert (call.implementation, call.config) == (
            ("xla", "default") if leaves else ("wgmma", fused)
        )


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": normal(M)}, ValueError, "x must have shape (m, k)"),
        ({"weights": normal(4, K, N)}, ValueError, "weights must have shape (g, k, 2, n)"),
        ({"weights": normal(4, K, 3, N)}, ValueError, "weights must have shape (g, k, 2, n)"),
        ({"weights": normal(3, K, 2, N)}, ValueError, "group_sizes must have shape (3,)"),
        ({"bias": normal(4, N)}, ValueError, "bias must have shape (4, 2, 5)"),
        ({"gather_indices": jnp.zeros((2, 2), int)}, ValueError, "must have shape (rows,)"),
        ({"gather_indices": jnp.zeros(2)}, TypeError, "gather_indices must be integers"),
        ({"activation": "magic"}, ValueError, "activation must be"),
        ({"preferred_element_type": "int32"}, TypeError, "real floating point"),
    ],
    ids=lambda change: str(*change) if isinstance(change, dict) else "",
)
def test_refuses(change, error, says):
    x, weights, _ = operands(gated=True)
    kwargs = {"x": x, "weights": weights, "group_sizes": jnp.array(SIZES)} | change
    with pytest.raises(error) as info:
        jax_tcgemm.gated_ragged_linear(**kwargs)
    assert says in str(info.value)
    assert str(info.value).startswith("gated_ragged_linear: ")
    assert ", got " in str(info.value)
