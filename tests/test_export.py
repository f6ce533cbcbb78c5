"""jax.export round trips, and what a tampered artifact meets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_tcgemm
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.function import Numbers
from jax_tcgemm.system import modules

TARGET = "tcgemm_gemm"
CHECKS = [export.DisabledSafetyCheck.custom_call(TARGET)]
matmul = functools.partial(jax_tcgemm.matmul, implementation="host")


def round_trip(f, *args, vjp_order=0, **kwargs):
    exported = export.export(jax.jit(f), disabled_checks=CHECKS, **kwargs)(*args)
    return export.deserialize(exported.serialize(vjp_order=vjp_order))


def test_round_trip_with_gradient():
    a, b = jnp.arange(12.0).reshape(3, 4), jnp.arange(20.0).reshape(4, 5)
    restored = round_trip(matmul, a, b, vjp_order=1)
    assert TARGET in restored.mlir_module()
    np.testing.assert_allclose(restored.call(a, b), a @ b)
    grad = jax.grad(lambda a, b: jnp.sum(restored.call(a, b)), (0, 1))(a, b)
    expected = jax.grad(lambda a, b: jnp.sum(a @ b), (0, 1))(a, b)
    jax.tree.map(np.testing.assert_allclose, grad, expected)


def test_export_for_two_platforms(fake_cuda):
    x = jnp.arange(16.0).reshape(4, 4)
    restored = round_trip(jax_tcgemm.matmul, x, x, platforms=("cpu", "cuda"))
    assert restored.platforms == ("cpu", "cuda")
    assert TARGET in restored.mlir_module()
    np.testing.assert_allclose(restored.call(x, x), x @ x)


NOT_KEPT = """
import itertools
import jax, jax.numpy as jnp, numpy as np, jax_tcgemm
from jax import export
from jax_tcgemm.kernels import program
x = jnp.arange(16.0).reshape(4, 4)
program.num_carried = itertools.count().__next__
jax.jit(jax_tcgemm.matmul).lower(x[:2], x)
for platforms in (("cpu", "cuda"), ("cpu",)):
    exported = export.export(jax.jit(jax_tcgemm.matmul), platforms=platforms)(x, x)
    np.testing.assert_allclose(export.deserialize(exported.serialize()).call(x, x), x @ x)
print("done")
"""


def test_export_for_two_platforms_after_a_program_with_kernels(run_python):
    """JAX does not keep the lowering of a primitive then."""
    assert run_python(NOT_KEPT, TCGEMM_IMPLEMENTATION="xla") == "done\n"


@pytest.mark.parametrize(
    "f",
    [
        jax_tcgemm.matmul,
        lambda a, b: jax.grad(lambda *x: jax_tcgemm.linear(*x, activation="gelu").sum())(a, b),
        lambda a, b: jax_tcgemm.gated_linear(a, (b, b)),
        lambda a, b: jax_tcgemm.mlp(a, {"up": b, "down": b.T}),
        lambda a, b: jax_tcgemm.tensor.einsum("...i,ij,kj->...k", a, b, b),
        lambda a, b: jax_tcgemm.tensor.contract("ri,ij->jr", a, b),
        lambda a, b: jax_tcgemm.blas.gemv(b, a, trans="T"),
        lambda a, b: jax_tcgemm.blas.iamax(a),
    ],
    ids=["matmul", "linear'", "gated_linear", "mlp", "einsum", "contract", "gemv", "iamax"],
)
def test_symbolic_shapes_go_to_xla(f):
    (rows,) = export.symbolic_shape("rows")
    a = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    b = jax.ShapeDtypeStruct((4, 5), jnp.float32)
    restored = round_trip(f, a, b)
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((7, 4), (4, 5)))
    np.testing.assert_allclose(restored.call(x, y), f(x, y), rtol=1e-4, atol=1e-5)


def ffi(a, b, out=(4, 4), **changes):
    """The custom call of a 4x4x4 float32 product, with changes."""
    gemm = {"implementation": "host", "config": "auto", "compute": "f32"}
    gemm |= {"abi": modules.cpu.abi_version} | Epilogue().attributes()
    gemm |= dict.fromkeys(("batch", "batch_inner"), 1) | dict.fromkeys("mnk", 4)
    for side in "ab":
        gemm |= {f"{side}_transposed": False, f"{side}_ld": 4}
        gemm |= {f"{side}_outer_stride": 0, f"{side}_inner_stride": 0}
    gemm |= {"alpha": 1.0, "beta": 0.0, "scales": Numbers.of([]), "symmetric": False}
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(out, jnp.float32))
    return call(a, b, gemm=gemm | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"abi": 999}, "ABI version 999"),
        ({"implementation": "magic"}, "magic is not part of this build"),
        ({"config": "magic"}, "no config magic"),
        ({"compute": "magic"}, "compute must be"),
        ({"m": 1000}, "a must hold at least 4000 elements, got 16"),
        ({"m": -1}, "m must be in"),
        ({"k": 2**40}, "k must be in"),
        ({"symmetric": True, "n": 3}, "symmetric must be false where m and n differ, got m=4"),
        ({"b_ld": 2}, "b.ld must be at least 4, got 2"),
        ({"a_ld": 2**62}, "a must hold at least"),
        ({"batch": 3, "batch_inner": 2}, "batch_inner must divide"),
        ({"batch": 2, "batch_inner": 2}, "d must hold at least 32 elements, got 16"),
        ({"b_inner_stride": -4}, "must not be negative"),
        ({"beta": 1.0}, "operands must be"),
        ({"out": (2, 4)}, "d must hold at least 16 elements, got 8"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_malformed_artifact_is_an_invalid_argument(changes, says):
    x = jnp.ones((4, 4))
    restored = round_trip(functools.partial(ffi, **changes), x, x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as info:
        jax.block_until_ready(restored.call(x, x))
    assert says in str(info.value)


def test_the_untampered_artifact_runs():
    x = jnp.arange(16.0).reshape(4, 4)
    np.testing.assert_allclose(round_trip(ffi, x, x).call(x, x), x @ x)
