"""Packed weights of experts: grouped products with them against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packed_cases import Case, dequantize
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import PackedWeight, pack_weights, stack_packed
from jax_tcgemm.primitives.encodings.packed import MOST_ROWS

BF16 = jnp.bfloat16
# Rows that fill up their columns, and more rows than sizes say.
EVEN = Case(29, 48, 128, 32, sizes=(7, 0, 12, 1))
ZEROS = Case(40, 40, 192, 64, "uint4", zeros=True, scale="f16", x="f16", sizes=(3, 30, 0, 40))
BYTES = Case(16, 72, 256, 128, "int8", scale="f32", sizes=(0, 5, 0))
TABLE = Case(20, 33, 128, 64, "nf4", scale="f32", sizes=(0, 20))
COLUMNS = Case(12, 20, 72, None, "int4", zeros=True, scale="f32", sizes=(12,))
FLOAT8 = Case(90, 48, 256, 64, zeros=True, x="f8e4m3fn", sizes=(0, 70, 8))
CASES = [EVEN, ZEROS, BYTES, TABLE, COLUMNS, FLOAT8]


def exact(x):
    return np.asarray(x).astype(np.float64)


def sizes_of(case):
    return jnp.asarray(case.groups[0])


def check(got, expected, magnitude, factor=1.0):
    """Weights and the result are rounded once each, to bfloat16; rows of no group are zero."""
    bound = factor * (2.0**-9 * magnitude + 2.0**-8 * abs(expected) + 1e-6 * (magnitude > 0))
    error = abs(exact(got) - expected)
    assert (error <= bound).all(), error.max()


def rows_of_groups(case):
    """The group of each row; -1 of none."""
    ends = np.minimum(np.cumsum(case.sizes), case.m)
    rows = np.searchsorted(ends, np.arange(case.m), side="right")
    return np.where(rows < len(case.sizes), rows, -1)


# --- the format ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_what_went_in_comes_out(case):
    q, scale, zero_point, _ = case._drawn
    w = case.weight
    assert w.shape == (len(case.sizes), case.k, case.n)
    unpacked = jax.jit(PackedWeight.unpack)(w)
    np.testing.assert_array_equal(exact(unpacked.q), q)
    np.testing.assert_array_equal(exact(unpacked.scale), exact(scale))
    if zero_point is not None:
        np.testing.assert_array_equal(exact(unpacked.zero_point), zero_point)
    values = case.exact_weight
    if case.qtype == "nf4":
        return
    np.testing.assert_allclose(exact(dequantize(w, dtype=jnp.float32)), values, rtol=2e-7)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_experts_are_weights_one_by_one(case):
    """Their bytes are those of each packed for itself, which `stack_packed` puts together."""
    q, scale, zero_point, _ = case._drawn
    pack = functools.partial(pack_weights, group_size=case.group, dtype=case.qtype)
    zeros = [None] * len(q) if zero_point is None else map(jnp.asarray, zero_point)
    ones = [pack(*x) for x in zip(map(jnp.asarray, q), map(jnp.asarray, scale), zeros, strict=True)]
    stacked = stack_packed(ones)
    assert stacked.format == case.weight.format == ones[0].format
    for ours, theirs in zip(jax.tree.leaves(case.weight), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("stacked", [(), (3,)])
def test_gate_and_up_are_one_weight(stacked):
    """Along the dimension after k, with the bytes of a weight that was packed as a pair."""
    rng = np.random.default_rng(len(stacked))
    q = jnp.asarray(rng.integers(-8, 8, (*stacked, 64, 2, 32)), jnp.int8)
    scale = jnp.asarray(rng.uniform(0.5, 2, (*stacked, 2, 2, 32)), jnp.float32)
    zeros = jnp.asarray(rng.integers(-8, 8, (*stacked, 2, 2, 32)))
    pack = functools.partial(pack_weights, group_size=32, dtype="int4")
    ones = [pack(*(x[..., i, :] for x in (q, scale, zeros))) for i in range(2)]
    both, expected = stack_packed(ones, axis=1 + len(stacked)), pack(q, scale, zeros)
    assert both.shape == expected.shape == (*stacked, 64, 2, 32)
    for ours, theirs in zip(jax.tree.leaves(both), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_pairs_are_no_experts():
    """Scales tell (k, 2, n), of one gated weight, from (2, k, n), of two."""
    pack = functools.partial(pack_weights, group_size=32, dtype="int4")
    assert pack(jnp.zeros((64, 2, 16), jnp.int8), jnp.ones((2, 2, 16))).shape == (64, 2, 16)
    one = pack(jnp.zeros((64, 2, 16), jnp.int8), jnp.ones((2, 2, 16)))
    two = pack(jnp.zeros((2, 64, 16), jnp.int8), jnp.ones((2, 2, 16)))
    assert (one.values.ndim, two.values.ndim, two.shape) == (3, 4, (2, 64, 16))
    single = pack(jnp.zeros((1, 64, 16), jnp.int8), jnp.ones((1, 2, 16)))
    assert (single.values.ndim, single.shape) == (4, (1, 64, 16))


# --- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_ragged_dot(case):
    x, sizes = case.lhs, sizes_of(case)
    y = jax.jit(jax_tcgemm.ragged_dot)(x, case.weight, sizes)
    assert (y.dtype, y.shape) == (x.dtype, (case.m, case.n))
    check(y, *case.exact, factor=1.5)
    wide = jax_tcgemm.ragged_dot(x, case.weight, sizes, preferred_element_type="float32")
    assert wide.dtype == jnp.float32
    check(wide, *case.exact, factor=1.5)


def test_many_rows_of_few_groups():
    """The weights become arrays."""
    case = Case(600, 48, 128, 32, sizes=(340, 200))
    y = jax.jit(jax_tcgemm.ragged_dot)(jnp.asarray(case.x_array), case.weight, sizes_of(case))
    check(y, *case.exact)


def test_no_rows():
    x = jnp.zeros((0, EVEN.k), BF16)
    y = jax.jit(jax_tcgemm.ragged_dot)(x, EVEN.weight, sizes_of(EVEN))
    assert y.shape == (0, EVEN.n)
    (call,) = jax_tcgemm.explain(
        jax_tcgemm.ragged_dot, x, EVEN.weight, sizes_of(EVEN), platform="cuda"
    )
    assert call.problem.m == 0


def test_controls_fail():
    """The weight of the next group, and rows of no group by the last one, are found."""
    x, sizes = jnp.asarray(EVEN.x_array), sizes_of(EVEN)
    for w, own in (
        (jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), EVEN.weight), sizes),
        (EVEN.weight, sizes.at[-1].add(9)),
    ):
        with pytest.raises(AssertionError):
            check(jax_tcgemm.ragged_dot(x, w, own), *EVEN.exact)


@pytest.mark.parametrize("rows", [29, 300])
def test_some_of_the_groups(rows):
    case = dataclasses.replace(EVEN, m=rows, sizes=(7, 0, 12, 1, 6), offset=2, experts=2)
    sizes, offset = map(jnp.asarray, case.groups)
    x = jnp.asarray(case.x_array)
    y = jax_tcgemm.ragged_dot(x, case.weight, sizes, group_offset=offset)
    check(y, *case.exact)


def test_gathered():
    indices = np.random.default_rng(0).integers(-2, 32, EVEN.m)
    x = normal(29, EVEN.k).astype(BF16)
    taken = np.where(((indices >= 0) & (indices < 29))[:, None], exact(x)[indices % 29], 0)
    y = jax_tcgemm.ragged_dot(x, EVEN.weight, sizes_of(EVEN), gather_indices=jnp.asarray(indices))
    own, w = rows_of_groups(EVEN), EVEN.exact_weight
    expected = np.where((own >= 0)[:, None], np.einsum("mk,mkn->mn", taken, w[own]), 0)
    magnitude = np.where((own >= 0)[:, None], np.einsum("mk,mkn->mn", abs(taken), abs(w[own])), 0)
    check(y, expected, magnitude)
    # Rows of 8 bits are taken with their scales.
    x8 = jax_tcgemm.quantize(normal(29, EVEN.k), block=(1, EVEN.k))
    values = exact(x8.qvalue) * exact(x8.scale)
    y = jax_tcgemm.ragged_dot(x8, EVEN.weight, sizes_of(EVEN), gather_indices=jnp.asarray(indices))
    taken = np.where(((indices >= 0) & (indices < 29))[:, None], values[indices % 29], 0)
    expected = np.where((own >= 0)[:, None], np.einsum("mk,mkn->mn", taken, w[own]), 0)
    check(y, expected, magnitude, factor=1.5)


def test_bias_activation_and_functions():
    x, sizes = jnp.asarray(EVEN.x_array), sizes_of(EVEN)
    bias, scale = normal(4, 48, seed=1), normal(4, 1, 1, seed=2)
    own = rows_of_groups(EVEN)
    product, magnitude = EVEN.exact
    is_there = (own >= 0)[:, None]
    y = jax_tcgemm.ragged_dot(x, EVEN.weight, sizes, bias=bias, activation="sigmoid")
    expected = np.where(is_there, 1 / (1 + np.exp(-(product + exact(bias)[own]))), 0)
    check(y, expected, magnitude)
    y = jax_tcgemm.ragged_dot(x, EVEN.weight, sizes, activation="relu")
    check(y, np.maximum(product, 0), magnitude)
    y = jax_tcgemm.ragged_dot(x, EVEN.weight, sizes, activation="sigmoid")
    check(y, np.where(is_there, 1 / (1 + np.exp(-product)), 0), magnitude)
    y = jax_tcgemm.ragged_dot(
        x,
        EVEN.weight,
        sizes,
        epilogue=lambda acc, scale: (acc * scale, acc + 1),
        epilogue_operands=(scale,),
    )
    factor = exact(scale)[own, 0]
    check(y[0], product * factor, magnitude * abs(factor))
    check(y[1], np.where(is_there, product + 1, 0), np.where(is_there, magnitude + 1, 0))


def gated_experts(seed=0):
    rng = np.random.default_rng(seed)
    q = rng.integers(-8, 8, (3, 128, 2, 40))
    scale = rng.uniform(0.01, 0.05, (3, 2, 2, 40)).astype(np.float32)
    w = pack_weights(jnp.asarray(q), jnp.asarray(scale), group_size=64, dtype="int4")
    return w, q * scale.astype(np.float64).repeat(64, 1)


@pytest.mark.parametrize("rows", [20, 300])
def test_gated(rows):
    w, values = gated_experts()
    assert w.shape == (3, 128, 2, 40)
    x, bias = normal(rows, 128).astype(BF16), normal(3, 2, 40, seed=1)
    sizes = np.array([rows // 2, 0, rows // 4])
    y = jax.jit(jax_tcgemm.gated_ragged_linear)(x, w, jnp.asarray(sizes), bias=bias)
    assert (y.dtype, y.shape) == (BF16, (rows, 40))
    own = np.append(np.arange(3), -1).repeat(np.append(sizes, rows - sizes.sum()))
    gate, up = (np.einsum("mk,mkn->mn", exact(x), values[own][:, :, i]) for i in (0, 1))
    gate, up = (z + exact(bias)[own, i] for i, z in enumerate((gate, up)))
    expected = np.where((own >= 0)[:, None], gate / (1 + np.exp(-gate)) * up, 0)
    np.testing.assert_allclose(exact(y), expected, rtol=2e-2, atol=2e-2)
    y = jax_tcgemm.gated_ragged_linear(x, w, jnp.asarray(sizes), "sigmoid")
    without = [z - exact(bias)[own, i] for i, z in enumerate((gate, up))]
    expected = np.where((own >= 0)[:, None], without[1] / (1 + np.exp(-without[0])), 0)
    np.testing.assert_allclose(exact(y), expected, rtol=2e-2, atol=2e-2)
    both = jax_tcgemm.gated_ragged_linear(
        x, w, jnp.asarray(sizes), epilogue=lambda gate, up: jnp.maximum(gate, up)
    )
    expected = np.where((own >= 0)[:, None], np.maximum(*without), 0)
    magnitude = np.einsum("mk,mkn->mn", abs(exact(x)), abs(values[own]).max(2))
    check(both, expected, np.where((own >= 0)[:, None], magnitude, 0))


def test_other_dtypes():
    """The weights become arrays of the dtype of x."""
    x = normal(EVEN.m, EVEN.k)
    y = jax_tcgemm.ragged_dot(x, EVEN.weight, sizes_of(EVEN), precision="highest")
    assert y.dtype == jnp.float32
    own = rows_of_groups(EVEN)
    expected = np.einsum("mk,mkn->mn", exact(x), EVEN.exact_weight[own])
    expected = np.where((own >= 0)[:, None], expected, 0)
    np.testing.assert_allclose(exact(y), expected, rtol=1e-4, atol=1e-3)


# --- transformations ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [29, 300])
def test_derivatives(rows):
    """With respect to x; there are none of the weights."""
    case = dataclasses.replace(EVEN, m=rows)
    x, sizes = jnp.asarray(case.x_array), sizes_of(case)
    weights = normal(rows, case.n, seed=3)

    def loss(x, w):
        return jnp.sum(jax_tcgemm.ragged_dot(x, w, sizes).astype(jnp.float32) * weights)

    x_bar, w_bar = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(x, case.weight)
    assert x_bar.dtype == BF16
    own, w, g = rows_of_groups(case), case.exact_weight, exact(weights.astype(BF16))
    is_there = (own >= 0)[:, None]
    expected = np.where(is_there, np.einsum("mn,mkn->mk", g, w[own]), 0)
    magnitude = np.where(is_there, np.einsum("mn,mkn->mk", abs(g), abs(w[own])), 0)
    check(x_bar, expected, magnitude)
    assert all(leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(w_bar))
    _, y_dot = jax.jvp(lambda x: jax_tcgemm.ragged_dot(x, case.weight, sizes), (x,), (2 * x,))
    check(y_dot, *(2 * z for z in case.exact))


def test_mapped():
    """Rows, sizes and weights, one after the other."""
    x, sizes = jnp.asarray(EVEN.x_array), sizes_of(EVEN)
    xs, some = jnp.stack([x, 2 * x]), jnp.stack([sizes, sizes])
    ws = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), EVEN.weight)
    product, magnitude = EVEN.exact
    f = jax_tcgemm.ragged_dot
    for ys in (
        jax.vmap(f, (0, None, None))(xs, EVEN.weight, sizes),
        jax.vmap(f, (0, None, 0))(xs, EVEN.weight, some),
        jax.vmap(f)(xs, ws, some),
    ):
        check(ys[0], product, magnitude)
        check(ys[1], 2 * product, 2 * magnitude)


@pytest.mark.parametrize(("rows", "dtype"), [(32, "bf16"), (320, "bf16"), (320, "f8e4m3fn")])
@pytest.mark.parametrize("spec", [P(None, "j"), P("i"), P("i", "j")])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_several_devices(axis_type, spec, rows, dtype):
    """Groups and columns are divided, and rows where groups are not."""
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(axis_type,) * 2)
    case = Case(rows, 64, 128, 64, "int4", zeros=True, x=dtype, sizes=(7, 0, rows // 2, 1))
    w = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), case.weight)
    rows_spec = P("i") if spec[0] is None else P()
    x = jax.device_put(case.lhs, NamedSharding(mesh, rows_spec))
    sizes = sizes_of(case)
    with jax.set_mesh(mesh):
        y = jax.jit(jax_tcgemm.ragged_dot)(x, w, sizes)
    check(y, *case.exact, factor=1.5)
    if case.has_row_scales:
        return
    with jax.set_mesh(mesh):
        x_bar = jax.jit(
            jax.grad(lambda x: jax_tcgemm.ragged_dot(x, w, sizes).sum(dtype=jnp.float32))
        )(x)
    own = rows_of_groups(case)
    is_there = (own >= 0)[:, None]
    magnitude = np.where(is_there, abs(case.exact_weight).sum(2)[own], 0)
    check(x_bar, np.where(is_there, case.exact_weight.sum(2)[own], 0), magnitude)


# --- what runs ----------------------------------------------------------------------------------


def test_what_runs():
    """Few rows of a group on a GPU: the kernel; many: a plain product; on a CPU arrays."""
    few, many = (
        jax.ShapeDtypeStruct((rows, EVEN.k), BF16) for rows in (4 * MOST_ROWS, 4 * MOST_ROWS + 1)
    )
    f = functools.partial(jax_tcgemm.ragged_dot, rhs=EVEN.weight, group_sizes=sizes_of(EVEN))
    (call,) = jax_tcgemm.explain(f, few, platform="cuda")
    assert (call.implementation, call.problem.form) == ("packed", "grouped")
    assert (call.problem.experts, call.problem.num_sizes) == (4, 4)
    weight, call = jax_tcgemm.explain(f, many, platform="cuda")
    assert (weight.implementation, weight.problem.form) == ("packed", "weight")
    assert weight.problem.n == 4 * EVEN.n
    assert (call.problem.kind, call.problem.b_transposed) == ("ragged", True)
    weight, call = jax_tcgemm.explain(f, few, platform="cpu")
    assert (weight.implementation, call.problem.kind) == ("xla", "ragged")
    for found in (weight, call):
        assert found.why.startswith("the weight is dequantized: ")
    forced = functools.partial(f, implementation="packed", config="128x2_c2")
    (call,) = jax_tcgemm.explain(forced, many, platform="cuda")
    assert (call.implementation, call.config) == ("packed", "128x2_c2")


def test_lowered_for_a_gpu():
    x = jax.ShapeDtypeStruct((EVEN.m, EVEN.k), BF16)
    f = jax.jit(lambda x, sizes: jax_tcgemm.ragged_dot(x, EVEN.weight, sizes))
    traced = f.trace(x, jax.ShapeDtypeStruct((4,), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert 'form = "grouped"' in text
    assert "experts = 4" in text
    assert "tcgemm::packed::kernel<" in text


def test_exported():
    x = jnp.asarray(EVEN.x_array)
    f = jax.jit(lambda x, sizes: jax_tcgemm.ragged_dot(x, EVEN.weight, sizes))
    calls = [jax.export.DisabledSafetyCheck.custom_call("tcgemm_ragged")]
    exported = jax.export.export(f, disabled_checks=calls)(x, sizes_of(EVEN))
    again = jax.export.deserialize(exported.serialize())
    check(again.call(x, sizes_of(EVEN)), *EVEN.exact)


# --- refusals -----------------------------------------------------------------------------------

Q, SCALE = jnp.zeros((3, 64, 32), jnp.int8), jnp.ones((3, 2, 32))
ONE = pack_weights(Q[0], SCALE[0], group_size=32, dtype="int4")
EXPERTS = pack_weights(Q, SCALE, group_size=32, dtype="int4")
X, SIZES = jnp.ones((4, 64), BF16), jnp.array([1, 2, 1])
ODD = pack_weights(jnp.zeros((64, 40), jnp.int8), jnp.ones((2, 40)), group_size=32, dtype="int4")
ACT_ORDER = pack_weights(Q[0], SCALE[0], group_size=32, dtype="int4", g_idx=jnp.arange(64) % 2)


def test_groups_in_any_order_become_arrays():
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), ACT_ORDER)
    y = jax_tcgemm.ragged_dot(X, stacked, SIZES)
    np.testing.assert_array_equal(np.asarray(y), 0)
    with pytest.raises(ValueError, match="^ragged_dot: implementation must be able to run"):
        jax_tcgemm.ragged_dot(X, stacked, SIZES, implementation="packed")


REFUSALS = {
    "one weight": (
        lambda: jax_tcgemm.ragged_dot(X, ONE, SIZES),
        r"^ragged_dot: rhs must have a weight for each group, got rhs.shape=\(64, 32\) of ",
    ),
    "weights stacked twice": (
        lambda: jax_tcgemm.ragged_dot(
            X, jax.tree.map(lambda leaf: jnp.stack([leaf]), EXPERTS), SIZES
        ),
        r"^ragged_dot: rhs must be one for each group, got rhs.shape=\(1, 3, 64, 32\)",
    ),
    "experts of a layer": (
        lambda: jax_tcgemm.linear(X, EXPERTS),
        "^linear: w must be one weight, got w.shape=",
    ),
    "too few sizes": (
        lambda: jax_tcgemm.ragged_dot(X, EXPERTS, SIZES[:2]),
        r"^ragged_dot: group_sizes must have shape \(3,\)",
    ),
    "x of another length": (
        lambda: jax_tcgemm.ragged_dot(X[:, 1:], EXPERTS, SIZES),
        r"^ragged_dot: rhs must have shape \(g, k, n\), got",
    ),
    "no pairs": (
        lambda: jax_tcgemm.gated_ragged_linear(X, EXPERTS, SIZES),
        r"^gated_ragged_linear: weights must have shape \(g, k, 2, n\)",
    ),
    "x of integers": (
        lambda: jax_tcgemm.ragged_dot(X.astype(jnp.int8), EXPERTS, SIZES),
        "^ragged_dot: what is multiplied by a packed weight must be .*, got int8; convert",
    ),
    "a weight on the left": (
        lambda: jax_tcgemm.ragged_dot(EXPERTS, X, SIZES),
        "^ragged_dot: lhs must be an array",
    ),
    "another implementation": (
        lambda: jax_tcgemm.ragged_dot(X, EXPERTS, SIZES, implementation="wgmma"),
        "^ragged_dot: implementation must be one of packed, xla, got implementation='wgmma'",
    ),
    "a GPU's here": (
        lambda: jax_tcgemm.ragged_dot(X, EXPERTS, SIZES, implementation="packed"),
        "^ragged_dot: implementation must be able to run the product, got .* it runs on cuda",
    ),
    "bits of a row": (
        lambda: jax_tcgemm.ragged_dot(X, EXPERTS, SIZES, batch_invariant=True),
        "^ragged_dot: batch_invariant must be False with a packed weight",
    ),
    "scales of other experts": (
        lambda: pack_weights(Q, SCALE[:, :1], group_size=32, dtype="int4"),
        r"^pack_weights: scale must have one for .*, \(3, 2, 32\), got scale.shape=\(3, 1, 32\)",
    ),
    "groups of experts in any order": (
        lambda: pack_weights(
            Q, SCALE, group_size=32, dtype="int4", g_idx=jnp.arange(64, dtype=jnp.int32) // 32
        ),
        r"^pack_weights: g_idx must be None for the weights of experts, got g_idx.shape=\(64,\)",
    ),
    "nothing to stack": (
        lambda: stack_packed([]),
        r"^stack_packed: weights must have one at least, got weights=\[\]; leave it out",
    ),
    "a weight alone": (
        lambda: stack_packed(ONE),
        "^stack_packed: weights must be a list or tuple of PackedWeights, got weights of type",
    ),
    "weights of several formats": (
        lambda: stack_packed([ONE, pack_weights(Q[0], SCALE[0], group_size=32, dtype="int8")]),
        r"^stack_packed: weights must have one format, got weights\[1\] of ",
    ),
    "another axis": (
        lambda: stack_packed([ONE, ONE], axis=2),
        r"^stack_packed: axis must be 0 or 1, the dimension after k, got axis=2",
    ),
    "columns that fill no tile": (
        lambda: stack_packed([ODD, ODD], axis=1),
        r"^stack_packed: columns must be a multiple of 16 along axis=1, got weights of 40",
    ),
    "weights of several orders": (
        lambda: stack_packed([ONE, ACT_ORDER]),
        r"^stack_packed: weights must have groups of neighbors, got weights\[1\] packed with",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name):
    call, says = REFUSALS[name]
    with pytest.raises((ValueError, TypeError), match=says):
        call()
