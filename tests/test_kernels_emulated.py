"""The CUDA kernels run by the emulator of tests/emulator: what they compute, without a GPU.

Inputs are small integers, which are added without rounding, so that results are compared for
equality. Seeds choose the order of threads and the delay of what is asynchronous.
"""

import emulated
import numpy as np
import pytest
import ragged_reference as reference

from jax_tcgemm.problem import DTYPES
from jax_tcgemm.ragged_problem import RaggedProblem

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())


@pytest.fixture(scope="session")
def wgmma(tmp_path_factory):
    return emulated.Emulator(
        tmp_path_factory.mktemp("wgmma"), "kernels/wgmma/ragged_instance_bf16_1.cu"
    )


def integers(rng, shape, dtype="bf16"):
    return rng.integers(-2, 2, shape, endpoint=True).astype(DTYPES[dtype])


def check_ragged(emulator, form, sizes, m, n, k, *, transposed=False, dtype="bf16", **how):
    """One call with fresh inputs, compared with the reference."""
    rng = np.random.default_rng([m, n, k, *sizes])
    rows, groups = form == "rows", len(sizes)
    problem = RaggedProblem(
        form=form,
        batch=1,
        m=m,
        n=n,
        k=k,
        groups=groups,
        num_sizes=groups,
        b_transposed=transposed,
        a_batched=True,
        b_batched=True,
        sizes_batched=True,
        in_dtype=dtype,
        out_dtype="f32",
        compute="tf32" if dtype == "f32" else "f32",
    )
    a = integers(rng, (m, k) if rows else (k, m), dtype)
    b = integers(rng, (groups, k, n) if rows else (k, n), dtype)
    expected = (reference.rows if rows else reference.contraction)(a, b, sizes)
    arrays = {
        "a": a,
        "b": np.ascontiguousarray(b.swapaxes(1, 2)) if transposed else b,
        "group_sizes": np.array(sizes, np.int32),
        "group_offset": np.zeros(1, np.int32),
    }
    got = emulator.run(problem, arrays, **how)[0][0]
    np.testing.assert_array_equal(got, expected)


SIZES = [1, 0, 17, 64, 33]


@pytest.mark.parametrize("config", ["128x64x64_c1x1x1_co_t", "128x256x64_c2x1x1_co_t"])
@pytest.mark.parametrize("seed", range(3))
def test_wgmma_ragged_rows(wgmma, config, seed):
    how = {"implementation": "wgmma", "config": config, "seed": seed}
    check_ragged(wgmma, "rows", SIZES, 130, 264, 136, **how)


@pytest.mark.parametrize("seed", range(3))
def test_wgmma_ragged_contraction(wgmma, seed):
    how = {"implementation": "wgmma", "config": "128x256x64_c2x1x1_co", "seed": seed}
    check_ragged(wgmma, "contraction", SIZES, 136, 136, 130, **how)
