"""What is taken from JAX beyond its documented interface: everything works, or does less, where a
name is gone. JAX is made to lack names in what is imported anew, since it needs them itself."""

import ast
import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import avals, interpreters, lowering, traces

PACKAGE = Path(jax_tcgemm.__file__).parent

# What a program sees that has it on its path as `lacking`.
LACKING = """
import importlib, types

real = importlib.import_module

def lacking(*names, folders=("jax.interpreters", "jax._src.interpreters")):
    '''import_module, as if these names were gone from the modules of these folders.'''
    def import_module(name, package=None):
        module = real(name, package)
        if name.rpartition(".")[0] not in folders:
            return module
        return types.SimpleNamespace(**{k: v for k, v in vars(module).items() if k not in names})
    return import_module
"""


def imported_without(monkeypatch, *names, **kwargs):
    """`jax_internals`, imported anew from a JAX that lacks these names."""
    scope = {}
    exec(LACKING, scope)
    package = jax_internals.__name__
    for name in [x for x in sys.modules if x == package or x.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(jax_tcgemm.system, "jax_internals", jax_internals)  # Restored afterwards.
    monkeypatch.setattr(importlib, "import_module", scope["lacking"](*names, **kwargs))
    return importlib.import_module(package)


def test_a_program_that_cannot_be_rewritten_runs_as_it_was(monkeypatch):
    """Of a JAX whose programs have no such parts."""

    def f(x):
        return jnp.sin(x @ x)

    monkeypatch.setattr("jax_tcgemm.passes.rewriting.with_equations", lambda *_: jnp.no_such_name)
    x = normal(4, 4)
    with pytest.warns(RuntimeWarning, match="accelerate: JAX's programs must be made as"):
        got = jax_tcgemm.accelerate(f)(x)
    np.testing.assert_allclose(got, f(x), rtol=1e-6)


def test_programs_are_taken_over_as_they_are(monkeypatch):
    """Each equation, and where it was written, is what it is where all of them are bound."""
    x, w = normal(6, 6), normal(6, 6, seed=1)

    def f(x, w):
        with jax.named_scope("inside"):
            y = jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, jax.nn.gelu(x @ w) + jnp.arange(6.0))
        return jax.lax.scan(lambda c, row: (c @ w + row, c.sum()), y, y)

    def program():
        with jax.named_scope("outside"):
            closed = jax.make_jaxpr(jax_tcgemm.accelerate(f))(x, w)
        assert all(__file__ in jax_internals.source_line(eqn) for eqn in closed.eqns)
        return [
            (
                eqn.primitive,
                [x.aval for x in (*eqn.invars, *eqn.outvars)],
                eqn.effects,
                eqn.ctx,
                str(eqn.source_info.name_stack),
                jax_internals.source_line(eqn),
            )
            for eqn in closed.eqns
        ]

    if jax.__version_info__ >= (0, 12):
        assert jax.jit(lambda: traces._writing_trace() is not None)()
    assert traces._writing_trace() is None
    written = program()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        jax.jit(jax_tcgemm.accelerate(f))(x, w),
        f(x, w),
    )
    monkeypatch.setattr(traces, "_writing_trace", lambda: None)
    assert program() == written


def test_equations_that_no_result_needs(monkeypatch):
    """They stay where JAX does not say how it removes them."""
    closed = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(x))[1])(1.0)
    fresh = imported_without(monkeypatch, "dce_jaxpr", "lower_jaxpr2")
    for module, expected in ((jax_internals, ["cos"]), (fresh, ["sin", "cos"])):
        assert [eqn.primitive.name for eqn in module.as_lowered(closed).eqns] == expected


def test_errors_of_shardings(monkeypatch):
    """They keep JAX's text, without the name of the function, where JAX does not say their type."""
    fresh = imported_without(monkeypatch, "ShardingTypeError", folders=("jax._src",))
    assert issubclass(jax_internals.ShardingTypeError, Exception)
    assert jax_internals.ShardingTypeError is not TypeError
    assert fresh.ShardingTypeError is TypeError


@pytest.mark.parametrize("is_known", [True, False])
def test_programs_are_lowered_where_jax_says_how(is_known, monkeypatch):
    """And traced once more where it does not."""
    if is_known:
        assert lowering._lowers_programs()
    monkeypatch.setattr(lowering, "_lowers_programs", lambda: is_known)
    x = normal(6, 6)

    def f(x):
        y = jax_tcgemm.matmul(x, x, epilogue=jnp.sin)
        return jax_tcgemm.matmul(y, y, epilogue=jnp.sin)

    y = jnp.sin(x @ x)
    # Twice of one key and the same types: the second one is not traced.
    np.testing.assert_allclose(jax.jit(f)(x), jnp.sin(y @ y), rtol=1e-4, atol=1e-5)


def test_variables_and_programs_of_ours():
    closed = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(1.0)
    jaxpr = jax_internals.as_jaxpr(closed)
    x = jaxpr.eqns[0].invars[0]
    other = jax_internals.new_variable(x)
    assert other is not x
    assert other != x
    assert other.aval == x.aval
    only = jax_internals.function_of([x], jaxpr.eqns[:1], jaxpr.eqns[0].outvars)
    np.testing.assert_allclose(core.jaxpr_as_fun(only)(1.0)[0], np.cos(1.0), rtol=1e-6)
    fewer = jax_internals.with_equations(closed, jaxpr.eqns[:1], jaxpr.eqns[0].outvars)
    np.testing.assert_allclose(core.jaxpr_as_fun(fewer)(1.0)[0], np.cos(1.0), rtol=1e-6)
    assert jax_internals.has_plain_context(jaxpr.eqns[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_sums_over_mesh_axes_are_known(check_vma):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": P("x"), "out_specs": P(), "check_vma": check_vma}
    f = jax.shard_map(lambda x: lax.psum(jnp.sin(x), "x"), mesh=mesh, **specs)
    (outer,) = jax.make_jaxpr(f)(jnp.ones(4)).eqns
    eqns = jax_internals.as_jaxpr(outer.params["jaxpr"]).eqns
    assert [jax_internals.summed_axes(eqn) for eqn in eqns] == [(), ("x",)]


def test_nothing_else_imports_what_is_not_public():
    allowed = (PACKAGE / "system" / "jax_internals").glob("*.py")
    for file in set(PACKAGE.rglob("*.py")) - set(allowed):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                assert not name.startswith(("jax._", "jax.interpreters", "jaxlib._")), (file, name)


NAMES = {
    "ad": ["Zero", "is_undefined_primal", "instantiate_zeros", "defbilinear"],
    "batching": ["fancy_primitive_batchers", "primitive_batchers"],
    "xla": ["apply_primitive"],
    "mlir": ["lower_fun", "register_lowering"],
}


def test_what_is_no_longer_exported_is_taken_from_where_it_is_defined(monkeypatch):
    names = [name for group in NAMES.values() for name in group if name != "apply_primitive"]
    fresh = imported_without(monkeypatch, *names, folders=("jax.interpreters",))
    for group, names in NAMES.items():
        if group != "xla":
            for name in names:
                own = getattr(jax_internals, group)
                assert getattr(getattr(fresh, group), name) is getattr(own, name)


def test_without_a_choice_among_platforms_a_rule_is_told_all(monkeypatch):
    fresh = imported_without(monkeypatch, "lower_per_platform")
    rule = fresh.by_platform(
        lambda ctx, *operands, platform, **params: (platform, operands, params)
    )
    context = types.SimpleNamespace(platforms=("cpu", "cuda"))
    assert rule(context, 1, op="f") == ("cpu/cuda", (1,), {"op": "f"})


# Each line needs one of them.
WITHOUT = [*NAMES["ad"], "fancy_primitive_batchers", "apply_primitive", "ShardingContext"]
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
importlib.import_module = lacking(*{names})
import jax_tcgemm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
importlib.import_module = real
from jax_tcgemm.system import jax_internals
for function in (jax_internals.ad.defbilinear, jax_internals.ad.is_undefined_primal,
                 jax_internals.ad.instantiate_zeros, jax_internals.xla.apply_primitive):
    assert function.__module__ == "jax_tcgemm.system.jax_internals.rules"

x, w = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(2))
c = w[0]

def check(ours, theirs, *operands):
    got, exact = ours(*operands), theirs(*operands)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, exact)

def each(ours, theirs, *operands):
    check(ours, theirs, *operands)
    check(jax.vmap(ours, (None, 0)), jax.vmap(theirs, (None, 0)), operands[0],
          jnp.stack([operands[1], 2 * operands[1]]))
    ours, theirs = (lambda *a, f=f: jnp.sum(jnp.sin(f(*a))) for f in (ours, theirs))
    check(jax.jit(jax.grad(ours, (0, 1))), jax.jit(jax.grad(theirs, (0, 1))), *operands)

each(jax_tcgemm.matmul, jnp.matmul, x, w)
each(lambda x, c: jax_tcgemm.linear(x, w, bias=c, activation="silu"),
     lambda x, c: jax.nn.silu(x @ w + c), x, c)
each(lambda x, w: jax_tcgemm.ragged_dot(x, w[None], jnp.array([8])), jnp.matmul, x, w)
each(lambda x, w: jax_tcgemm.tensor.einsum("ij,kj->ki", x, w), lambda x, w: w @ x.T, x, w)
each(lambda x, w: jax_tcgemm.blas.gemm(x, w), jnp.matmul, x, w)
for axis_type in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        on = [jax.device_put(a, NamedSharding(mesh, spec))
              for a, spec in ((x, P("a")), (w, P(None, "b")))]
        check(jax.jit(jax_tcgemm.matmul), lambda *_: x @ w, *on)
print("done")
"""


def test_everything_works_without_what_can_be_replaced(run_python):
    out = run_python(LACKING + PROGRAM.format(names=WITHOUT), TCGEMM_IMPLEMENTATION="host")
    assert out == "done\n"


def test_without_registries_of_rules_products_are_left(run_python):
    code = """
import jax, jax.numpy as jnp
registries = "primitive_jvps", "primitive_transposes", "primitive_batchers"
importlib.import_module = lacking(*registries, "fancy_primitive_batchers")
import jax_tcgemm
x = jnp.ones((4, 4))
f = lambda x: jax_tcgemm.tensor.einsum("ij,jk->ik", x, x).sum()
print(float(jax.jit(f)(x)))
for transformed, operand in ((jax.vmap(f), x[None]), (jax.grad(f), x)):
    try:
        transformed(operand)
    except NotImplementedError as error:
        print(error)
"""
    product, batching, differentiation = run_python(LACKING + code).splitlines()
    assert product == "64.0"
    assert "Batching rule for 'tcgemm_contract'" in batching
    assert "Differentiation rule for 'tcgemm_contract'" in differentiation


@pytest.mark.parametrize("name", NAMES["mlir"])
def test_without_a_way_to_lower_the_import_fails_by_name(name, monkeypatch):
    with pytest.raises(ImportError, match=rf"mlir\.{name}, got JAX .* install another version"):
        imported_without(monkeypatch, name)


# --- types, contexts and jaxprs -----------------------------------------------------------------


class Lacking:
    """An object of JAX's without some of its attributes."""

    def __init__(self, real, *names):
        self._real, self._names = real, names

    def __getattr__(self, name):
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._real, name)


A, B = normal(8, 6), normal(6, 4, seed=1)
NUMBERS = (((1,), (0,)), ((), ()))


def test_the_type_of_a_product(monkeypatch):
    params = {
        "dimension_numbers": NUMBERS,
        "precision": None,
        "preferred_element_type": np.dtype(np.float32),
        "out_sharding": None,
    }
    types_of = jax.typeof(A), jax.typeof(B)
    expected = jax_internals.product_type(*types_of, **params)
    assert expected.shape == (8, 4)
    monkeypatch.setattr(avals, "dot_general_p", Lacking(avals.dot_general_p, "abstract_eval"))
    with jax_tcgemm.patch():  # By JAX's own product, which would be ours here.
        assert jax_internals.product_type(*types_of, **params) == expected
        with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
            jax_internals.product_type(types_of[0], types_of[0], **params)


def test_weak_types(monkeypatch):
    def bind(x, **params):
        raise TypeError("sharding")

    aval = Lacking(jax.typeof(jnp.asarray(1.0)), "strip_weak_type")
    assert jax_internals.strong_type(aval) is aval
    for gone in (False, True):
        if gone:
            lacking = types.SimpleNamespace(bind=bind)
            monkeypatch.setattr(avals, "convert_element_type_p", lacking)
        got = jax_internals.converted(A, jnp.bfloat16, weak_type=True)
        assert (got.dtype, got.weak_type) == (jnp.bfloat16, not gone)
        np.testing.assert_array_equal(got, A.astype(jnp.bfloat16))


def test_types_like_another():
    aval = jax.typeof(A)
    for given in (aval, Lacking(aval, "update")):
        got = jax_internals.like(given, (3,), jnp.dtype("float16"), aval.sharding)
        assert (got.shape, got.dtype, got.weak_type) == ((3,), jnp.float16, False)


@pytest.mark.parametrize("gone", [(), ("manual_axis_type",)], ids=["there", "gone"])
def test_operands_that_vary_over_other_axes(gone, monkeypatch):
    """Without the attribute nothing is known of it, which `check_vma=False` does not ask for."""
    typeof = jax.typeof
    monkeypatch.setattr(jax, "typeof", lambda x: Lacking(typeof(x), *gone) if gone else typeof(x))
    found = []

    def f(a, b):
        found.append(jax_internals.varying_axes(a))
        return a @ b

    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")), A, B)
    assert found == [frozenset() if gone else {"x"}]


def test_the_tangent_of_what_does_not_move(monkeypatch):
    for gone in ((), ("to_tangent_aval",)):
        monkeypatch.setattr(jax, "typeof", _typeof_without(*gone))
        zero = jax_internals.zero_tangent(A)
        assert type(zero) is jax_internals.Zero
        assert zero.aval.shape == A.shape


def _typeof_without(*names, real=jax.typeof):
    return lambda x: Lacking(real(x), *names)


def test_partitions_of_a_spec():
    spec = P("x", None, unreduced={"y"})
    for given in (spec, Lacking(spec, "update")):
        assert jax_internals.with_partitions(given, [None, "x"]) == P(None, "x", unreduced={"y"})


STARTED = """
import sys, types
import jax
from jax_tcgemm.system import jax_internals

assert jax_internals.started_platform() == ""
jax.devices()
assert jax_internals.started_platform() == "cpu"
sys.modules["jax._src.xla_bridge"] = types.ModuleType("lacking")
assert jax_internals.started_platform() == ""
"""


def test_the_platform_that_has_started(run_python):
    run_python(STARTED)


def test_contexts_of_lowering_that_say_nothing():
    """Then it is a program for one device, by JAX's default platform, and as most are."""
    ctx = types.SimpleNamespace()
    assert jax_internals.platforms(ctx) == (jax.default_backend(),)
    assert jax_internals.num_automatic_devices(ctx) == 1
    assert not jax_internals.is_exported(ctx)
    assert not jax_internals.has_symbolic_dimensions(ctx)


def test_products_of_sharded_arrays_where_lowering_says_nothing(monkeypatch):
    """XLA then gathers the operands, and every device has the whole product."""
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    a = jax.device_put(A, NamedSharding(mesh, P("x")))
    f = functools.partial(jax_tcgemm.matmul, implementation="host")
    assert "CustomSPMDPartitioning" in jax.jit(f).lower(a, B).as_text()
    monkeypatch.setattr(jax_internals, "num_automatic_devices", lambda ctx: 1)
    jax.clear_caches()
    compiled = jax.jit(f).lower(a, B).compile()
    assert "all-gather" in compiled.as_text()
    np.testing.assert_allclose(compiled(a, B), np.matmul(A, B), rtol=1e-5, atol=1e-5)
    jax.clear_caches()


def test_jaxprs_closed_and_not():
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    assert jax_internals.as_jaxpr(closed) is jax_internals.as_jaxpr(closed.jaxpr)
    assert jax_internals.as_jaxpr(closed).eqns
    assert jax_internals.as_jaxpr("sin") is None


def test_where_a_product_was_written():
    (eqn,) = jax_internals.as_jaxpr(jax.make_jaxpr(lambda a, b: jax_tcgemm.matmul(a, b))(A, B)).eqns
    file, line = jax_internals.source_line(eqn).rsplit(":", 1)
    assert file == __file__
    assert "jax_tcgemm.matmul(a, b)" in Path(file).read_text("utf-8").splitlines()[int(line) - 1]
    for gone in ("traceback", "frames"):
        info = types.SimpleNamespace(traceback=types.SimpleNamespace(frames=[]))
        delattr(info if gone == "traceback" else info.traceback, gone)
        assert jax_internals.source_line(types.SimpleNamespace(source_info=info)) == ""


def test_without_a_choice_of_partitioners_it_is_shardy(monkeypatch):
    assert jax_internals.uses_shardy() == jax.config.jax_use_shardy_partitioner
    monkeypatch.setattr(jax, "config", Lacking(jax.config, "jax_use_shardy_partitioner"))
    assert jax_internals.uses_shardy()


def test_without_a_primitive_of_their_own_ragged_products_are_patched_as_others(monkeypatch):
    """As where JAX makes them of `dot_general`."""
    assert jax_internals.ragged_dot_general_p.name == "ragged_dot_general"
    monkeypatch.setattr(lax, "ragged_dot", lambda x, w, sizes: x @ w[0])
    fresh = imported_without(monkeypatch)
    assert fresh.ragged_dot_general_p is None


def test_without_a_primitive_of_its_own_scaled_matmul_is_not_rewritten(monkeypatch):
    assert jax_internals.scaled_matmul_p.name == "scaled_matmul_wrapper"
    monkeypatch.setattr(jax.nn, "scaled_matmul", lambda x, w, *scales: jnp.sin(x), raising=False)
    assert imported_without(monkeypatch).scaled_matmul_p is None
    monkeypatch.delattr(jax.nn, "scaled_matmul")
    assert imported_without(monkeypatch).scaled_matmul_p is None


# --- rules for JAX's other interpreters ---------------------------------------------------------


@pytest.fixture
def primitive():
    return core.Primitive("test")


@pytest.fixture
def waiting(monkeypatch):
    """A list of what waits, with nothing in it."""
    monkeypatch.setattr(interpreters, "_waiting", found := [])
    return found


def test_rules_wait_for_the_import(waiting, monkeypatch):
    found = []
    jax_internals.when_imported("test_module", lambda module: found.append(module.table))
    jax_internals.register_imported()
    assert not found
    module = types.ModuleType("test_module")
    monkeypatch.setitem(sys.modules, "test_module", module)
    jax_internals.register_imported()
    assert not found  # It is being imported still.
    module.table = "table"
    jax_internals.register_imported()
    jax_internals.register_imported()
    assert found == ["table"]
    assert not waiting


MODULES = (
    "jax._src.checkify",
    "jax.experimental.jet",
    "jax.experimental.sparse.transform",
    "jax.experimental.roofline",
)


def register_all(primitive):
    jax_internals.check_nans(primitive)
    jax_internals.register_jet(primitive, lambda *_, **__: None)
    jax_internals.register_sparse_product(primitive, lambda params: (params, ()))
    jax_internals.register_roofline(primitive, lambda *_, **__: 0)


def test_every_interpreter_has_the_place_where_rules_go(primitive, waiting):
    checkify, jet, sparse, _ = map(importlib.import_module, MODULES)
    register_all(primitive)
    assert not waiting
    tables = (
        checkify.error_checks,
        jet.jet_rules,
        sparse.sparse_rules_bcoo,
        sparse.sparse_rules_bcsr,
    )
    for table in tables:
        assert callable(table.pop(primitive))


def test_without_these_places_nothing_fails(primitive, waiting, monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    register_all(primitive)
    jax_internals.register_imported()
    assert len(waiting) == len(MODULES)
