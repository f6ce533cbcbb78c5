"""Calls of emulated kernels compared with their references, for the tests of them.

Inputs are small integers, which are added without rounding, so that results are compared for
equality.
"""

import jax
import numpy as np
import ragged_reference as reference
from emulated import Source, carried
from gpu.gemm_call import CASES, Case, Types, make_inputs, mismatch
from mistakes import Mistake

from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.fusion import epilogue
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.ragged import RaggedProblem
from jax_tcgemm.selection import implementations
from jax_tcgemm.selection.devices import ASSUMED_GPU

CASE = {case.label: case for case in CASES}
# Several tiles a block, stages used several times, every edge cut.
CASE["several_tiles"] = Case("several_tiles", 264, 136, 328)
CASE["odd_overlap"] = Case("odd_overlap", 133, 203, 331)  # tiles overlap at the edges of D
# All sums stay in the tensor core, and nothing is added to them.
NO_PROMOTION = [
    Mistake("kernels/wgmma/multiply.cuh", "no_promotion", "partial", "acc"),
    Mistake("kernels/wgmma/multiply.cuh", "not_started_anew", "false", "true"),
    Mistake("kernels/wgmma/scales.cuh", "no_promotion", "partial[block][i]", "0"),
]
BF16, TF32 = Types("bf16", "bf16", "f32"), Types("f32", "f32", "tf32")


def kernels_of(implementation, config, problem) -> list[Source]:
    """What a program would bring for a product, but for what adds up its parts."""
    candidate = implementations.Candidate(implementation, config, "")
    kernels = implementations.kernels(candidate, problem, ASSUMED_GPU)
    return [carried(x) for x in kernels if "split_reduction" not in x.kernel]


def check(emulator, types, layout, case, **how):
    """One product of whatever lies in memory as `case` says."""
    inputs = make_inputs(types, layout, case)
    arrays = {"a": inputs.a, "b": inputs.b}
    if inputs.problem.beta:
        arrays["c"] = inputs.c
    if wrong := mismatch(emulator.run(inputs.problem, arrays, **how)[0], inputs):
        raise AssertionError(wrong)


def integers(rng, shape, dtype="bf16"):
    return rng.integers(-2, 2, shape, endpoint=True).astype(DTYPES[dtype])


def function_of_product(function, operands, extents, dtype, accumulated):
    """The problem of a product with rows of K and a function of it, and which operands it takes."""
    m, n, k = extents
    product = dense.Product(
        options=CallOptions("matmul"),
        lhs_shape=(m, k),
        lhs_dtype=np.dtype(dtype),
        rhs_shape=(n, k),
        rhs_dtype=np.dtype(dtype),
        result_shape=(m, n),
        result_dtype=np.dtype(accumulated),
        dimension_numbers=(((1,), (1,)), ((), ())),
        permutation=(0, 1),
        precision=None,
    )
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((m, n), accumulated), *operands)
    whole = epilogue.Product(product, jaxpr, tuple(x.shape for x in operands), 1, None)
    found = whole.folded(ASSUMED_GPU)
    assert not isinstance(found, str), found
    return found.problem, found.operands


def ragged_problem(form, groups, m, n, k, dtype="bf16", *, b_transposed=False, **fields):
    """The problem of one grouped product with a size for every group, and float32 results."""
    return RaggedProblem(
        form=form,
        batch=1,
        m=m,
        n=n,
        k=k,
        groups=groups,
        num_sizes=groups,
        b_transposed=b_transposed,
        a_batched=True,
        b_batched=True,
        sizes_batched=True,
        in_dtype=dtype,
        out_dtype="f32",
        compute="tf32" if dtype == "f32" else "f32",
        **fields,
    )


def group_arrays(sizes):
    """The operands that say which rows are in which group."""
    return {"group_sizes": np.array(sizes, np.int32), "group_offset": np.zeros(1, np.int32)}


def check_ragged(emulator, form, sizes, m, n, k, *, transposed=False, dtype="bf16", **how):
    """One grouped product, with NaN in the rows of no group."""
    rng = np.random.default_rng([m, n, k, *sizes])
    rows, groups = form == "rows", len(sizes)
    problem = ragged_problem(form, groups, m, n, k, dtype, b_transposed=transposed)
    a = integers(rng, (m, k) if rows else (k, m), dtype)
    b = integers(rng, (groups, k, n) if rows else (k, n), dtype)
    # Tokens of no group, which follow the last one's.
    for tokens in (a,) if rows else (a, b):
        tokens[sum(sizes) :] = np.nan
    expected = (reference.rows if rows else reference.contraction)(a, b, sizes)
    arrays = {
        "a": a,
        "b": np.ascontiguousarray(b.swapaxes(1, 2)) if transposed else b,
        **group_arrays(sizes),
    }
    got = emulator.run(problem, arrays, **how)[0][0]
    np.testing.assert_array_equal(got, expected)
