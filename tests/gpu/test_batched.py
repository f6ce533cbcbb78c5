"""Batches of tiny matrices on a GPU, by `simt_batched`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batched_cases import Case

import jax_tcgemm
from jax_tcgemm.problem.dtypes import DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

LAYOUTS = ("NN", "NT", "TN", "TT")
SIZES = [
    *((1, 3, 3, 3), (1000, 2, 2, 2), (39017, 11, 11, 11), (20011, 15, 9, 15), (5003, 16, 16, 16)),
    *((997, 31, 29, 27), (2000, 32, 32, 32), (3001, 8, 8, 8), (1500, 32, 2, 32), (777, 2, 31, 5)),
]
CASES = [
    Case(*sizes, LAYOUTS[(i + j) % 4], dtype)
    for i, sizes in enumerate(SIZES)
    for j, dtype in enumerate(("f32", "f64", "c64", "c128", "f16", "bf16"))
]
CASES += [Case(5003, 11, 11, 11, layout) for layout in LAYOUTS]
CASES += [Case(5003, 7, 12, 9, "NT", "f16", "f32"), Case(5003, 7, 12, 9, "TN", "f32", "bf16")]


def product(case, implementation="simt_batched"):
    contract = (1 + (case.layout[0] == "N"),), (1 + (case.layout[1] == "T"),)
    return functools.partial(
        jax_tcgemm.dot_general,
        dimension_numbers=(contract, ((0,), (0,))),
        precision="highest",
        preferred_element_type=DTYPES[case.out_dtype],
        implementation=implementation,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda x: x.label)
def test_values(case):
    got = jax.jit(product(case))(*map(jnp.asarray, case.arrays.values()))
    assert case.mismatch([got]) == ""


def test_bits_do_not_depend_on_the_batch():
    case = Case(20011, 15, 9, 15)
    a, b = map(jnp.asarray, case.arrays.values())
    f = jax.jit(product(case))
    np.testing.assert_array_equal(f(a, b)[:100], f(a[:100], b[:100]))
