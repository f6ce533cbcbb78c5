"""Products of quantized arrays: values against float64, what runs them, derivatives, refusals."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import QuantizedArray, dequantize, quantize, tensor
from jax_tcgemm.problem.operands.quantized import ValueKind, value_kind

E4M3, E5M2, INT8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
M, N, K = 48, 40, 256
MN = (((1,), (1,)), ((), ()))


dequantized = jax.jit(dequantize)


def exact(x):
    return np.asarray(dequantized(x) if hasattr(x, "qvalue") else x).astype(np.float64)


def near(got, expected, tolerance=1e-5):
    """Float32 sums of a few hundred products that are exact, against float64."""
    np.testing.assert_allclose(exact(got), expected, rtol=0, atol=tolerance * abs(expected).max())


# How x, of shape (M, K), and w, of shape (N, K), are quantized.
SCALINGS = {
    "one for all": ({}, {}),
    "rows": ({"axis": -1}, {"axis": -1}),
    "rows and one": ({"axis": -1}, {}),
    "blocks of rows": ({"block": (16, K)}, {"block": (8, K)}),
    "DeepSeek's": ({"block": (1, 128)}, {"block": (128, 128)}),
    "blocks and one": ({"block": (1, 64)}, {}),
    "short blocks": ({"block": (1, 100)}, {"block": (32, 100)}),
    "along K": ({"axis": 0}, {"axis": -1}),
}
DTYPES = {
    "e4m3": (E4M3, E4M3),
    "e4m3 and e5m2": (E4M3, E5M2),
    "int8": (INT8, INT8),
    "int8 and e4m3": (INT8, E4M3),
}


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_values(scaling, dtypes):
    x, w = (
        quantize(normal(rows, K, seed=i), DTYPES[dtypes][i], **SCALINGS[scaling][i])
        for i, rows in enumerate((M, N))
    )
    expected = exact(x) @ exact(w).T
    out = jax.jit(lambda x, w: jax_tcgemm.dot_general(x, w, MN))(x, w)
    assert out.dtype == jnp.float32
    near(out, expected)
    near(jax_tcgemm.matmul(x, w.mT), expected)
    near(tensor.einsum("mk,nk->nm", x, w), expected.T)
    narrow = jax_tcgemm.dot_general(x, w, MN, preferred_element_type=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    near(narrow, expected, 2**-8)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8])
@pytest.mark.parametrize("how", [{}, {"axis": -1}, {"block": (128, 128)}], ids=str)
@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16"])
def test_one_operand_alone(dtype, how, wide):
    """Weights of 8 bits, beside which activations are wider."""
    x, w = normal(M, K, dtype=wide), quantize(normal(N, K, seed=1), dtype, **how)
    expected = exact(x) @ exact(w).T
    out = jax_tcgemm.dot_general(x, w, MN)
    assert out.dtype == jnp.float32
    near(out, expected)
    near(jax_tcgemm.matmul(w, x.T), expected.T)


def test_beside_plain_arrays_of_8_bits():
    x, w = quantize(normal(M, K), axis=-1), normal(N, K, seed=1).astype(E5M2)
    near(jax_tcgemm.dot_general(x, w, MN), exact(x) @ exact(w).T)
    blocks = quantize(normal(M, K), block=(1, 64))
    near(jax_tcgemm.dot_general(blocks, w, MN), exact(blocks) @ exact(w).T)


def test_result_dtypes_are_those_of_scales():
    x = quantize(normal(M, K))
    narrow = QuantizedArray(x.qvalue, x.scale.astype(jnp.bfloat16))
    assert jax_tcgemm.matmul(narrow, narrow.mT).dtype == jnp.bfloat16
    assert jax_tcgemm.matmul(narrow, x.mT).dtype == jnp.float32
    assert jax_tcgemm.matmul(narrow, normal(K, N, dtype="bfloat16")).dtype == jnp.bfloat16
    near(jax_tcgemm.matmul(narrow, narrow.mT), exact(narrow) @ exact(narrow).T, 2**-8)


def test_int8_sums_are_exact():
    """As integers, which no float32 sum of so many would be."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-127, 128, (4, 1 << 15)).astype(np.int8) for _ in range(2))
    a[0], b[0] = 127, 127
    out = jax_tcgemm.dot_general(
        *(QuantizedArray(jnp.asarray(x), jnp.ones((1, 1))) for x in (a, b)), MN
    )
    sums = a.astype(np.int64) @ b.astype(np.int64).T
    np.testing.assert_array_equal(out, sums.astype(np.float32))


# --- dimensions -----------------------------------------------------------------------------------

DIMENSIONS = {
    "batches": ((2, 3, 8, 64), (2, 3, 64, 5), (((3,), (2,)), ((0, 1), (0, 1)))),
    "batches in between": ((8, 2, 64), (64, 5, 2), (((2,), (0,)), ((1,), (2,)))),
    "several free": ((2, 8, 64), (64, 3, 5), (((2,), (0,)), ((), ()))),
    "several contracted": ((8, 4, 64), (4, 64, 5), (((1, 2), (0, 1)), ((), ()))),
    "none contracted": ((8,), (5,), (((), ()), ((), ()))),
}
AXES = {
    "one for all": lambda shape, contracted: {},
    "others": lambda shape, contracted: {"axis": contracted} if contracted else {},
    "blocks": lambda shape, contracted: {
        "block": tuple(32 if axis in contracted else 2 for axis in range(len(shape)))
    },
    "blocks along one": lambda shape, contracted: {
        "block": tuple(
            32 if axis == max(contracted, default=-1) else 1 for axis in range(len(shape))
        )
    },
}


def product(lhs, rhs, numbers):
    """`lax.dot_general` of NumPy's arrays."""
    contracted, batch = (list(zip(*pair, strict=True)) for pair in numbers)
    letters = iter("abcdefghijklmnop")
    own = [{}, {}]
    for i, j in (*batch, *contracted):
        own[0][i] = own[1][j] = next(letters)
    free = [
        [axis for axis in range(x.ndim) if axis not in own[n]] for n, x in enumerate((lhs, rhs))
    ]
    for names, axes in zip(own, free, strict=True):
        names.update((axis, next(letters)) for axis in axes)
    out = [own[0][i] for i, _ in batch]
    out += [names[axis] for names, axes in zip(own, free, strict=True) for axis in axes]
    operands = ["".join(names[axis] for axis in range(len(names))) for names in own]
    return np.einsum(f"{','.join(operands)}->{''.join(out)}", lhs, rhs)


@pytest.mark.parametrize("dimensions", DIMENSIONS)
@pytest.mark.parametrize("axes", AXES)
def test_dimensions(dimensions, axes):
    *shapes, numbers = DIMENSIONS[dimensions]
    lhs, rhs = (
        quantize(normal(*shape, seed=i), **AXES[axes](shape, numbers[0][i]))
        for i, shape in enumerate(shapes)
    )
    out = jax_tcgemm.dot_general(lhs, rhs, numbers)
    near(out, product(exact(lhs), exact(rhs), numbers))


def test_matmul_broadcasts():
    a, b = quantize(normal(3, 1, 8, 64), axis=-1), quantize(normal(5, 64, 7, seed=1), axis=-2)
    near(jax_tcgemm.matmul(a, b), exact(a) @ exact(b))
    a = quantize(normal(3, 1, 8, 64), block=(1, 32))
    near(jax_tcgemm.matmul(a, b), exact(a) @ exact(b))
    vector = quantize(normal(64))
    near(jax_tcgemm.matmul(vector, b), exact(vector) @ exact(b))
    near(jax_tcgemm.matmul(a, vector), exact(a) @ exact(vector))


def test_einsum_of_several():
    a, b = quantize(normal(6, 32), axis=-1), quantize(normal(32, 7, seed=1), axis=0)
    c = normal(7, 5, seed=2)
    near(tensor.einsum("ij,jk,kl->il", a, b, c), exact(a) @ exact(b) @ exact(c))
    # A sum over one alone, a diagonal, and a broadcast: of the dequantized array.
    near(tensor.einsum("ij,jk->k", a, b), (exact(a) @ exact(b)).sum(0))
    near(tensor.einsum("ij->j", a), exact(a).sum(0))
    square = quantize(normal(8, 8))
    near(tensor.einsum("ii,ij->j", square, square), np.diag(exact(square)) @ exact(square))
    near(tensor.einsum(a, [0, 1], b, [1, 2], [2, 0]), (exact(a) @ exact(b)).T)


# --- what follows -------------------------------------------------------------------------------

FOLLOWED = ["rows", "DeepSeek's", "along K"]


def operands(scaling, *shapes):
    return [
        quantize(normal(*shape, seed=i), **how)
        for i, (shape, how) in enumerate(zip(shapes, SCALINGS[scaling], strict=True))
    ]


@pytest.mark.parametrize("scaling", FOLLOWED)
def test_layers(scaling):
    x, w = operands(scaling, (M, K), (N, K))
    w, bias, residual = w.mT, normal(N, seed=2), normal(M, N, seed=3)
    z = 0.5 * exact(x) @ exact(w) + exact(bias)
    expected = z / (1 + np.exp(-z)) + exact(residual)
    how = {"activation": "silu", "residual": residual, "alpha": 0.5}
    near(jax_tcgemm.linear(x, w, bias, **how), expected)
    near(jax_tcgemm.matmul(x, w, bias=bias, **how), expected)
    half = jax_tcgemm.linear(x, w, bias, **how, preferred_element_type="bfloat16")
    assert half.dtype == jnp.bfloat16
    near(half, expected, 2**-8)
    near(jax_tcgemm.linear(x, w), exact(x) @ exact(w))


@pytest.mark.parametrize("scaling", FOLLOWED)
@pytest.mark.parametrize("is_pair", [False, True])
def test_gated_layers(scaling, is_pair):
    x, w = operands(scaling, (M, K), (2, N, K) if scaling == "rows" else (N, K))
    if is_pair or scaling != "rows":
        weights = [quantize(normal(N, K, seed=i), **SCALINGS[scaling][1]).mT for i in (1, 2)]
        gate, up = (exact(x) @ exact(w) for w in weights)
        if not is_pair:  # Scales of all but the new dimension.
            weights = jax.tree.map(lambda *both: jnp.stack(both, 1), *weights)
    else:
        weights = jax.tree.map(lambda w: w.transpose(2, 0, 1), w)
        gate, up = np.moveaxis(np.einsum("mk,kpn->mpn", exact(x), exact(weights)), 1, 0)
    bias, residual = normal(2, N, seed=4), normal(M, N, seed=5)
    z = gate + exact(bias)[0]
    expected = z / (1 + np.exp(-z)) * (up + exact(bias)[1]) + exact(residual)
    near(jax_tcgemm.gated_linear(x, weights, bias=bias, residual=residual), expected)
    got = jax_tcgemm.gated_linear(x, weights, epilogue=lambda gate, up: gate - 2 * up)
    near(got, gate - 2 * up)


@pytest.mark.parametrize("scaling", FOLLOWED)
def test_functions_are_given_scaled_products(scaling):
    x, w = operands(scaling, (M, K), (N, K))
    slope = normal(N, seed=3)

    def epilogue(acc, slope):
        assert acc.dtype == jnp.float32
        return jnp.tanh(acc * slope / 30), acc.max(-1)

    def f(x, w):
        return jax_tcgemm.dot_general(x, w, MN, epilogue=epilogue, epilogue_operands=(slope,))

    capped, largest = f(x, w)
    product = exact(x) @ exact(w).T
    near(capped, np.tanh(product * exact(slope) / 30))
    near(largest, product.max(-1))
    with pytest.raises(ValueError, match="^dot_general: epilogue must return arrays of the shape"):
        jax_tcgemm.dot_general(x, w, MN, epilogue=lambda acc: acc[:, :7])


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("how", ["one for all", "rows", "one alone", "blocks", "gathered"])
def test_grouped_products(dtype, how):
    tokens, sizes = 20, jnp.array([6, 0, 9])
    axis = {"one for all": (None, None)}.get(how, (-1, 1))
    x, w = normal(tokens, 64), normal(3, 64, 24, seed=1)
    if how == "blocks":
        x, w = quantize(x, dtype, block=(1, 32)), quantize(w, dtype, block=(32, 24))
    else:
        x = x if how == "one alone" else quantize(x, dtype, axis=axis[0])
        w = quantize(w, dtype, axis=axis[1])
    given, rows = {}, exact(x)
    if how == "gathered":
        # Of rows that there are none of, before the first or after the last, zeros are taken.
        given["gather_indices"] = jnp.arange(tokens)[::-1].at[jnp.array([2, 5])].set([-1, tokens])
        rows = rows[::-1].copy()
        rows[[2, 5]] = 0
    expected = ragged_reference.rows(rows, exact(w), sizes)
    near(jax_tcgemm.ragged_dot(x, w, sizes, **given), expected)
    bias = normal(3, 24, seed=3)
    out = jax_tcgemm.ragged_dot(x, w, sizes, bias=bias, activation="relu", **given)
    of_rows = np.repeat(exact(bias), sizes, 0)
    expected[:15] = np.maximum(expected[:15] + of_rows, 0)
    near(out, expected)
    function = {"epilogue": lambda acc, bias: jax.nn.relu(acc + bias)}
    function["epilogue_operands"] = (bias[:, None],)
    near(jax_tcgemm.ragged_dot(x, w, sizes, **function, **given), expected)


@pytest.mark.parametrize("block", [None, (32, 2, 24)])
def test_gated_grouped_products(block):
    x, sizes, bias = quantize(normal(20, 64), axis=-1), jnp.array([6, 0, 9]), normal(3, 2, 24)
    how = {"axis": 1} if block is None else {"block": block}
    w = quantize(normal(3, 64, 2, 24, seed=1), **how)
    gate, up = (ragged_reference.rows(exact(x), exact(w)[:, :, i], sizes) for i in (0, 1))
    of_rows = np.repeat(exact(bias), sizes, 0)
    gate[:15] += of_rows[:, 0]
    up[:15] += of_rows[:, 1]
    got = jax_tcgemm.gated_ragged_linear(x, w, sizes, "relu", bias=bias)
    near(got, np.maximum(gate, 0) * up)


# --- what runs them -------------------------------------------------------------------------------


def calls(f, *args, platform="cuda"):
    return list(jax_tcgemm.explain(f, *args, platform=platform))


def large(how, rows=4096, dtype=E4M3):
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
    return jax.eval_shape(lambda x: quantize(x, dtype, **how), x)


def layer(x, w):
    how = {"bias": jnp.ones(4096), "activation": "silu"}
    return jax_tcgemm.matmul(x, w.mT, **how, preferred_element_type="bfloat16")


@pytest.mark.parametrize("how", [{}, {"axis": -1}], ids=str)
def test_scales_are_an_epilogue_of_one_call(how):
    (call,) = calls(layer, large(how), large(how))
    assert call.implementation == "wgmma"
    assert call.problem.epilogue.function is not None
    assert call.problem.a.dtype == "f8e4m3fn"


def test_integers_are_multiplied_as_they_are():
    (call,) = calls(layer, large({"axis": -1}, dtype=INT8), large({"axis": -1}, dtype=INT8))
    assert call.implementation == "wgmma"
    assert (call.problem.a.dtype, call.problem.compute) == ("s8", "s32")


def test_weights_alone_are_converted_to_the_activations():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    (call,) = calls(lambda x, w: jax_tcgemm.matmul(x, w.mT), x, large({"axis": -1}))
    assert (call.implementation, call.problem.a.dtype) == ("wgmma", "bf16")


def test_dequantized_operands_are_xlas():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    f = lambda x, w: jax_tcgemm.matmul(x, w.mT)  # noqa: E731
    (call,) = calls(f, x, large({"block": (128, 128)}))
    assert call.implementation == "xla"
    assert call.why.startswith("no kernel takes operands that are quantized so")
    f = lambda x, w: jax_tcgemm.matmul(x, w.mT, implementation="wgmma")  # noqa: E731
    with pytest.raises(ValueError, match="^matmul: .*wgmma cannot run this: no kernel takes oper"):
        calls(f, x, large({"block": (128, 128)}))


def test_blocks_of_k_are_part_of_the_product():
    """Operands of it as they are, with all dimensions that they have."""
    x, w = quantize(normal(4, 8, 256), block=(1, 128)), quantize(normal(256, 384), block=(128, 128))
    near(jax_tcgemm.matmul(x, w), exact(x) @ exact(w))
    eqns = jax.make_jaxpr(jax_tcgemm.matmul)(x, w).eqns
    (scaled,) = [eqn for eqn in eqns if eqn.primitive.name == "tcgemm_epilogue_product"]
    shapes = [x.aval.shape for x in scaled.invars]
    assert shapes == [(4, 8, 256), (384, 256), (4, 8, 2), (3, 2)]
    assert scaled.params["encoding"].blocks == ((1, 128), (128, 128))
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, x, w, platform="cuda")
    assert call.implementation == "wgmma"


# --- derivatives --------------------------------------------------------------------------------


def test_derivatives_beside_quantized_weights():
    """Of activations, biases and scales: those of the dequantized product."""
    x, bias, g = normal(M, K), normal(N, seed=1), normal(M, N, seed=2)
    w = quantize(normal(N, K, seed=3), axis=-1)

    def f(x, bias, scale):
        weights = QuantizedArray(w.qvalue, scale).mT
        return jax_tcgemm.linear(x, weights, bias, activation="tanh")

    found = jax.vjp(f, x, bias, w.scale)[1](g)
    z = exact(x) @ exact(w).T + exact(bias)
    z_bar = exact(g) / np.cosh(z) ** 2
    near(found[0], z_bar @ exact(w), 1e-4)
    near(found[1], z_bar.sum(0), 1e-4)
    scale_bar = (z_bar * (exact(x) @ exact(w.qvalue).T)).sum(0)[:, None]
    near(found[2], scale_bar, 1e-4)


@pytest.mark.parametrize("how", [{"axis": -1}, {"block": (1, 32)}], ids=str)
def test_straight_through(how):
    x, w = normal(32, 64), normal(24, 64, seed=1)

    def f(x, w):
        return jax_tcgemm.dot_general(quantize(x, E5M2, **how), quantize(w, E5M2, **how), MN)

    g = 64 * normal(32, 24, seed=2)
    x_bar, w_bar = jax.vjp(f, x, w)[1](g)
    x8, w8 = quantize(x, E5M2, **how), quantize(w, E5M2, **how)
    # Cotangents of values have two bits of mantissa, and nothing below 2^-16.
    for got, expected, q in (
        (x_bar, exact(g) @ exact(w8), x8),
        (w_bar, exact(g).T @ exact(x8), w8),
    ):
        scale = np.repeat(exact(q.scale), 64 // q.scale.shape[1], 1)
        bound = np.maximum(2**-2.9 * abs(expected), 2**-16.9 / scale)
        assert (abs(exact(got) - expected) <= bound).all()


def test_mapped_and_compiled():
    x, w = quantize(normal(3, 8, 64), axis=-1), quantize(normal(5, 64, seed=1), block=(1, 32))
    f = lambda x: jax_tcgemm.dot_general(x, w, MN)  # noqa: E731
    expected = np.einsum("bmk,nk->bmn", exact(x), exact(w))
    near(jax.vmap(f)(x), expected)
    near(jax.jit(jax.vmap(f))(x), expected)
    _, scanned = jax.lax.scan(lambda _, x: (None, f(x)), None, x)
    near(scanned, expected)


def test_equal_calls_are_traced_once():
    """An eager call of the same function finds its trace, as without scales."""
    x, w = quantize(normal(M, K), axis=-1), quantize(normal(N, K, seed=1), axis=-1)
    traces = []

    def epilogue(acc):
        traces.append(1)
        return acc

    for _ in range(3):
        jax_tcgemm.dot_general(x, w, MN, epilogue=epilogue)
    first = len(traces)
    jax_tcgemm.dot_general(x, w, MN, epilogue=epilogue)
    assert len(traces) == first == 1


# --- other quantized arrays, and what is refused ------------------------------------------------


def test_anything_with_the_fields():
    q = quantize(normal(M, K), INT8, axis=-1)
    fields = {"qvalue": q.qvalue, "scale": q.scale, "zero_point": None, "qtype": "int8"}
    other = types.SimpleNamespace(**fields)
    near(jax_tcgemm.matmul(other, q.mT), exact(q) @ exact(q).T)
    arrays = types.SimpleNamespace(**fields | {"qvalue": np.asarray(q.qvalue)})
    near(jax_tcgemm.matmul(arrays, q.mT), exact(q) @ exact(q).T)


def test_zero_points_are_subtracted():
    values = np.random.default_rng(0).integers(-100, 100, (M, K)).astype(np.int8)
    zero = jnp.full((M, 1), 17, jnp.int8)
    q = QuantizedArray(jnp.asarray(values), jnp.full((M, 1), 0.5), zero)
    expected = (values.astype(np.float64) - 17) * 0.5
    w = quantize(normal(N, K), INT8)
    near(jax_tcgemm.dot_general(q, w, MN), expected @ exact(w).T)
    near(jax_tcgemm.linear(q, w.mT, activation="relu"), np.maximum(expected @ exact(w).T, 0))
    four = QuantizedArray(jnp.asarray(values % 8).astype(jnp.int4), jnp.full((M, 2), 0.5))
    near(jax_tcgemm.dot_general(four, w, MN), 0.5 * (values % 8) @ exact(w).T)


KINDS = {
    ValueKind.INTEGER: ("int8", "uint4", "int2", "int3", "int7", jnp.int4, np.dtype(np.int8)),
    ValueKind.FLOAT: ("float8_e4m3fn", "bfloat16", "mxfp8", "mxfp4", "nvfp4", E5M2, np.dtype(E4M3)),
    ValueKind.NF4: ("nf4",),
}


def test_kinds_of_values():
    for kind, qtypes in KINDS.items():
        for qtype in qtypes:
            assert value_kind("test", "x", qtype, INT8) is kind
    assert value_kind("test", "x", None, INT8) is ValueKind.INTEGER
    assert value_kind("test", "x", None, E4M3) is ValueKind.FLOAT


def test_values_of_another_kind_than_the_qtype():
    """Floats may stand for integers or be looked up already; integers stand only for integers."""
    whole, real = quantize(normal(M, K), INT8), quantize(normal(M, K))
    for kind, qtypes in KINDS.items():
        for qtype in qtypes:
            x = QuantizedArray(real.qvalue, real.scale, None, qtype)
            np.testing.assert_array_equal(dequantize(x), dequantize(real))
            x = QuantizedArray(whole.qvalue, whole.scale, None, qtype)
            if kind is ValueKind.INTEGER:
                np.testing.assert_array_equal(dequantize(x), dequantize(whole))
                continue
            says = "matmul: a must have real numbers as its qvalue, got a.qvalue.dtype=int8 and "
            with pytest.raises(TypeError, match=f"^{says}a.qtype=.*; dequantize it first"):
                jax.eval_shape(jax_tcgemm.matmul, x, whole.mT)


def test_unknown_qtypes():
    q = quantize(normal(M, K), INT8)
    # Beginnings of known names, text that NumPy parses, and dtypes without real numbers.
    for qtype in ("int17", "nf3", "integer", "NF4", "", "i4,i4", ",,", "bool", complex, 7):
        x = QuantizedArray(q.qvalue, q.scale, None, qtype)
        says = "matmul: a.qtype must be an integer or floating-point dtype, or int2, .*, nf4, got "
        with pytest.raises(TypeError, match=f"^{says}a.qtype=.*; set it to the dtype"):
            jax.eval_shape(jax_tcgemm.matmul, x, q.mT)


Q = quantize(normal(4, 4))
REFUSED = {
    "integers": (
        lambda: jax_tcgemm.matmul(Q, Q, preferred_element_type=jnp.int32),
        TypeError,
        "matmul: preferred_element_type must be None or a real floating-point dtype",
    ),
    "complex operands": (
        lambda: jax_tcgemm.dot_general(Q, jnp.ones((4, 4), complex), MN),
        TypeError,
        "dot_general: operands beside quantized ones must have a real dtype",
    ),
    "a bias": (
        lambda: jax_tcgemm.linear(Q, Q, jnp.ones(5)),
        ValueError,
        r"linear: bias must broadcast to the shape \(4, 4\)",
    ),
    "a donated residual": (
        lambda: jax_tcgemm.linear(Q, Q, residual=jnp.ones((4, 4)), donate_residual=True),
        ValueError,
        "linear: donate_residual must be False for quantized operands",
    ),
    "scales": (
        lambda: jax_tcgemm.matmul(QuantizedArray(Q.qvalue, jnp.ones((3, 1))), Q),
        ValueError,
        "matmul: a.scale must have as many dimensions",
    ),
    "cuTENSOR": (
        lambda: tensor.einsum("ij,jk->ik", Q, Q, implementation="cutensor"),
        ValueError,
        "tensor.einsum: implementation must be gemm, xla or None for quantized operands",
    ),
    "gradients of a block of layers": (
        lambda: jax_tcgemm.mlp(
            jnp.ones((4, 4)), {"up": Q, "down": jnp.ones((4, 4))}, accumulate={"down": jnp.ones(4)}
        ),
        ValueError,
        "mlp: accumulate must be None beside quantized operands",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named(name):
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=f"^{message}.*, got .*; "):
        call()


def test_residuals_of_8_bits():
    """Which JAX promotes to no other dtype."""
    x, w, residual = quantize(normal(M, K)), quantize(normal(K, N)), normal(M, N).astype(E4M3)
    out = jax_tcgemm.linear(x, w, residual=residual)
    near(out, exact(x) @ exact(w) + exact(residual))
