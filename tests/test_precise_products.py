"""Products of float32 and complex64 as sums of bfloat16 or TF32 terms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from precise_cases import ADDING, KINDS, LEFT_OUT, PRESETS, exact, excess, operands
from random_arrays import normal, widened

import jax_tcgemm
from jax_tcgemm import selection, tensor
from jax_tcgemm.device import split_precision
from jax_tcgemm.device.dense import call as dense_call
from jax_tcgemm.device.dense import plan as dense_plan
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.dense.operands import prepare
from jax_tcgemm.device.fusion import epilogue
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.precision import canonical_precision, resolve
from jax_tcgemm.selection.devices import ASSUMED_GPU

F32, BF16, C64 = (np.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.complex64))
X3, X6, X9, TF32 = PRESETS


def numerics(preset, lhs=F32, rhs=F32, result=F32, platform="cuda"):
    return resolve(lhs, rhs, result, canonical_precision("matmul", preset), platform)


def product(a, b, preset, implementation="host"):
    """What a GPU multiplies, on the CPU: unless asked for by name, that has float32."""
    f = functools.partial(jax_tcgemm.matmul, precision=preset, implementation=implementation)
    return jax.jit(f)(a, b)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["host", "xla"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_errors(dtype, kind, preset, implementation):
    a, b = operands(kind, 33, 20, 700, dtype)
    got = product(a, b, preset, implementation)
    assert got.dtype == dtype
    # Sums of positive numbers grow with each.
    adding = ADDING * (10 if kind == "positive" else 1)
    assert excess(got, a, b, preset, adding) <= 1


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_fewer_products_are_less_exact(dtype):
    """What is allowed tells the presets apart."""
    a, b = operands("normal", 33, 20, 60, dtype)
    assert excess(product(a, b, X3), a, b, X6) > 2
    assert excess(product(a, b, X3), a, b, TF32) > 1
    of_one = lax.reduce_precision(a.real, 8, 7), lax.reduce_precision(b.real, 8, 7)
    assert excess(exact(*of_one)[0], a.real, b.real, X3) > 10


def test_worst_case_of_three_products():
    """What is left out is largest where each part is half way between two of bfloat16."""
    x = 1 + 2.0**-8 - 2.0**-15 + 2.0**-17
    a = b = jnp.full((4, 4), x, jnp.float32)
    error = abs(widened(product(a, b, X3)) - 4 * x * x).max() / (4 * x * x)
    assert 0.9 * LEFT_OUT[X3] < error < LEFT_OUT[X3]
    assert abs(widened(product(a, b, X6)) - 4 * x * x).max() / (4 * x * x) < 2 * LEFT_OUT[X6]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_infinities_and_nans(dtype, preset):
    """As float32 itself has them, and nowhere else."""
    a, b = (np.array(x) for x in operands("normal", 12, 9, 40, dtype))
    a[0, 3], a[1, 4], a[2, :2] = np.inf, np.nan, (np.inf, -np.inf)
    b[5, 1], a[3, 5] = -np.inf, 0
    b[6, 2], a[4, 6] = np.inf, 2.0  # exact in one term: the others of it are zeros
    with np.errstate(invalid="ignore"):
        expected = np.stack([sum(x * y for x, y in zip(row, b, strict=True)) for row in a])
    got = np.asarray(product(jnp.asarray(a), jnp.asarray(b), preset))
    if dtype == "complex64":  # One infinity makes NaNs of a complex number, which ones is open.
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
        return
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(got[np.isinf(expected)], expected[np.isinf(expected)])
    assert np.isfinite(got[5:, 3:]).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_largest_numbers(preset):
    """No part of a finite number is infinite."""
    largest = float(jnp.finfo(jnp.float32).max)
    a = jnp.diag(jnp.array([largest, -largest, 0.99 * largest], jnp.float32))
    got = product(a, jnp.full((3, 3), 0.5, jnp.float32), preset)
    expected = np.broadcast_to(widened(a).sum(1)[:, None] * 0.5, (3, 3))
    np.testing.assert_allclose(widened(got), expected, rtol=LEFT_OUT[preset] + ADDING)


# --- terms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_parts_add_up_under_jit(preset):
    """Roundings that cancel on paper stay in the program."""
    x = normal(50, 31)
    own = numerics(preset)
    split = jax.jit(lambda x: split_precision.stacked(x, own, (1,), (), is_rhs=False))(x)
    assert split.dtype == own.lhs_dtype
    assert split.shape == (50, len(own.terms.pairs), 31)
    by_number = {i: widened(split[:, p]) for p, (i, _) in enumerate(own.terms.pairs)}
    left = widened(x) - sum(by_number.values())
    of_x = {X3: 2.0**-17, X6: 0, X9: 0, TF32: 2.0**-23}[preset]
    assert (abs(left) <= of_x * abs(widened(x))).all()
    bits = own.terms.mantissa_bits + 1
    for number, part in by_number.items():
        assert (abs(part) <= 2.0 ** (-bits * number) * abs(widened(x)) * (1 + 2.0**-bits)).all()
        mantissas, _ = np.frexp(part)
        np.testing.assert_array_equal(mantissas * 2**bits, np.round(mantissas * 2**bits))
    assert abs(by_number[1]).max() > 0


def test_small_products_come_first():
    for preset, number in zip(PRESETS, (3, 6, 9, 3), strict=True):
        sums = [sum(pair) for pair in numerics(preset).terms.pairs]
        assert len(sums) == number
        assert sums == sorted(sums, reverse=True)


@pytest.mark.parametrize(
    ("preset", "dtypes", "pairs"),
    [
        (X3, (BF16, F32), [(0, 1), (0, 0)]),
        (X6, (F32, BF16), [(2, 0), (1, 0), (0, 0)]),
        (X9, (F32, np.dtype(jnp.float8_e4m3fn)), [(2, 0), (1, 0), (0, 0)]),
        (TF32, (np.dtype(jnp.float16), F32), [(0, 1), (0, 0)]),
        (X3, (np.dtype(jnp.float16), F32), [(0, 1), (1, 0), (0, 0)]),
    ],
)
def test_what_is_one_part_is_multiplied_as_such(preset, dtypes, pairs):
    assert numerics(preset, *dtypes).terms.pairs == tuple(pairs)
    a, b = normal(9, 60).astype(dtypes[0]), normal(60, 7).astype(dtypes[1])
    numbers = (((1,), (0,)), ((), ()))
    how = {"precision": preset, "implementation": "host", "preferred_element_type": F32}
    assert excess(jax_tcgemm.dot_general(a, b, numbers, **how), a, b, preset) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int8"])
def test_other_dtypes_are_multiplied_as_ever(dtype):
    with jax.enable_x64(dtype == "float64"):
        a, b = normal(9, 33, dtype=dtype), normal(33, 8, seed=1, dtype=dtype)
        got = product(a, b, X3, None)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, product(a, b, None, None))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_cpu_has_float32_itself(dtype, preset):
    a, b = operands("normal", 33, 20, 70, dtype)
    np.testing.assert_array_equal(product(a, b, preset, None), product(a, b, "highest", None))
    (call,) = jax_tcgemm.explain(
        lambda a, b: jax_tcgemm.matmul(a, b, precision=preset), a, b, platform="cpu"
    )
    assert call.problem.k == 70


# --- what runs ----------------------------------------------------------------------------------


def calls(f, *args, platform="cuda"):
    return list(jax_tcgemm.explain(f, *args, platform=platform))


@pytest.mark.parametrize(
    ("preset", "dtype", "longer", "types"),
    [
        (X3, F32, 3, ("bf16", "f32")),
        (X6, F32, 6, ("bf16", "f32")),
        (X9, F32, 9, ("bf16", "f32_promoted")),
        (TF32, F32, 3, ("f32", "tf32")),
        (X3, C64, 6, ("bf16", "f32")),
    ],
)
def test_one_product_of_a_longer_k(preset, dtype, longer, types):
    a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in [(128, 256), (256, 64)])
    (call,) = calls(lambda a, b: jax_tcgemm.matmul(a, b, precision=preset), a, b)
    problem = call.problem
    n = 128 if dtype == C64 else 64
    assert (problem.m, problem.n, problem.k) == (128, n, longer * 256)
    assert (problem.a.dtype, problem.compute) == types
    assert [copy.partition(" by ")[0] for copy in call.copies][:2] == [
        f"{name} split into terms of {'float32' if preset == TF32 else 'bfloat16'}"
        for name in ("lhs", "rhs")
    ]


@pytest.mark.parametrize("subscripts", ["ik,kj->ij", "ki,kj->ij", "ik,jk->ij", "ki,jk->ji"])
def test_parts_are_written_where_they_are_read(subscripts):
    """No order of two dimensions needs a transposition."""
    a = normal(*((40, 12) if subscripts.startswith("k") else (12, 40)))
    b = normal(*((40, 20) if ",k" in subscripts else (20, 40)), seed=1)
    f = functools.partial(tensor.einsum, subscripts, precision=X3, implementation="gemm")
    assert "stablehlo.transpose" not in jax.jit(f).lower(a, b).as_text()
    magnitude = np.einsum(subscripts, abs(widened(a)), abs(widened(b)))
    error = abs(widened(f(a, b)) - np.einsum(subscripts, widened(a), widened(b)))
    assert (error < LEFT_OUT[X3] * magnitude).all()


@pytest.mark.parametrize("has_terms", [False, True])
def test_symbolic_shapes_are_multiplied_in_float32(has_terms):
    """Which only XLA can, whose products of terms are not what their names say."""
    (m,) = jax.export.symbolic_shape("m")
    a, b = jax.ShapeDtypeStruct((m, 40), F32), normal(40, 5, seed=1)
    f = lambda a: jax_tcgemm.matmul(a, b, precision=X9 if has_terms else "highest")  # noqa: E731
    exported = jax.export.export(jax.jit(f))(a)
    x = normal(7, 40)
    assert excess(exported.call(x), x, b, X9) <= 1


def test_default_precision_of_a_program():
    a, b = operands("normal", 33, 20, 70)
    with jax.default_matmul_precision(X6):
        (call,) = calls(jax_tcgemm.matmul, a, b)
        assert call.problem.k == 6 * 72  # in rows of whole 16 bytes
        (call,) = calls(jax_tcgemm.matmul, a.astype(BF16), b.astype(BF16))
        assert call.problem.k == 70
        np.testing.assert_array_equal(
            jax_tcgemm.matmul(a, b, implementation="host"), product(a, b, X6)
        )


# --- every product ------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("bqhd,bkhd->bhqk", ((2, 16, 4, 8), (2, 20, 4, 8))),
        ("abc,cdb->da", ((5, 6, 7), (7, 8, 6))),
        ("ab,b->a", ((5, 60), (60,))),
        ("b,ab->a", ((60,), (5, 60))),
        ("a,b->ab", ((5,), (7,))),
        ("abk,k->ba", ((5, 6, 70), (70,))),
        ("bij,bjk->ikb", ((3, 5, 40), (3, 40, 6))),
    ],
)
@pytest.mark.parametrize("implementation", ["gemm", "xla"])
def test_contractions(subscripts, shapes, dtype, preset, implementation):
    a, b = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    how = {"precision": preset, "implementation": implementation}
    f = functools.partial(tensor.einsum, subscripts, **how)
    expected = np.einsum(subscripts, widened(a), widened(b))
    magnitude = np.einsum(subscripts, abs(widened(a)), abs(widened(b)))
    got = jax.jit(f)(a, b)
    assert got.dtype == dtype
    assert (abs(widened(got) - expected) <= (LEFT_OUT[preset] + ADDING) * magnitude).all()


def test_contraction_by_compute_type():
    a, b = (jax.ShapeDtypeStruct((128, 128), dtype) for dtype in (F32, F32))
    for compute_type, longer in (("3xtf32", 3), ("9xbf16", 9)):
        f = functools.partial(tensor.contract, "ab,bc->ac", compute_type=compute_type)
        (call,) = calls(lambda a, b, f=f: f(a, b), a, b)
        assert call.implementation == "gemm"
        assert f"split into terms of {'float32' if longer == 3 else 'bfloat16'}" in call.copies[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_derivatives_have_the_same_products(preset):
    a, b = operands("normal", 12, 20, 70)
    g = normal(12, 20, seed=7)
    _, vjp = jax.vjp(lambda a, b: product(a, b, preset), a, b)
    a_bar, b_bar = vjp(g)
    assert excess(a_bar, g, b.T, preset) <= 1
    assert excess(b_bar, a.T, g, preset) <= 1
    _, tangent = jax.jvp(lambda a: product(a, b, preset), (a,), (a,))
    assert excess(tangent, a, b, preset) <= 1


def test_derivatives_of_complex_numbers():
    a, b = operands("normal", 12, 20, 70, "complex64")
    g = normal(12, 20, seed=7, dtype="complex64")
    a_bar, b_bar = jax.vjp(lambda a, b: product(a, b, X6), a, b)[1](g)
    assert excess(a_bar, g, b.T, X6) <= 1
    assert excess(b_bar, a.T, g, X6) <= 1


def test_maps():
    a, b = normal(5, 12, 70), normal(70, 20, seed=1)
    got = jax.vmap(lambda a: product(a, b, X6))(a)
    for x, y in zip(a, got, strict=True):
        assert excess(y, x, b, X6) <= 1
    both = jax.vmap(lambda a, b: product(a, b, X6))(a, normal(5, 70, 6, seed=2))
    for x, w, y in zip(a, normal(5, 70, 6, seed=2), both, strict=True):
        assert excess(y, x, w, X6) <= 1


def test_layers():
    x, w, skip = normal(32, 300), normal(300, 40, seed=1), normal(32, 40, seed=2)
    bias = normal(40, seed=3)
    how = {"precision": X6, "implementation": "host"}
    y = jax_tcgemm.linear(x, w, bias, activation="relu", residual=skip, **how)
    z = widened(x) @ widened(w) + widened(bias)
    tolerance = 4 * ADDING * (exact(x, w)[1] + abs(widened(bias)) + abs(widened(skip)))
    assert (abs(widened(y) - (np.maximum(z, 0) + widened(skip))) <= tolerance).all()
    weights = normal(300, 2, 40, seed=4) / 16
    y = jax_tcgemm.gated_linear(x, weights, activation="relu", **how)
    gate, up = (widened(x) @ widened(weights[:, i]) for i in (0, 1))
    sizes = [exact(x, weights[:, i])[1] for i in (0, 1)]
    tolerance = 2 * ADDING * (sizes[0] * abs(up) + sizes[1] * abs(gate) + abs(gate * up))
    assert (abs(widened(y) - np.maximum(gate, 0) * up) <= tolerance).all()
    tanh = jax_tcgemm.matmul(x, w / 16, epilogue=jnp.tanh, **how)
    np.testing.assert_allclose(tanh, np.tanh(widened(x) @ widened(w / 16)), atol=2e-6)


def test_functions_of_two_products_of_parts():
    """The offset from gate to up counts the terms, too."""
    x, w = jax.ShapeDtypeStruct((128, 64), F32), jax.ShapeDtypeStruct((64, 2, 32), F32)
    how = {"precision": X3, "implementation": "wgmma", "epilogue": lambda g, u: jnp.tanh(g) * u}
    (call,) = calls(lambda x, w: jax_tcgemm.gated_linear(x, w, **how), x, w)
    assert (call.problem.n, call.problem.k) == (32, 3 * 64)
    assert call.problem.epilogue.up_offset == 32
    (call,) = calls(
        lambda x, *w: jax_tcgemm.gated_linear(x, w, **how), x, *[w.update(shape=(64, 32))] * 2
    )
    assert (call.problem.n, call.problem.k) == (32, 3 * 64)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("implementation", ["host", "xla"])
@pytest.mark.parametrize("gathered", [False, True])
def test_grouped_products(preset, implementation, gathered):
    x, w, g = normal(96, 64), normal(4, 64, 32, seed=1), normal(96, 32, seed=2)
    sizes = np.array([10, 0, 50, 30])
    indices = np.random.default_rng(5).integers(0, 96, 96)
    how = {"precision": preset, "implementation": implementation}
    if gathered:
        how["gather_indices"] = jnp.asarray(indices)
    f = functools.partial(jax_tcgemm.ragged_dot, group_sizes=jnp.asarray(sizes), **how)
    y, vjp = jax.vjp(jax.jit(lambda x, w: f(x, w)), x, w)
    x_bar, w_bar = vjp(g)
    rows = x[indices] if gathered else x
    tokens_bar = np.zeros((96, 64))
    for group, (first, last) in enumerate(
        zip(np.cumsum(sizes) - sizes, np.cumsum(sizes), strict=True)
    ):
        own = slice(int(first), int(last))
        if first == last:
            np.testing.assert_array_equal(w_bar[group], 0)
            continue
        assert excess(y[own], rows[own], w[group], preset) <= 1
        # Sums over rows, the products of each row's terms one after the other.
        assert excess(w_bar[group], rows[own].T, g[own], preset, 3 * ADDING) <= 1
        tokens_bar[own] = widened(g[own]) @ widened(w[group]).T
    np.testing.assert_array_equal(y[90:], 0)
    expected = np.zeros((96, 64))
    np.add.at(expected, indices if gathered else np.arange(96), tokens_bar)
    np.testing.assert_allclose(x_bar, expected, atol=50 * (LEFT_OUT[preset] + ADDING))


def test_accelerated_programs():
    """JAX's own products with a preset, and what follows them."""
    x, w = (jax.ShapeDtypeStruct(shape, F32) for shape in ((4096, 4096), (4096, 4096)))

    def f(x, w):
        return jnp.tanh(jnp.matmul(x, w, precision=X3)) @ w

    with jax.default_matmul_precision(X6):
        first, second = calls(jax_tcgemm.accelerate(f), x, w)
    assert (first.problem.k, second.problem.k) == (3 * 4096, 6 * 4096)
    assert first.problem.function is not None
    assert {first.implementation, second.implementation} == {"wgmma"}
    a, b = operands("normal", 24, 40, 40)
    np.testing.assert_allclose(jax_tcgemm.accelerate(f)(a, b), f(a, b), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec",
    [
        (P("x", None), P(None, "y"), P("x", "y")),
        (P(None, "x"), P("x", None), P()),
        (P(None, "x"), P("x", None), P("y")),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("implementation", ["gemm", "xla"])
def test_several_devices(implementation, dtype, spec, axis_type):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    a, b = operands("normal", 32, 16, 640, dtype)
    *given, out = spec
    how = {"out_sharding": out} if axis_type == AxisType.Explicit else {}
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((a, b), given, strict=True)
        ]
        name = {"gemm": "host"}.get(implementation, implementation)
        f = functools.partial(jax_tcgemm.matmul, precision=X6, implementation=name, **how)
        assert excess(jax.jit(f)(*placed), a, b, X6) <= 1
        how |= {"precision": X6, "implementation": implementation}
        f = functools.partial(tensor.einsum, "ik,kj->ij", **how)
        assert excess(jax.jit(f)(*placed), a, b, X6) <= 1


def test_programs_for_a_gpu_by_xla():
    """Where nothing of ours is there to run it, XLA multiplies the terms."""
    a, b = operands("normal", 33, 20, 700)
    device = selection.target_device("cuda")
    own = dense.Product(
        *(CallOptions("matmul", "xla"), (33, 700), F32, (700, 20), F32, (33, 20), F32),
        dimension_numbers=(((1,), (0,)), ((), ())),
        permutation=(0, 1),
        precision=canonical_precision("matmul", X6),
    )
    plan = dense_plan.make_plan(own, device)
    jaxpr = str(jax.make_jaxpr(lambda a, b: dense_call.dot_general(a, b, plan))(a, b))
    assert "bf16[33,6,700]" in jaxpr
    assert "bf16[6,700,20]" in jaxpr
    assert "BF16_BF16" not in jaxpr


@pytest.mark.parametrize("pair_first", [False, True])
def test_where_a_kernel_finds_gate_and_up(pair_first):
    """By the strides of the problem, in the operands as they are split."""
    m, k, n = 8, 40, 24
    x, w = normal(m, k), normal(*((2, k, n) if pair_first else (k, 2, n)), seed=1)
    contract = ((1,), (1 if pair_first else 0,))
    bare = dense.Product(
        *(CallOptions("matmul"), x.shape, F32, w.shape, F32, (m, 2, n), F32),
        dimension_numbers=(contract, ((), ())),
        permutation=(0, 1, 2),
        precision=canonical_precision("matmul", X6),
    )
    function = jax.make_jaxpr(lambda gate, up: gate * up)(*[jnp.zeros((m, n))] * 2)
    folded = epilogue.Product(bare, function, (), 1, 1).folded(ASSUMED_GPU)
    assert not isinstance(folded, str), folded
    fold, problem = folded.fold, folded.problem
    own = split_precision.split_by_xla(folded.numerics)
    a, b = (
        widened(prepare(y, bare, own, fold, is_rhs=is_rhs)).ravel()
        for is_rhs, y in enumerate((x, w))
    )
    rows, depth, columns = map(np.arange, (problem.m, problem.k, problem.n))
    a = a[rows[:, None] * problem.a.ld + depth]
    assert (problem.a.transposed, problem.b.transposed, problem.n) == (False, False, n)
    for i, offset in enumerate((0, problem.epilogue.up_offset)):
        own_b = b[offset + depth[:, None] * problem.b.ld + columns]
        matrix = w[i] if pair_first else w[:, i]
        assert excess(a @ own_b, x, matrix, X6) <= 1
