"""BLAS calls on the host and in XLA against float64; their derivatives, batching and refusals."""

import pytest
from blas_cases import CASES, ROUTINES, run_all

from jax_tcgemm import blas

pytestmark = pytest.mark.usefixtures("x64")


def dtypes_of(routine):
    return next(case.dtypes for case in CASES if case.routine == routine)


PAIRS = [(routine, dtype) for routine in ROUTINES for dtype in dtypes_of(routine)]


@pytest.mark.parametrize(("routine", "dtype"), PAIRS, ids=lambda value: value)
def test_host_against_float64(routine, dtype):
    run_all(routine, dtype, implementation="host")


@pytest.mark.parametrize("routine", ROUTINES)
def test_xla_against_float64(routine):
    dtypes = dtypes_of(routine)
    run_all(routine, dtypes[ROUTINES.index(routine) % len(dtypes)], implementation="xla")


def test_every_routine_has_cases():
    ours = {name for name in blas.__all__ if name.islower()}
    helpers = {"amax", "amin", "to_band", "from_band", "set_logging", "gemm_batched"}
    assert {"dot" if name in ("dotu", "dotc") else name for name in ROUTINES} == ours - helpers
