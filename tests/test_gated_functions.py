"""`gated_linear` with a function of both products, against the same function of JAX's products."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from written_functions import (
    ROUNDING,
    ROUNDING_OF_DERIVATIVES,
    assert_near,
    collectives,
    loss,
    mesh_of,
    moving,
    normal,
    params_of,
    wide,
)

import jax_tcgemm
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.fusion import epilogue
from jax_tcgemm.epilogues.shard_function import shard_function
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.selection.devices import ASSUMED_GPU

M, K, N = 12, 20, 16
KEY = jax.random.key(3)


# --- functions ----------------------------------------------------------------------------------


def clipped_swiglu(gate, up):
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def learned_swish(gate, up, slope):
    return gate * jax.nn.sigmoid(slope * gate) * up


def two_results(gate, up, residual):
    return jax.nn.gelu(gate) * up + residual, (up > gate, gate.astype(jnp.bfloat16))


def of_one_product(gate, up, bias):
    return jnp.tanh(up + bias)


def row_maxima(gate, up):
    y = jax.nn.silu(gate) * up
    return y, jnp.max(y, -1)


def dropout(gate, up, key):
    return jnp.where(jax.random.bernoulli(key, 0.75, gate.shape), gate * up / 0.75, 0)


OPERANDS = {
    clipped_swiglu: lambda dtype: (),
    learned_swish: lambda dtype: (normal(2, N, dtype=dtype),),
    two_results: lambda dtype: (normal(2, M, N, dtype=dtype),),
    of_one_product: lambda dtype: (normal(2, N, dtype=dtype),),
    row_maxima: lambda dtype: (),
    dropout: lambda dtype: (KEY,),
}
FUNCTIONS = pytest.mark.parametrize("function", OPERANDS, ids=lambda f: f.__name__)
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
WEIGHTS = pytest.mark.parametrize("is_pair", [False, True], ids=["array", "pair"])


def ours(function, *, is_pair=False, **how):
    """A function of x, gate, up and the operands."""

    def run(x, gate, up, *operands):
        weights = (gate, up) if is_pair else jnp.stack((gate, up), 1)
        return jax_tcgemm.gated_linear(
            x, weights, epilogue=function, epilogue_operands=operands, **how
        )

    return run


def theirs(function):
    def run(x, gate, up, *operands):
        products = (jnp.matmul(x, w, precision="highest") for w in (gate, up))
        return function(*products, *operands)

    return run


def arguments(function, dtype):
    weights = (normal(i, K, N, dtype=dtype) for i in (1, 5))
    return normal(0, M, K, dtype=dtype), *weights, *OPERANDS[function](dtype)


# --- values and derivatives ---------------------------------------------------------------------


@DTYPES
@FUNCTIONS
@WEIGHTS
def test_values(is_pair, function, dtype, x64):
    args = arguments(function, dtype)
    got = jax.jit(ours(function, is_pair=is_pair))(*args)
    assert_near(got, jax.jit(theirs(function))(*wide(args)), ROUNDING[dtype])
    if dtype == "float64":
        types = jax.eval_shape(theirs(function), *args)
        assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, types)


@DTYPES
@FUNCTIONS
@WEIGHTS
def test_first_derivatives(is_pair, function, dtype, x64):
    args = arguments(function, dtype)
    which = moving(args)
    got = jax.jit(jax.grad(loss(ours(function, is_pair=is_pair)), which))(*args)
    expected = jax.jit(jax.grad(loss(theirs(function)), which))(*wide(args))
    # A result in bfloat16 rounds its own cotangent.
    rounding = 2**-7 if function is two_results else ROUNDING_OF_DERIVATIVES[dtype]
    assert_near(wide(got), list(expected), rounding)


@FUNCTIONS
@WEIGHTS
def test_second_derivatives(is_pair, function, x64):
    if function is two_results:
        pytest.skip("its results have none in float64")
    args = arguments(function, "float64")
    which = moving(args)

    def slopes(f):
        grads = jax.grad(loss(f), which)
        return lambda *args: sum(jnp.sum(jnp.cos(g)) for g in grads(*args))

    own, other = slopes(ours(function, is_pair=is_pair)), slopes(theirs(function))
    assert_near(*(jax.jit(jax.grad(f, which))(*args) for f in (own, other)), 1e-11)


@WEIGHTS
def test_any_rank_and_integers(is_pair):
    gate, up = (normal(i, K, N) for i in (1, 5))
    for shape in ((K,), (2, 3, K), (0, K)):
        x = normal(0, *shape)
        got = ours(clipped_swiglu, is_pair=is_pair)(x, gate, up)
        assert_near(got, jax.jit(theirs(clipped_swiglu))(x, gate, up), 1e-6)
    integers = [normal(i, *shape) for i, shape in enumerate([(M, K), (K, N), (K, N)])]
    integers = [(np.asarray(x) * 20).astype(np.int8) for x in integers]
    got = ours(lambda gate, up: gate // 4 - up, is_pair=is_pair)(*integers)
    gate, up = (integers[0].astype(int) @ w.astype(int) for w in integers[1:])
    np.testing.assert_array_equal(got, gate // 4 - up)


# --- transformations ----------------------------------------------------------------------------

AXES = {
    "x": (0, None, None, None),
    "x by its columns": (2, None, None, None),
    "weights": (None, 1, 1, None),
    "gate": (None, 0, None, None),
    "up and x": (1, None, 2, None),
    "an operand": (None, None, None, 1),
    "all": (0, 1, 2, 0),
}


@pytest.mark.surface
@WEIGHTS
@pytest.mark.parametrize("in_axes", AXES.values(), ids=AXES.keys())
def test_vmap(in_axes, is_pair):
    shapes = [[M, K], [K, N], [K, N], [N]]
    for shape, axis in zip(shapes, in_axes, strict=True):
        if axis is not None:
            shape.insert(axis, 3)
    args = [normal(i, *shape, dtype="float32") for i, shape in enumerate(shapes)]

    def f(gate, up, scale):
        z = jnp.tanh(gate / 4) * up * scale
        return z, z.sum(0), up.max(-1)

    own, other = (jax.vmap(g, in_axes) for g in (ours(f, is_pair=is_pair), theirs(f)))
    assert_near(jax.jit(own)(*args), jax.jit(other)(*args), 4e-6)

    def grads(g):
        return jax.vmap(jax.grad(lambda *args: jnp.sin(g(*args)[0]).sum(), (0, 1, 2, 3)), in_axes)

    own, other = grads(ours(f, is_pair=is_pair)), grads(theirs(f))
    assert_near(jax.jit(own)(*args), jax.jit(other)(*args), 1e-5)


@pytest.mark.surface
def test_scan_remat_and_linear_transpose():
    x, gate, up, slope = normal(0, N, N), normal(1, N, N), normal(5, N, N), normal(2, 3, N)

    def run(product, wrap):
        layer = wrap(lambda x, slope: jnp.tanh(product(learned_swish)(x, gate, up, slope)))
        total = lambda x, slope: lax.scan(lambda x, s: (layer(x, s), ()), x, slope)[0].sum()  # noqa: E731
        return jax.jit(jax.grad(total, (0, 1)))(x, slope)

    saving = functools.partial(jax.checkpoint, policy=jax_tcgemm.checkpoint_policies.dots_saveable)
    for wrap in (jax.checkpoint, saving):
        assert_near(run(ours, wrap), run(theirs, lambda f: f), 1e-5)

    def transposed(product):
        f = product(lambda gate, up: 3 * gate - up)
        return jax.jit(jax.linear_transpose(lambda x: f(x, gate, up), x))(np.ones((N, N), "f4"))

    assert_near(transposed(ours), transposed(theirs), 1e-6)


@pytest.mark.surface
@WEIGHTS
def test_only_what_derivatives_need_is_kept(is_pair):
    x, gate, up, b = normal(0, M, K), normal(1, K, N), normal(5, K, N), normal(2, N)

    def num_results(f, which):
        g = jax.grad(lambda *args: ours(f, is_pair=is_pair)(*args).sum(), which)
        (call,) = params_of(g, x, gate, up, b)
        return len(call.outvars)

    assert num_results(lambda gate, up, b: 2 * gate + up + b, (0, 1, 2, 3)) == 1
    assert num_results(lambda gate, up, b: gate * b + jnp.sin(up), (3,)) == 2
    assert num_results(lambda gate, up, b: gate + jnp.sin(up) + b, (0, 1, 2)) == 2
    assert num_results(lambda gate, up, b: jnp.sin(gate) * up, (0,)) == 3


@pytest.mark.parametrize("which", [0, 1], ids=["x", "weights"])
def test_the_derivative_of_an_array_of_weights_is_one_product(which):
    x, weights = normal(0, M, K), normal(1, K, 2, N)

    def f(x, weights):
        return jax_tcgemm.gated_linear(x, weights, epilogue=clipped_swiglu).sum()

    jaxpr = jax.make_jaxpr(jax.grad(f, which))(x, weights)
    assert len([x for x in jaxpr.eqns if x.primitive.name == "tcgemm_dot_general"]) == 1


@pytest.mark.surface
def test_export_round_trip():
    args = arguments(learned_swish, "float32")
    checks = [jax.export.DisabledSafetyCheck.custom_call("tcgemm_gemm")]
    exported = jax.export.export(jax.jit(ours(learned_swish)), disabled_checks=checks)(*args)
    exported = jax.export.deserialize(exported.serialize())
    expected = jax.jit(theirs(learned_swish))(*args)
    assert_near(exported.call(*args), expected, 4e-6)
    (rows,) = jax.export.symbolic_shape("m")
    symbolic = jax.ShapeDtypeStruct((rows, K), jnp.float32), *args[1:]
    exported = jax.export.export(jax.jit(ours(learned_swish, is_pair=True)))(*symbolic)
    assert_near(exported.call(*args), expected, 4e-6)


# --- several devices ----------------------------------------------------------------------------

# How x, the weights' K and N, and a vector along columns are divided.
SPECS = {
    "m": (P("x"), (None, None), []),
    "n": (P(), (None, "x"), []),
    "m, n": (P("x"), (None, "y"), []),
    "k": (P(None, "x"), ("x", None), ["all-reduce"]),
    "m, n, k": (P("x", "z"), ("z", "y"), ["all-reduce"]),
}


def layer(gate, up, slope):
    return {"out": jnp.tanh(gate * slope) * up, "sign": (gate > up).astype(jnp.int8)}


def largest(gate, up, slope):
    return {"out": jnp.tanh(gate * slope) * up, "largest": up.max(-1)}


@pytest.mark.surface
@WEIGHTS
@pytest.mark.parametrize("function", [layer, largest], ids=["elementwise", "with row maxima"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("x_spec", "w_dims", "expected"), SPECS.values(), ids=SPECS.keys())
def test_divided_over_devices(x_spec, w_dims, expected, axis_type, function, is_pair):
    mesh, (k, n) = mesh_of(axis_type), w_dims
    x, slope = normal(0, 16, 24, dtype="float32"), normal(2, 32, dtype="float32")
    gate, up = (normal(i, 24, 32, dtype="float32") for i in (1, 5))
    weights = (gate, up) if is_pair else jnp.asarray(np.stack((gate, up), 1))
    how = {}
    if axis_type == AxisType.Explicit:
        how["out_sharding"] = NamedSharding(mesh, P(*[*x_spec, None][:1], n))

    def run(x, weights, slope):
        return jax_tcgemm.gated_linear(
            x, weights, epilogue=function, epilogue_operands=(slope,), **how
        )

    def reference(x, weights, slope):
        gate, up = weights if is_pair else (weights[:, 0], weights[:, 1])
        return theirs(function)(x, gate, up, slope)

    def grads(f):
        return jax.grad(lambda *args: jnp.sin(f(*args)["out"]).sum(), (0, 1, 2))

    w_spec = P(k, n) if is_pair else P(k, None, n)
    with jax.set_mesh(mesh):
        args = [
            jax.tree.map(lambda x, spec=spec: jax.device_put(x, NamedSharding(mesh, spec)), value)
            for value, spec in ((x, x_spec), (weights, w_spec), (slope, P(n)))
        ]
        text, found = collectives(run, *args)
        got, got_grads = jax.jit(run)(*args), jax.jit(grads(run))(*args)
    assert 'custom_call_target="tcgemm_gemm"' in text
    if function is layer:
        # Each product of a pair needs a collective sum, and XLA may merge the two.
        assert set(found) == set(expected)
    with jax.default_device(jax.devices("cpu")[0]):
        expected_result = jax.device_get(jax.jit(reference)(x, weights, slope))
        assert_near(jax.device_get(got), expected_result, 4e-6)
        expected_grads = jax.device_get(jax.jit(grads(reference))(x, weights, slope))
        assert_near(jax.device_get(got_grads), expected_grads, 1e-5)


def test_shard_functions_of_two_accumulators_return_shards_of_the_results():
    gate, up, bias = (normal(i, *shape) for i, shape in enumerate([(8, 12), (8, 12), (12,)]))
    of_shards = shard_function(jax.make_jaxpr(layer)(gate, up, bias), 2)
    assert not of_shards.whole
    rows, columns = slice(2, 4), slice(3, 9)
    slices = (np.asarray(x)[rows, columns] for x in (gate, up))
    got = of_shards(*slices, np.asarray(bias)[columns])
    expected = jax.tree.leaves(jax.jit(layer)(gate, up, bias))
    expected = [np.asarray(x)[rows, columns] for x in expected]
    assert_near(got, expected, 1e-6)
    # A dimension that one of the two is reduced along, or shifted, is whole.
    of_shards = shard_function(jax.make_jaxpr(lambda gate, up: gate + up.sum(0))(gate, up), 2)
    assert of_shards.whole == {0}


# --- the folded problem -------------------------------------------------------------------------


def folded(lhs_shape, rhs_shape, contracted, batch=(), num_rhs=1, pair=None, dtype="bfloat16"):
    """Of the plain function gate * up."""
    numbers = (contracted, (batch, batch))
    lhs, rhs = (jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs_shape, rhs_shape))
    out = jax.eval_shape(lambda x, y: lax.dot_general(x, y, numbers), lhs, rhs).shape
    shape = out if pair is None else (*out[:pair], *out[pair + 1 :])
    function = jax.make_jaxpr(jnp.multiply)(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2)
    product = dense.Product(
        options=CallOptions("gated_linear"),
        lhs_shape=lhs_shape,
        lhs_dtype=np.dtype(dtype),
        rhs_shape=rhs_shape,
        rhs_dtype=np.dtype(dtype),
        result_shape=out,
        result_dtype=np.dtype(np.float32),
        dimension_numbers=numbers,
        permutation=tuple(range(len(out))),
        precision=None,
    )
    return epilogue.Product(product, function, (), num_rhs, pair).folded(ASSUMED_GPU)


def test_both_matrices_are_read_where_they_are():
    found = folded((6, 4, K), (K, 2, N), ((2,), (0,)), pair=2)
    problem = found.problem
    assert (problem.m, problem.n, problem.k, problem.b.ld) == (24, N, K, 2 * N)
    assert problem.epilogue.gated
    assert problem.epilogue.up_offset == N
    assert (found.fold.num_copies, found.operands) == (0, ())
    problem = folded((M, K), (2, N, K), ((1,), (2,)), pair=1).problem
    assert (problem.b.transposed, problem.epilogue.up_offset) == (True, N * K)
    problem = folded((3, M, K), (3, K, N), ((2,), (1,)), (0,), num_rhs=2).problem
    assert problem.epilogue.gated
    assert (problem.batch, problem.n, problem.epilogue.up_offset) == (3, N, 0)
    assert "kIsGated = true" in problem.epilogue.function.definitions


def test_what_has_no_place_for_two_matrices():
    found = folded((M, K), (K, N, 2), ((1,), (0,)), pair=2)
    assert found == "gate and up are not the outermost columns of the result"


# --- explain and errors -------------------------------------------------------------------------


@WEIGHTS
def test_explain(is_pair):
    args = arguments(learned_swish, "float32")
    calls = jax_tcgemm.explain(ours(learned_swish, is_pair=is_pair), *args, platform="cpu")
    assert len(calls) == 1 + is_pair
    for call in calls:
        assert (call.problem.m, call.problem.n) == (M, N if is_pair else 2 * N)
        assert call.why.startswith("unfused: ")
        assert "; its product: " in call.why


def test_explain_says_how_explicit_axes_divide_it():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(0, 16, 24), NamedSharding(mesh, P("x")))
        weights = jax.device_put(normal(1, 24, 2, 32), NamedSharding(mesh, P(None, None, "y")))

        def explained(function):
            f = functools.partial(jax_tcgemm.gated_linear, epilogue=function)
            (call,) = jax_tcgemm.explain(f, x, weights, platform="cpu")
            return call

        call, other = explained(clipped_swiglu), explained(row_maxima)
    assert (call.problem.m, call.problem.n) == (8, 32)
    assert "divide a dimension that the function takes whole" in other.why


X, WEIGHT = jnp.ones((4, 5)), jnp.ones((5, 2, 6))
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
        {"epilogue": lambda gate, up, x: x, "epilogue_operands": (jnp.ones(4),)},
        (ValueError, r"epilogue_operands\[0\] must broadcast to the shape \(4, 6\), got"),
    ),
    "a result of another shape": (
        {"epilogue": lambda gate, up: gate.T},
        (ValueError, r"epilogue must return arrays of the shape \(4, 6\) or reduced .*of shape"),
    ),
    "three as one": (
        {"epilogue": lambda gate, up: jnp.stack((gate, up, gate))},
        (ValueError, r"epilogue must return arrays of the shape \(4, 6\) or reduced .*of shape"),
    ),
    "a sharding of more dimensions": (
        {"epilogue": jnp.add, "out_sharding": P(None, None, None)},
        (ValueError, "out_sharding must"),
    ),
}
BESIDE = {
    **{"bias": jnp.ones((2, 6)), "activation": "relu", "residual": jnp.ones((4, 6))},
    **{"donate_residual": True, "preferred_element_type": jnp.float32},
}


@WEIGHTS
@pytest.mark.parametrize(("how", "error"), ERRORS.values(), ids=ERRORS.keys())
def test_refuses(how, error, is_pair):
    kind, message = error
    weights = (WEIGHT[:, 0], WEIGHT[:, 1]) if is_pair else WEIGHT
    with pytest.raises(kind, match=f"^gated_linear: {message}.*; "):
        jax_tcgemm.gated_linear(X, weights, **how)


@pytest.mark.parametrize("name", BESIDE)
def test_refuses_what_an_epilogue_takes_the_place_of(name):
    message = f"^gated_linear: {name} must be .* beside an epilogue, got {name} of type .*; let the"
    with pytest.raises(ValueError, match=message):
        jax_tcgemm.gated_linear(X, WEIGHT, epilogue=jnp.add, **{name: BESIDE[name]})


def test_what_cannot_run_is_refused_by_name():
    f = functools.partial(jax_tcgemm.gated_linear, epilogue=jnp.add, implementation="wgmma")
    for attempt in (lambda: jax.jit(f).lower(X, WEIGHT), lambda: jax_tcgemm.explain(f, X, WEIGHT)):
        with pytest.raises(ValueError, match="^gated_linear: implementation must be able to"):
            attempt()
