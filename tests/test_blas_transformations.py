"""BLAS calls under grad, vmap, jit, shard_map, donation and export."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_tcgemm import blas

pytestmark = pytest.mark.usefixtures("x64")


def normal(*shape, dtype="float64", seed=0):
    rng = np.random.default_rng((seed, *shape))
    x = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(x, dtype)


def triangle(n, dtype, *batch):
    return normal(*batch, n, n, dtype=dtype) / n + 2 * jnp.eye(n)


VECTOR = functools.partial(normal, 7)
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
    for _other in "NTC":
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


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("label", DIFFERENTIABLE)
def test_derivatives_against_differences(label, dtype):
    f, shapes = DIFFERENTIABLE[label]
    arrays = make_arrays(label, shapes, dtype)
    order = 2 if label in ("nrm2", "gemv_N", "trsm_C_left", "gemm_CT") else 1
    check_grads(f, arrays, order=order, modes=("fwd", "rev"), rtol=1e-6, atol=1e-6)
