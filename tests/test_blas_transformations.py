"""BLAS calls under grad, vmap, jit, shard_map, donation and export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_arrays
from jax import export
from jax.sharding import PartitionSpec
from jax.test_util import check_grads

from jax_tcgemm import blas
from jax_tcgemm.system import modules

pytestmark = pytest.mark.usefixtures("x64")


normal = functools.partial(random_arrays.normal, dtype="float64")


def triangle(n, dtype, *batch):
    return normal(*batch, n, n, dtype=dtype) / n + 2 * jnp.eye(n)


STEPS = {"increment_x": 2, "increment_y": 3, "n": 3}

# label: (function of arrays, shapes of normal arrays; a tuple (n,) stands for a triangle)
DIFFERENTIABLE = {
    "amax": (blas.amax, [(5,)]),
    "amin": (lambda x: blas.amin(x, increment=2), [(3, 5)]),
    "asum": (lambda x: blas.asum(x, increment=2), [(2, 7)]),
    "nrm2": (lambda x: blas.nrm2(x, increment=2), [(2, 7)]),
    "dotu": (lambda x, y: blas.dot(x, y, **STEPS), [(7,), (8,)]),
    "dotc": (lambda x, y: blas.dot(x, y, conjugate=True, **STEPS), [(2, 7), (8,)]),
    "scal": (lambda s, x: blas.scal(s, x, increment=2), [(), (7,)]),
    "scal_static": (lambda x: blas.scal(-2.5, x, increment=3), [(2, 7)]),
    "axpy": (lambda s, x, y: blas.axpy(s, x, y, **STEPS), [(), (7,), (8,)]),
    "axpy_static": (lambda x, y: blas.axpy(-2.5, x, y), [(2, 7), (7,)]),
    "swap": (lambda x, y: blas.swap(x, y, **STEPS), [(7,), (8,)]),
}
for _trans in "NTC":
    _x, _y = ((4,), (3,)) if _trans == "N" else ((3,), (4,))
    DIFFERENTIABLE |= {
        f"gemv_{_trans}": (
            lambda s, t, a, x, y, trans=_trans: blas.gemv(a, x, y, alpha=s, beta=t, trans=trans),
            [(), (), (3, 4), _x, _y],
        ),
        f"gemv_{_trans}_steps": (
            lambda a, x, y, trans=_trans: blas.gemv(
                a, x, y, alpha=1.5, beta=-2, trans=trans, increment_x=2, increment_y=3
            ),
            [(2, 3, 4), (9,), (2, 12)],
        ),
        f"gemv_{_trans}_shared": (
            lambda a, x, trans=_trans: blas.gemv(a, x, trans=trans),
            [(3, 4), (5, *_x)],
        ),
        f"gbmv_{_trans}": (
            lambda s, a, x, y, trans=_trans: blas.gbmv(
                a, x, y, kl=1, ku=2, columns=4, alpha=s, beta=0.5, trans=trans
            ),
            [(), (3, 4), (2, *_x), _y],
        ),
        f"trsv_{_trans}": (
            lambda a, b, trans=_trans: blas.trsv(a, b, trans=trans, increment=2),
            [(4,), (8,)],
        ),
        f"trsv_{_trans}_unit": (
            lambda a, b, trans=_trans: blas.trsv(
                a, b, trans=trans, lower=False, unit_diagonal=True
            ),
            [(4,), (3, 4)],
        ),
        f"trsm_{_trans}_left": (
            lambda s, a, b, trans=_trans: blas.trsm(a, b, alpha=s, trans=trans),
            [(), (4,), (4, 3)],
        ),
        f"trsm_{_trans}_right": (
            lambda a, b, trans=_trans: blas.trsm(
                a, b, alpha=1.5, trans=trans, side="right", lower=False, unit_diagonal=True
            ),
            [(4,), (2, 3, 4)],
        ),
    }
    for _other in {"N": "NT", "T": "C", "C": "NC"}[_trans]:
        _a = (3, 4) if _trans == "N" else (4, 3)
        _b = (2, 4, 5) if _other == "N" else (2, 5, 4)
        DIFFERENTIABLE[f"gemm_{_trans}{_other}"] = (
            lambda s, t, a, b, c, ops=(_trans, _other): blas.gemm(
                a, b, c, alpha=s, beta=t, trans_a=ops[0], trans_b=ops[1]
            ),
            [(), (), _a, _b, (3, 5)],
        )
DIFFERENTIABLE["gemm_batched"] = (
    lambda a, b, c, d, e, f: blas.gemm_batched([a, b], [c, d], [e, f], alpha=1.5, trans_b="T"),
    [(3, 4), (3, 4), (5, 4), (5, 4), (3, 5), (3, 5)],
)


def make_arrays(label, shapes, dtype):
    is_triangle = label.startswith("tr")
    return [
        triangle(*shape, dtype)
        if is_triangle and len(shape) == 1 and i == _first_array(shapes)
        else normal(*shape, dtype=dtype, seed=i)
        for i, shape in enumerate(shapes)
    ]


def _first_array(shapes):
    return next(i for i, shape in enumerate(shapes) if shape)


# Real numbers where they take another way than complex ones.
REAL = ("amax", "asum", "nrm2", "gemv_T", "gbmv_N", "trsv_N", "trsm_T_right", "gemm_NT")


@pytest.mark.parametrize(
    ("label", "dtype"),
    [(label, "complex128") for label in DIFFERENTIABLE] + [(label, "float64") for label in REAL],
)
def test_derivatives_against_differences(label, dtype):
    f, shapes = DIFFERENTIABLE[label]
    arrays = make_arrays(label, shapes, dtype)
    order = 2 if label in ("nrm2", "gemv_N", "trsm_C_left", "gemm_CT") else 1
    check_grads(jax.jit(f), arrays, order=order, modes=("fwd", "rev"), rtol=1e-6, atol=1e-6)


def test_an_index_has_no_derivative():
    """Picking what it points to does."""
    x = jnp.array([1.0, -3, 2])
    np.testing.assert_array_equal(jax.grad(lambda x: x[blas.iamax(x)])(x), [0, 1, 0])
    np.testing.assert_array_equal(jax.grad(blas.amax)(x), [0, -1, 0])


@pytest.mark.parametrize("label", list(DIFFERENTIABLE)[::2])
def test_vmap_is_a_batch(label):
    """Of some of the arguments: the same as a loop, in one call."""
    f, shapes = DIFFERENTIABLE[label]
    rng = np.random.default_rng(len(label))
    in_axes = [None if rng.random() < 0.4 else 0 for _ in shapes]
    in_axes[rng.integers(len(shapes))] = 0
    arrays = make_arrays(label, shapes, "complex128")
    batched = [
        x if axis is None else jnp.stack([x, 2 * x, -x])
        for x, axis in zip(arrays, in_axes, strict=True)
    ]
    in_axes = [
        axis if axis is None else int(rng.integers(x.ndim))
        for x, axis in zip(batched, in_axes, strict=True)
    ]
    batched = [
        x if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(batched, in_axes, strict=True)
    ]
    g = jax.vmap(f, in_axes)
    jaxpr = str(jax.make_jaxpr(g)(*batched))
    assert jaxpr.count("tcgemm_blas[") == str(jax.make_jaxpr(f)(*arrays)).count("tcgemm_blas[")
    out = jax.jit(g)(*batched)
    for i in range(3):
        item = f(
            *(
                x if axis is None else jnp.take(x, i, axis)
                for x, axis in zip(batched, in_axes, strict=True)
            )
        )
        for whole, one in zip(jax.tree.leaves(out), jax.tree.leaves(item), strict=True):
            np.testing.assert_allclose(whole[i], one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "label", ["axpy", "swap", "gemv_N", "gbmv_T", "trsv_N", "trsm_N_left", "gemm_NT"]
)
def test_derivatives_by_what_a_batch_shares(label):
    """By one argument at a time, the first array or the others having a batch: as of a loop."""
    f, shapes = DIFFERENTIABLE[label]
    arrays = make_arrays(label, shapes, "float64")
    first = _first_array(shapes)
    for mapped in ([first], range(first + 1, len(arrays))):
        args = [jnp.stack([x, 2 * x, -x]) if i in mapped else x for i, x in enumerate(arrays)]
        in_axes = [0 if i in mapped else None for i in range(len(args))]

        def loop(*args, in_axes=in_axes):
            items = [
                f(*(x if axis is None else x[i] for x, axis in zip(args, in_axes, strict=True)))
                for i in range(3)
            ]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *items)

        for i, x in enumerate(args):
            ours, expected = (
                jax.jit(lambda x, g=g, i=i, args=args: pushed_and_pulled(g, args, i, x))(x)
                for g in (jax.vmap(f, in_axes), loop)
            )
            for got, wanted in zip(ours, expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)


def pushed_and_pulled(f, args, i, x):
    """The tangents by one argument, and the cotangent that they give back."""

    def of_one(x):
        return f(*args[:i], x, *args[i + 1 :])

    out, tangent = jax.jvp(of_one, (x,), (jnp.cos(x),))
    (cotangent,) = jax.vjp(of_one, x)[1](jax.tree.map(jnp.sin, out))
    return *jax.tree.leaves(tangent), cotangent


def test_vmap_of_vmap():
    a, x = normal(2, 3, 4), normal(5, 3, 4)
    out = jax.vmap(lambda a: jax.vmap(lambda x: blas.gemv(a, x), 0)(x.reshape(-1, 4)))(a)
    expected = jnp.einsum("bij,kj->bki", a, x.reshape(-1, 4))
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-13)


def test_inputs_are_untouched_and_donations_used():
    x, y = jnp.arange(4.0), jnp.ones(4)
    out = blas.axpy(2, x, y)
    np.testing.assert_array_equal(y, np.ones(4))
    donating = jax.jit(lambda x, y: blas.axpy(2, x, y), donate_argnums=1)
    pointer = y.unsafe_buffer_pointer()
    again = donating(x, y)
    np.testing.assert_array_equal(again, out)
    assert y.is_deleted()
    assert again.unsafe_buffer_pointer() == pointer


def test_scan_and_remat():
    a = triangle(5, "float64")

    @jax.checkpoint
    def step(x, _):
        return blas.trsv(a, blas.gemv(a, x, x, beta=0.5)), blas.nrm2(x)

    def f(x):
        return jax.lax.scan(step, x, length=3)[1].sum()

    check_grads(f, [normal(5)], order=1, modes=("rev",), rtol=1e-6, atol=1e-6)


def test_shard_map():
    mesh = jax.make_mesh((4,), ("i",))
    a, x = normal(3, 3), normal(8, 3)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("i")),
        out_specs=PartitionSpec("i"),
    )
    def f(a, x):
        return blas.gemv(a, x)

    place = functools.partial(jax.NamedSharding, mesh)
    a, x = jax.device_put((a, x), (place(PartitionSpec()), place(PartitionSpec("i"))))
    with jax.set_mesh(mesh):
        out = f(a, x)
        da, dx = jax.jit(jax.grad(lambda a, x: f(a, x).sum(), (0, 1)))(a, x)
    a, x = np.asarray(a), np.asarray(x)
    np.testing.assert_allclose(out, x @ a.T, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(da, np.tile(x.sum(0), (3, 1)), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(dx, np.tile(a.sum(0), (8, 1)), rtol=1e-13, atol=1e-13)


def test_a_program_for_several_devices_runs_on_xla():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(normal(8, 6), jax.NamedSharding(mesh, PartitionSpec("i")))
    out = jax.jit(blas.nrm2)(x)
    np.testing.assert_allclose(out, jnp.linalg.norm(x, axis=-1), rtol=1e-14)
    assert "tcgemm_blas" not in jax.jit(blas.nrm2).lower(x).as_text()


TARGET = "tcgemm_blas"


def round_trip(f, *args):
    checks = [export.DisabledSafetyCheck.custom_call(TARGET)]
    return export.deserialize(export.export(jax.jit(f), disabled_checks=checks)(*args).serialize())


def test_export():
    a, x = normal(3, 4), normal(4)
    restored = round_trip(functools.partial(blas.gemv, implementation="host"), a, x)
    assert TARGET in restored.mlir_module()
    np.testing.assert_allclose(restored.call(a, x), a @ x, rtol=1e-14)


def ffi(a, x, y, **changes):
    """The custom call of 2 a x + y, a of 3 x 4, with changes."""
    attributes = {"abi": modules.cpu.abi_version, "implementation": "host", "config": "default"}
    attributes |= {"routine": "gemv", "op_a": "N", "op_b": "N", "math": "default"}
    attributes |= dict.fromkeys(("batch", "items", "k"), 1) | {"m": 3, "n": 4, "kl": 0, "ku": 0}
    attributes |= {"a_ld": 4, "b_ld": 1, "c_ld": 1, "a_stride": 0, "b_stride": 0, "c_stride": 0}
    attributes |= dict.fromkeys(("upper", "right", "unit", "scalar_args", "atomics"), False)
    attributes |= {"has_c": True, "alpha_re": 2.0, "alpha_im": 0.0, "beta_re": 1.0, "beta_im": 0.0}
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((3,), a.dtype))
    return call(a, x, y, blas=attributes | changes)


def test_the_untampered_call_runs():
    """Where XLA gives c and the result different places, too."""
    a, x, y = normal(3, 4), normal(4), normal(3)
    np.testing.assert_allclose(round_trip(ffi, a, x, y).call(a, x, y), 2 * a @ x + y, rtol=1e-14)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"abi": 999}, "ABI version 999"),
        ({"implementation": "magic"}, "magic is not part of this build"),
        ({"config": "magic"}, "no config magic"),
        ({"routine": "magic"}, "trsm or gemm, got magic"),
        ({"op_a": "X"}, "op_a must be N, T or C, got X"),
        ({"math": "magic"}, "math must be"),
        ({"m": 1000}, "a must hold at least 4000 elements, got 12"),
        ({"m": 0}, "m must be in [1, 2147483647], got 0"),
        ({"n": 2**40}, "n must be in"),
        ({"a_ld": 3}, "a_ld must be in [4, 2147483647], got 3"),
        ({"b_ld": 0}, "b_ld must be in"),
        ({"b_ld": 2}, "b must hold at least 7 elements, got 4"),
        ({"c_ld": 2}, "c must hold at least 5 elements, got 3"),
        ({"batch": 2}, "c_stride must be at least 3 over a batch, got 0"),
        ({"batch": 2**31 - 1, "c_stride": 2**58}, "c must hold at least"),
        ({"a_stride": -4}, "a_stride must not be negative"),
        ({"kl": -1}, "kl must be in"),
        ({"items": 2}, "operands must be 2 a, 2 b, 2 c, got 3"),
        ({"has_c": False}, "operands must be a, b, got 3"),
        ({"scalar_args": True}, "operands must be a, b, c, alpha, beta, got 3"),
        ({"routine": "gemm"}, "b_ld must be in [4, 2147483647], got 1"),
        ({"routine": "trsv"}, "operands must be a, c, got 3"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_malformed_call_is_an_invalid_argument(changes, says):
    a, x, y = normal(3, 4), normal(4), normal(3)
    restored = round_trip(functools.partial(ffi, **changes), a, x, y)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as info:
        jax.block_until_ready(restored.call(a, x, y))
    assert says in str(info.value)
