"""`ragged_dot` and `gated_ragged_linear` with a function as their epilogue, against JAX's own."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference
from jax import lax
from jax.experimental import jet
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from written_functions import (
    ROUNDING,
    ROUNDING_OF_DERIVATIVES,
    assert_near,
    loss,
    mesh_of,
    moving,
    normal,
    params_of,
    wide,
)

import jax_tcgemm
from jax_tcgemm.kernels import nvrtc
from jax_tcgemm.system import modules

BF16 = jnp.bfloat16
M, K, N, G = 17, 6, 5, 4
KEY = jax.random.key(3)
# Of a group before those of the weights, none, and of one after them; then rows of no group.
SIZES, OFFSET = [2, 4, 0, 5, 3, 1], 1
INDICES = np.array([3, 0, 3, 9, 1, 1, 7, 99, -1, 2, 5, 3, 8, 8, 6, 4, 0])
NUM_ROWS = 10


# --- functions ----------------------------------------------------------------------------------


def bias_and_gelu(acc, bias):
    return jax.nn.gelu(acc + bias, approximate=False)


def every_kind(acc, scale, row, column, residual):
    return jnp.tanh(acc * scale + residual) * row + jnp.sin(column), (acc > residual)


def dropout(acc, key):
    return jnp.where(jax.random.bernoulli(key, 0.75, acc.shape), acc / 0.75, 0)


def softmax(acc, scale):
    """Not elementwise: XLA's."""
    return jax.nn.softmax(acc * scale, -1)


def learned_swish(gate, up, slope):
    return gate * jax.nn.sigmoid(slope * gate) * up


def of_one_product(gate, up, bias):
    return {"out": jnp.cosh(up / 4 + bias), "sign": gate > 0}


OPERANDS = {
    bias_and_gelu: lambda dtype: (normal(2, G, 1, N, dtype=dtype),),
    every_kind: lambda dtype: tuple(
        normal(i, *shape, dtype=dtype) for i, shape in enumerate([(G, 1, 1), (M, 1), (N,), (M, N)])
    ),
    dropout: lambda dtype: (KEY,),
    softmax: lambda dtype: (normal(2, G, 1, 1, dtype=dtype),),
    learned_swish: lambda dtype: (normal(2, G, 1, N, dtype=dtype),),
    of_one_product: lambda dtype: (normal(2, N, dtype=dtype),),
}
FUNCTIONS = pytest.mark.parametrize("function", OPERANDS, ids=lambda f: f.__name__)
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
GATHERED = pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [None, "host", "xla"])
GATED = (learned_swish, of_one_product)


def groups_of_rows(sizes=SIZES, offset=OFFSET, rows=M):
    found = np.full(rows, -1)
    for group, (begin, end) in enumerate(reference.bounds(sizes, rows, offset, G)):
        found[begin:end] = group
    return found


def ours(function, gathered=False, sizes=SIZES, **how):
    """A function of x, weights and the operands."""
    f = jax_tcgemm.gated_ragged_linear if function in GATED else jax_tcgemm.ragged_dot

    def run(x, weights, *operands):
        return f(
            x,
            weights,
            jnp.asarray(sizes),
            group_offset=OFFSET,
            gather_indices=INDICES if gathered else None,
            epilogue=function,
            epilogue_operands=operands,
            **how,
        )

    return run


def theirs(function, gathered=False, sizes=SIZES):
    """The same by the matrix of each row's group."""
    groups = groups_of_rows(sizes)
    inside, own = (groups >= 0)[:, None], np.maximum(groups, 0)

    def run(x, weights, *operands):
        if gathered:
            x = x.at[np.where(INDICES < 0, NUM_ROWS, INDICES)].get(mode="fill", fill_value=0)
        acc = jnp.einsum("mk,mk...n->m...n", x, weights[own], precision="highest")
        acc = jnp.where(inside if acc.ndim == 2 else inside[:, None], acc, 0)
        accs = (acc[:, 0], acc[:, 1]) if function in GATED else (acc,)
        given = [jnp.where(inside, x[own, 0], 0) if jnp.ndim(x) == 3 else x for x in operands]
        out = function(*accs, *given)
        return jax.tree.map(lambda y: jnp.where(inside, y, jnp.zeros_like(y)), out)

    return run


def arguments(function, dtype, gathered=False):
    halves = (2,) if function in GATED else ()
    x = normal(0, NUM_ROWS if gathered else M, K, dtype=dtype)
    return x, normal(1, G, K, *halves, N, dtype=dtype), *OPERANDS[function](dtype)


# --- values and derivatives ---------------------------------------------------------------------


@DTYPES
@FUNCTIONS
@GATHERED
def test_values(gathered, function, dtype, x64):
    args = arguments(function, dtype, gathered)
    got = jax.jit(ours(function, gathered))(*args)
    assert_near(got, jax.jit(theirs(function, gathered))(*wide(args)), ROUNDING[dtype])
    if dtype == "float64":
        types = jax.eval_shape(theirs(function), *arguments(function, dtype))
        assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, types)


@FUNCTIONS
@IMPLEMENTATIONS
def test_rows_of_no_group_are_zero(implementation, function):
    """Whatever the function makes of them."""

    def shifted(*args):
        return jax.tree.map(lambda y: y == y if y.dtype == bool else y + jnp.inf, function(*args))

    f = jax_tcgemm.gated_ragged_linear if function in GATED else jax_tcgemm.ragged_dot
    x, weights, *operands = arguments(function, "float32")
    how = {"epilogue": shifted, "group_offset": OFFSET, "implementation": implementation}
    run = jax.jit(functools.partial(f, **how))
    for sizes in (SIZES, [0] * 6, [3, 20, 1, 1, 1, 1]):
        got = run(x, weights, jnp.asarray(sizes), epilogue_operands=operands)
        outside = groups_of_rows(sizes) < 0
        for y in jax.tree.leaves(got):
            y = np.asarray(y)
            np.testing.assert_array_equal(y[outside], np.zeros_like(y[outside]))
            assert (y[~outside] != 0).all()


@DTYPES
@FUNCTIONS
@GATHERED
def test_first_derivatives(gathered, function, dtype, x64):
    args = arguments(function, dtype, gathered)
    which = moving(args)
    got = jax.jit(jax.grad(loss(ours(function, gathered)), which))(*args)
    expected = jax.jit(jax.grad(loss(theirs(function, gathered)), which))(*wide(args))
    assert_near(wide(got), list(expected), ROUNDING_OF_DERIVATIVES[dtype])


@FUNCTIONS
@GATHERED
def test_second_derivatives(gathered, function, x64):
    args = arguments(function, "float64", gathered)
    which = moving(args)

    def slopes(f):
        grads = jax.grad(loss(f), which)
        return lambda *args: sum(jnp.sum(jnp.cos(g)) for g in grads(*args))

    own, other = slopes(ours(function, gathered)), slopes(theirs(function, gathered))
    assert_near(*(jax.jit(jax.grad(f, which))(*args) for f in (own, other)), 1e-11)


@FUNCTIONS
def test_forward_mode(function, x64):
    args = arguments(function, "float64")
    which = moving(args)

    def slopes(f):
        def of(*own):
            values = dict(zip(which, own, strict=True))
            return loss(f)(*(values.get(i, x) for i, x in enumerate(args)))

        derivative = jax.jit(lambda *own: jax.jvp(of, own, tuple(jnp.cos(x) for x in own))[1])
        return derivative(*(args[i] for i in which))

    assert_near(slopes(ours(function)), slopes(theirs(function)), 1e-11)


def test_integers():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-9, 9, s), jnp.int8) for s in ((M, K), (G, K, N)))
    scale = np.arange(G, dtype=np.int32).reshape(G, 1, 1)
    f = ours(lambda acc, scale: acc * scale + 1)
    plain = jax.jit(theirs(lambda acc, scale: acc * scale + 1))
    expected = plain(np.asarray(x, np.int32), np.asarray(w, np.int32), scale)
    np.testing.assert_array_equal(f(x, w, scale), expected)


def test_the_gradient_of_an_operand_of_an_empty_group_is_zero():
    x, weights, bias = arguments(bias_and_gelu, "float32")
    got = jax.jit(jax.grad(lambda bias: ours(bias_and_gelu)(x, weights, bias).sum()))(bias)
    got = np.asarray(got)
    np.testing.assert_array_equal(got[1], 0)
    assert (got[[0, 2, 3]] != 0).all()


# --- transformations ----------------------------------------------------------------------------

AXES = {
    "x": (0, None, None, None, None),
    "weights": (None, 1, None, None, None),
    "sizes": (None, None, 0, None, None),
    "an operand by group": (None, None, None, 2, None),
    "an operand of each row": (None, None, None, None, 0),
    "operands alone": (None, None, None, 0, 1),
    "all": (0, 1, 0, 0, 1),
}


@pytest.mark.surface
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("in_axes", AXES.values(), ids=AXES.keys())
def test_vmap(in_axes, gated):
    halves = (2,) if gated else ()
    shapes = [[M, K], [G, K, *halves, N], [], [G, 1, N], [M, 1]]
    for shape, axis in zip(shapes, in_axes, strict=True):
        if axis is not None:
            shape.insert(axis, 3)
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]
    every = np.array([SIZES, [0, 9, 1, 1, 2, 0], [17, 0, 0, 0, 0, 0]])
    args[2] = jnp.asarray(every if in_axes[2] == 0 else every[0])

    def f(acc, *rest):
        *up, scale, row = rest
        return jnp.tanh(acc * scale) * (up[0] if up else 1) + row, acc > scale

    product = jax_tcgemm.gated_ragged_linear if gated else jax_tcgemm.ragged_dot

    def run(x, w, sizes, *operands):
        return product(x, w, sizes, group_offset=OFFSET, epilogue=f, epilogue_operands=operands)

    def grads(run):
        def of(x, w, sizes, *operands):
            def total(x, w, *operands):
                return jnp.sin(run(x, w, sizes, *operands)[0]).sum()

            return jax.grad(total, (0, 1, 2, 3))(x, w, *operands)

        return of

    for own in (run, grads(run)):
        got = jax.device_get(jax.jit(jax.vmap(own, in_axes))(*args))
        alone = jax.jit(own)
        for i in range(3):
            one = [
                x if axis is None else np.take(np.asarray(x), i, axis)
                for x, axis in zip(args, in_axes, strict=True)
            ]
            assert_near(jax.tree.map(lambda y, i=i: y[i], got), alone(*one), 1e-5)


@pytest.mark.surface
def test_vmap_twice():
    x, w, scale = normal(0, 2, 3, M, K), normal(1, 2, G, K, N), normal(2, 3, G, 1, 1)
    f = ours(lambda acc, scale: jnp.sin(acc * scale))
    got = np.asarray(jax.jit(jax.vmap(jax.vmap(f, (0, None, 0)), (0, 0, None)))(x, w, scale))
    (x, w, scale), alone = map(np.asarray, (x, w, scale)), jax.jit(f)
    for i, j in np.ndindex(2, 3):
        assert_near(got[i, j], alone(x[i, j], w[i], scale[j]), 1e-5)


@pytest.mark.surface
def test_scan_remat_and_linear_transpose():
    w, scale = normal(1, G, K, K), normal(2, 3, G, 1, K)

    def run(product, wrap):
        layer = wrap(lambda x, s: jnp.tanh(product(lambda acc, s: jnp.sin(acc) * s)(x, w, s)))
        total = lambda x, s: lax.scan(lambda x, s: (layer(x, s), ()), x, s)[0].sum()  # noqa: E731
        return jax.jit(jax.grad(total, (0, 1)))(normal(0, M, K), scale)

    saving = functools.partial(jax.checkpoint, policy=jax_tcgemm.checkpoint_policies.dots_saveable)
    for wrap in (jax.checkpoint, saving):
        assert_near(run(ours, wrap), run(theirs, lambda f: f), 1e-5)

    def transposed(product):
        f = product(lambda acc, s: 3 * acc * s)
        x, own = normal(0, M, K), np.asarray(scale)[0]
        return jax.jit(jax.linear_transpose(lambda x: f(x, w, own), x))(np.ones((M, K), "f4"))

    assert_near(transposed(ours), transposed(theirs), 1e-6)


@pytest.mark.surface
def test_taylor_series(x64):
    x, w, bias = arguments(bias_and_gelu, "float64")
    f = lambda acc, bias: jnp.sin(acc + bias)  # noqa: E731
    series = [[normal(i, M, K, dtype="float64") for i in (5, 6)]]
    own, other = (
        jax.jit(lambda x, g=g: jet.jet(lambda x: g(f)(x, w, bias), (x,), series))(x)
        for g in (ours, theirs)
    )
    assert_near(own, other, 1e-11)


@pytest.mark.surface
def test_only_what_derivatives_need_is_kept():
    x, w, b = normal(0, M, K), normal(1, G, K, N), normal(2, G, 1, N)

    def num_results(f, which):
        g = jax.grad(lambda *args: ours(f)(*args).sum(), which)
        (call,) = params_of(g, x, w, b)
        return len(call.outvars)

    assert num_results(lambda acc, b: 2 * acc + b, (0, 1, 2)) == 1
    assert num_results(lambda acc, b: jnp.sin(acc) * b, (0,)) == 2
    assert num_results(lambda acc, b: jnp.sin(acc) + b, (2,)) == 1


@pytest.mark.surface
def test_export_round_trip():
    args = arguments(every_kind, "float32")
    checks = [jax.export.DisabledSafetyCheck.custom_call("tcgemm_ragged")]
    exported = jax.export.export(jax.jit(ours(every_kind)), disabled_checks=checks)(*args)
    exported = jax.export.deserialize(exported.serialize())
    assert_near(exported.call(*args), jax.jit(theirs(every_kind))(*args), 4e-6)
    (rows,) = jax.export.symbolic_shape("m")
    args = arguments(bias_and_gelu, "float32")
    symbolic = jax.ShapeDtypeStruct((rows, K), jnp.float32), *args[1:]
    exported = jax.export.export(jax.jit(ours(bias_and_gelu)))(*symbolic)
    assert_near(exported.call(*args), jax.jit(theirs(bias_and_gelu))(*args), 4e-6)


# --- several devices ----------------------------------------------------------------------------

# How x and the weights' groups, K and N are divided; what is divided so along columns are operands.
SPECS = {
    "rows": (P("x"), P()),
    "columns": (P(), P(None, None, "x")),
    "groups": (P(), P("x")),
    "k": (P(None, "x"), P(None, "x")),
    "rows, groups, columns": (P("y"), P("x", None, "z")),
}
MANY = np.array([5, 0, 9, 3, 1, 8, 2, 2], np.int32)  # 30 of 32 rows


def layer(acc, bias, residual, scale):
    z = jnp.tanh(acc * scale + bias) + residual
    return {"out": z, "sign": acc > bias}


@pytest.mark.surface
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize(("lhs", "rhs"), SPECS.values(), ids=SPECS.keys())
def test_divided_over_devices(lhs, rhs, gathered, axis_type):
    x, w = normal(0, 32, 8), normal(1, 8, 8, 12)
    operands = normal(2, 8, 1, 12), normal(3, 32, 12), normal(4, 8, 1, 1)
    order = np.random.default_rng(3).permutation(32).astype(np.int32) if gathered else None
    mesh = mesh_of(axis_type)
    column = rhs[2] if len(rhs) > 2 else None
    specs = lhs, rhs, P(None, None, column), P(None, column), P()

    def run(x, w, *operands):
        return jax_tcgemm.ragged_dot(
            x, w, MANY, gather_indices=order, epilogue=layer, epilogue_operands=operands
        )

    def plain(x, w, bias, residual, scale):
        rows = np.asarray(x) if order is None else np.asarray(x)[order]
        groups = np.repeat(np.arange(9), [*MANY, 2])
        inside, own = (groups < 8)[:, None], np.minimum(groups, 7)
        acc = jnp.asarray(reference.rows(rows, w, MANY).astype(np.float32))
        bias, scale = (np.asarray(a)[own, 0] for a in (bias, scale))
        out = jax.device_get(jax.jit(layer)(acc, bias, residual, scale))
        return jax.tree.map(lambda y: np.where(inside, y, np.zeros_like(y)), out)

    def grads(x, w, *operands):
        return jax.grad(lambda *args: jnp.sin(run(*args)["out"]).sum(), (0, 1, 2, 3, 4))(
            x, w, *operands
        )

    args = x, w, *operands
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(v, NamedSharding(mesh, spec))
            for v, spec in zip(args, specs, strict=True)
        ]
        got = jax.device_get(jax.jit(run)(*placed))
        got_grads = jax.device_get(jax.jit(grads)(*placed))
    with jax.default_device(jax.devices("cpu")[0]):
        expected = plain(*args)
        # Of a value near the other an element's sign is anyone's.
        assert (got.pop("sign") != expected.pop("sign")).mean() < 0.01
        assert_near(got, expected, 1e-5)
        assert_near(got_grads, jax.device_get(jax.jit(grads)(*args)), 2e-5)


@pytest.mark.surface
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_gated_by_divided_groups_and_columns(axis_type):
    x, w, bias = normal(0, 32, 8), normal(1, 8, 8, 2, 12), normal(2, 8, 1, 12)
    mesh = mesh_of(axis_type)

    def run(x, w, bias):
        how = {"epilogue": learned_swish, "epilogue_operands": (bias,)}
        return jax_tcgemm.gated_ragged_linear(x, w, MANY, **how)

    grads = jax.grad(lambda *args: jnp.sin(run(*args)).sum(), (0, 1, 2))
    specs = P("y"), P("x", None, None, "z"), P("x", None, "z")
    with jax.set_mesh(mesh):
        pairs = zip((x, w, bias), specs, strict=True)
        placed = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in pairs]
        got = jax.device_get([jax.jit(f)(*placed) for f in (run, grads)])
    with jax.default_device(jax.devices("cpu")[0]):
        assert_near(got, jax.device_get([jax.jit(f)(x, w, bias) for f in (run, grads)]), 2e-5)


@pytest.mark.surface
def test_experts_of_each_device_in_shard_map():
    x, w, bias = normal(0, 32, 8), normal(1, 8, 8, 12), normal(2, 8, 1, 12)

    # Not by erfc, whose derivative JAX does not take in a shard_map.
    def bias_and_tanh(acc, bias):
        return jnp.tanh(acc + bias)

    def run(x, w, bias, offset=None):
        how = {"epilogue": bias_and_tanh, "epilogue_operands": (bias,), "group_offset": offset}
        return jax_tcgemm.ragged_dot(x, w, MANY, **how)

    def own(x, w, bias):
        return lax.psum(run(x, w, bias, lax.axis_index("x") * w.shape[0]), "x")

    specs = {"in_specs": (P(), P("x"), P("x")), "out_specs": P()}
    own = jax.shard_map(own, mesh=mesh_of(AxisType.Auto), **specs)

    def grads(f):
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1, 2)))

    assert_near(jax.jit(own)(x, w, bias), jax.jit(run)(x, w, bias), 1e-6)
    assert_near(*(grads(f)(x, w, bias) for f in (own, run)), 1e-5)


def test_rows_of_each_device_in_shard_map():
    """Beside sizes, weights and a bias of each expert that all devices share."""
    x, w, bias = normal(0, 16, 8), normal(1, 3, 8, 12), normal(2, 3, 12)
    run = functools.partial(jax_tcgemm.ragged_dot, activation="silu")
    sizes = jnp.array([1, 0, 2])
    f = lambda x, w, bias: run(x, w, sizes, bias=bias)  # noqa: E731
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    own = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    expected = jnp.concatenate([f(rows, w, bias) for rows in jnp.split(x, 4)])
    assert_near(jax.jit(own)(x, w, bias), expected, 1e-6)


# --- explain and errors -------------------------------------------------------------------------


@pytest.mark.parametrize("function", [every_kind, learned_swish], ids=lambda f: f.__name__)
def test_explain(function):
    args = arguments(function, "float32")
    (call,) = jax_tcgemm.explain(ours(function), *args, platform="cpu")
    assert (call.problem.m, call.problem.k) == (M, K)
    assert call.why.startswith("unfused: on the CPU XLA runs the function; its product: ")


NEEDS_KERNELS = pytest.mark.skipif(
    bool(modules.reason("cuda") or nvrtc.reason()), reason="it has no kernels, or no NVRTC"
)


@NEEDS_KERNELS
@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
def test_a_program_for_hopper_is_one_call_and_brings_its_kernel(gathered):
    # Where groups have few rows a config of narrow tiles runs, of which none gathers.
    rows = 256 if gathered else 64
    x, w, b = jnp.ones((rows, 64), BF16), jnp.ones((4, 64, 64), BF16), jnp.ones((4, 1, 64))
    indices = jnp.arange(rows) if gathered else None

    def f(x, w, b):
        how = {"epilogue": lambda acc, b: (acc + b).astype(BF16), "epilogue_operands": (b,)}
        return jax_tcgemm.ragged_dot(x, w, jnp.full(4, 16), gather_indices=indices, **how)

    (call,) = jax_tcgemm.explain(f, x, w, b, platform="cuda", source=True)
    config = "256x128x64_c1x2x1_co_t" if gathered else "128x64x64_c1x1x1_co_t"
    assert (call.implementation, call.config) == ("wgmma", config)
    assert f"struct {call.problem.function.name}" in call.code
    ((_, itemsize, strides),) = call.problem.function.reads
    assert (itemsize, strides.batch_inner, strides.n_stride, strides.m_inner) == (4, 64, 1, 0)
    text = jax.jit(f).trace(x, w, b).lower(lowering_platforms=("cuda",)).as_text()
    assert (text.count("@tcgemm_ragged("), text.count("@tcgemm_kernel(")) == (1, 1)


UNFUSED = {
    "not elementwise": (
        lambda acc: jnp.sort(acc, -1),
        r"sort\(float32\[16,8\]\).* must be element",
    ),
    "another row's group": (lambda acc, b: acc + b[::-1], "operand 0 .* no stride along the prod"),
}


@NEEDS_KERNELS
@pytest.mark.parametrize(("f", "why"), UNFUSED.values(), ids=UNFUSED.keys())
def test_explain_says_why_a_kernel_is_not_for_it(f, why):
    x, w, s = jnp.ones((16, 8), BF16), jnp.ones((4, 8, 8), BF16), jnp.full(4, 4)
    operands = (jnp.ones((4, 1, 8)),) * (f.__code__.co_argcount - 1)
    how = {"epilogue": f, "epilogue_operands": operands}
    product = functools.partial(jax_tcgemm.ragged_dot, **how)
    (call,) = jax_tcgemm.explain(product, x, w, s, platform="cuda")
    assert re.search(f"unfused: .*{why}.*; its product: ", call.why)
    forced = functools.partial(product, implementation="wgmma")
    with pytest.raises(ValueError, match=f"^ragged_dot: implementation must be able .*{why}"):
        jax_tcgemm.explain(forced, x, w, s, platform="cuda")


def test_explain_says_how_explicit_axes_divide_it():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(0, 32, 8), NamedSharding(mesh, P("x")))
        w = jax.device_put(normal(1, 8, 8, 12), NamedSharding(mesh, P("y", None, "z")))

        def explained(function):
            f = functools.partial(jax_tcgemm.ragged_dot, epilogue=function)
            (call,) = jax_tcgemm.explain(f, x, w, MANY, platform="cpu")
            return call

        call, other = explained(jnp.tanh), explained(lambda acc: acc - acc.max(-1, keepdims=True))
    assert (call.problem.m, call.problem.n, call.problem.groups) == (16, 6, 4)
    assert "divide a dimension that the function takes whole" in other.why


X, W, S = jnp.ones((4, 5)), jnp.ones((3, 5, 6)), jnp.array([1, 2, 1])
ERRORS = {
    "not a function": (
        {"epilogue": "tanh"},
        (TypeError, "epilogue must be a function of arrays or None, got epilogue of type str"),
    ),
    "operands alone": (
        {"epilogue_operands": (1.0,)},
        (ValueError, r"epilogue_operands must be \(\) without an epilogue, got 1 operands"),
    ),
    "an operand of another shape": (
        {"epilogue": lambda acc, x: acc, "epilogue_operands": (jnp.ones((3, 6)),)},
        (ValueError, r"epilogue_operands\[0\] must broadcast to the shape \(4, 6\), got"),
    ),
    "an operand of other groups": (
        {"epilogue": lambda acc, x: acc, "epilogue_operands": (jnp.ones((4, 1, 6)),)},
        (ValueError, r"epilogue_operands\[0\] must have shape \(3, 1, 6\) or \(3, 1, 1\), a row"),
    ),
    "an operand of rows of groups": (
        {"epilogue": lambda acc, x: acc, "epilogue_operands": (jnp.ones((3, 4, 6)),)},
        (ValueError, r"epilogue_operands\[0\] must have shape \(3, 1, 6\) or \(3, 1, 1\), a row"),
    ),
    "keys by group": (
        {
            "epilogue": lambda acc, x: acc,
            "epilogue_operands": (jax.random.split(KEY, 3).reshape(3, 1, 1),),
        },
        (TypeError, r"epilogue_operands\[0\] must have a numeric dtype if it has three"),
    ),
    "a result of another shape": (
        {"epilogue": lambda acc: acc.max(-1)},
        (ValueError, r"epilogue must return arrays of the shape \(4, 6\), got one of shape \(4,\)"),
    ),
    "a result of one row": (
        {"epilogue": lambda acc: (acc, acc[:1])},
        (ValueError, r"epilogue must return arrays of the shape \(4, 6\), got result 1 of shape"),
    ),
    "no result": ({"epilogue": lambda acc: ()}, (ValueError, "epilogue must return an array")),
    "an effect": (
        {"epilogue": lambda acc: jax.debug.print("{}", acc) or acc},
        (ValueError, "epilogue must have no effects"),
    ),
}


@pytest.mark.parametrize(("how", "error"), ERRORS.values(), ids=ERRORS.keys())
def test_refuses(how, error):
    kind, message = error
    with pytest.raises(kind, match=f"^ragged_dot: {message}.*; "):
        jax_tcgemm.ragged_dot(X, W, S, **how)


BESIDE = {**{"bias": jnp.ones((3, 6)), "activation": "relu", "preferred_element_type": jnp.float32}}


@pytest.mark.parametrize("op", [jax_tcgemm.ragged_dot, jax_tcgemm.gated_ragged_linear])
@pytest.mark.parametrize("name", BESIDE)
def test_refuses_what_an_epilogue_takes_the_place_of(name, op):
    message = (
        f"^{op.__name__}: {name} must be .* beside an epilogue, got {name} of type .*; let the"
    )
    with pytest.raises(ValueError, match=message):
        op(X, W, S, epilogue=jnp.add, **{name: BESIDE[name]})


def test_what_cannot_run_is_refused_by_name():
    f = functools.partial(jax_tcgemm.ragged_dot, epilogue=jnp.tanh, implementation="wgmma")
    for attempt in (
        lambda: jax.jit(f).lower(X, W, S),
        lambda: jax_tcgemm.explain(f, X, W, S, platform="cpu"),
    ):
        with pytest.raises(ValueError, match="^ragged_dot: implementation must be able to"):
            attempt()
