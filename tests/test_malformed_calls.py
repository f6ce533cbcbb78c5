"""Malformed calls that once read, wrote or allocated what is not theirs, or returned anything.

Each ends at a page that cannot be touched, in a process of its own: see ffi_frame.py.
"""

import numpy as np
import pytest
from ffi_frame import INVALID_ARGUMENT, Buffer
from ffi_worker import Worker
from fuzz import execute
from fuzz_targets import Call

from jax_tcgemm.system import modules

ABI = {"abi": modules.cpu.abi_version, "implementation": "host", "config": "default"}
BLAS = ABI | {"routine": "gemv", "op_a": "N", "op_b": "N", "math": "default"}
BLAS |= dict.fromkeys(("batch", "items", "m", "n", "k", "a_ld", "b_ld", "c_ld"), 1)
BLAS |= dict.fromkeys(("kl", "ku", "a_stride", "b_stride", "c_stride"), 0)
BLAS |= dict.fromkeys(("upper", "right", "unit", "has_c", "scalar_args", "atomics"), False)
BLAS |= {"alpha_re": 1.0, "alpha_im": 0.0, "beta_re": 0.0, "beta_im": 0.0}
GEMM = ABI | {
    "config": "auto",
    "compute": "f32",
    "batch": 1,
    "batch_inner": 1,
    "m": 2,
    "n": 3,
    "k": 4,
}
GEMM |= {"a_transposed": False, "a_ld": 4, "a_outer_stride": 0, "a_inner_stride": 0}
GEMM |= {"b_transposed": False, "b_ld": 3, "b_outer_stride": 0, "b_inner_stride": 0}
GEMM |= {
    "alpha": 1.0,
    "beta": 0.0,
    "scales": [],
    "symmetric": False,
    "gated": False,
    "up_offset": 0,
}
NO_FUNCTION = {"function": "", "function_reads": [], "function_indices": [], "function_results": []}
# Results of a function: bytes of an element, form, and neighbors that are reduced to one.
WHOLE, BESIDE, BY_COLUMNS = (4, 0, 1), (4, 3, 1), (4, 1, 8)
FUNCTION = {"function": "f", "function_results": [*WHOLE]}
NO_FUNCTION |= {"function_library": "none"}
GEMM |= NO_FUNCTION
RAGGED = ABI | {"config": "auto", "form": "rows", "compute": "f32"}
RAGGED |= {"batch": 1, "m": 6, "n": 4, "k": 5, "groups": 2, "num_sizes": 2, "a_rows": 0}
RAGGED |= {"scales": []}
RAGGED |= dict.fromkeys(("b_transposed", "a_batched", "b_batched", "sizes_batched"), False)
RAGGED |= dict.fromkeys(("tokens_last", "gated", "gathered"), False)
RAGGED |= NO_FUNCTION

ROWS = ABI | {"form": "sums", "weighted": False}
ROWS |= {"a_rows": 2, "b_rows": 0, "targets": 1, "pairs": 2, "n": 3}


@pytest.fixture(scope="module")
def worker():
    with Worker(modules.cpu.__file__) as started:
        yield started


def numbers(*shape, dtype="f32") -> Buffer:
    types = {"f32": np.float32, "f64": np.float64, "c64": np.complex64, "s32": np.int32}
    return Buffer.of(np.arange(1, 1 + np.prod(shape)).astype(types[dtype]).reshape(shape), dtype)


def run(worker, key, attributes, operands, *results) -> str:
    """The message with which a call is refused; "" when it is not."""
    call = Call(f"tcgemm_{key}", key, attributes, list(operands), list(results))
    outcome = execute(worker, call)
    assert outcome.code in (0, INVALID_ARGUMENT), outcome
    return outcome.message


# --- attributes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["gemm", "ragged", "rows", "blas"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": None}, "n must be given"),
        ({"n": 2.0}, "n must be a 64-bit integer"),
        ({"config": 1}, "config must be a string"),
        ({"abi": 1}, "the program was lowered for ABI version 1"),
        ({"abi": 1, "n": None, "new": 1}, "the program was lowered for ABI version 1"),
        ({"new": True}, "new must not be given: no attribute has this name"),
    ],
    ids=str,
)
def test_attributes_are_those_of_the_problem(worker, key, change, says):
    changed = {"gemm": GEMM, "ragged": RAGGED, "rows": ROWS, "blas": BLAS}[key] | change
    attributes = {name: value for name, value in changed.items() if value is not None}
    assert says in run(worker, key, attributes, [], Buffer("f32", (1,)))


@pytest.mark.parametrize(
    ("key", "name", "says"),
    [
        (
            *("gemm", "compute"),
            "compute must be f16, f32, tf32, f64, s32, f32_fast_accum or f32_promoted, got x",
        ),
        ("gemm", "function_library", "gelu_aux_bias or dgelu, got x"),
        ("gemm", "gated", "gated must be a boolean"),
        ("gemm", "beta", "beta must be a 64-bit float"),
        ("ragged", "form", "form must be rows or contraction, got x"),
        ("rows", "form", "form must be sums or dots, got x"),
        ("blas", "op_b", "op_b must be N, T or C, got x"),
        ("blas", "math", "math must be default, tf32, pedantic or no_reduced_precision, got x"),
    ],
)
def test_attributes_have_the_values_that_there_are(worker, key, name, says):
    attributes = {"gemm": GEMM, "ragged": RAGGED, "rows": ROWS, "blas": BLAS}[key] | {name: "x"}
    assert says in run(worker, key, attributes, [], Buffer("f32", (1,)))


@pytest.mark.parametrize(
    ("key", "change", "operands", "results", "says"),
    [
        ("gemm", {"gated": True}, 2, 1, "operands must be a, b, b_up, got 2"),
        ("gemm", {}, 2, 3, "results must be d, workspace, got 3"),
        ("gemm", {"beta": 1.0}, 2, 1, "operands must be a, b, c, got 2"),
        ("gemm", {"scales": [1] * 12}, 2, 1, "operands must be a, b, a_scales, b_scales, got 2"),
        ("ragged", {"gathered": True}, 4, 1, "group_sizes, group_offset, gather, got 4"),
        ("rows", {}, 2, 1, "operands must be a, indices, starts, got 2"),
        ("rows", {"form": "dots"}, 3, 1, "operands must be a, b, indices, b_indices, got 3"),
        ("blas", {"routine": "gemm", "items": 2}, 3, 2, "operands must be 2 a, 2 b, got 3"),
        ("blas", {"items": -1, "scalar_args": True}, 1, 0, "operands must be alpha, beta, got 1"),
    ],
    ids=str,
)
def test_a_call_has_the_arrays_of_its_problem(worker, key, change, operands, results, says):
    attributes = {"gemm": GEMM, "ragged": RAGGED, "rows": ROWS, "blas": BLAS}[key] | change
    found = [Buffer("f32", (1,)) for _ in range(results)]
    assert says in run(worker, key, attributes, [numbers(1)] * operands, *found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "a_scales must hold at least 12 elements, got 11"),
        ({"scales": [1] * 11}, "scales must be six numbers of a and six of b, got 11"),
        ({"form": "contraction"}, "scales must be empty when form is contraction"),
    ],
    ids=str,
)
def test_scales_of_groups(worker, change, says):
    """Of six tokens with two blocks of k each, and of two matrices with two of n and two of k."""
    numbers_of_blocks = [1, 4, 2, 1, 0, 0, 2, 4, 2, 1, 0, 4]
    attributes = RAGGED | {"scales": numbers_of_blocks} | change
    sizes = [numbers(2, dtype="s32"), numbers(1, dtype="s32")]
    operands = [numbers(30), numbers(40), *sizes, numbers(11), numbers(8)]
    assert says in run(worker, "ragged", attributes, operands, Buffer("f32", (24,)))


def test_scales_of_gated_groups(worker):
    """Each group has those of both its matrices."""
    own = {"gated": True, "scales": [1, 4, 2, 1, 0, 0, 2, 4, 2, 1, 0, 4]}
    sizes = [numbers(2, dtype="s32"), numbers(1, dtype="s32")]
    operands = [numbers(30), numbers(80), *sizes, numbers(12), numbers(8)]
    says = run(worker, "ragged", RAGGED | FUNCTION | own, operands, Buffer("f32", (24,)))
    assert "b_scales must hold at least 16 elements, got 8" in says


def test_scales_are_all_there(worker):
    attributes = GEMM | {"scales": [1, 1, 4, 1, 0, 0, 2, 4, 1, 1, 0, 0]}
    operands = [numbers(8), numbers(12), numbers(7), numbers(2)]
    said = run(worker, "gemm", attributes, operands, Buffer("f32", (6,)))
    assert "a_scales must hold at least 8 elements, got 7" in said
    # Of a gated product those of both matrices, one after the other.
    operands = [numbers(8), numbers(12), numbers(12), numbers(8), numbers(3)]
    said = run(
        worker, "gemm", attributes | FUNCTION | {"gated": True}, operands, Buffer("f32", (6,))
    )
    assert "b_scales must hold at least 4 elements, got 3" in said


# --- BLAS -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("routine", ["dot", "asum", "nrm2", "iamax", "iamin"])
def test_a_reduction_has_no_c(worker, routine):
    attributes = BLAS | {"routine": routine, "n": 4096, "has_c": True}
    operands = [numbers(4096)] * (1 + (routine == "dot")) + [numbers(1)]
    said = run(
        worker, "blas", attributes, operands, Buffer("s32" if "i" in routine else "f32", (1,))
    )
    assert f"has_c must be false for {routine}, got true" in said


@pytest.mark.parametrize("items", [2**63 - 1, 2**62, -1, -(2**63)])
@pytest.mark.parametrize("routine", ["gemv", "axpy"])
def test_arrays_are_counted_as_they_are_given(worker, routine, items):
    """As many as an integer says are too many to be added up."""
    attributes = BLAS | {"routine": routine, "items": items, "has_c": True}
    operands = [numbers(1), numbers(1), numbers(1)]
    assert run(worker, "blas", attributes, operands, Buffer("f32", (1,)))


@pytest.mark.parametrize("scalar", ["alpha", "beta"])
def test_scalars_of_real_products_are_real(worker, scalar):
    attributes = BLAS | {"routine": "gemm", "m": 32, "n": 32, "k": 32, "has_c": True}
    attributes |= {"a_ld": 32, "b_ld": 32, "c_ld": 32, f"{scalar}_im": 1.0}
    operands = [numbers(32, 32)] * 3
    assert f"{scalar} must be real for f32" in run(
        worker, "blas", attributes, operands, Buffer("f32", (32, 32))
    )


@pytest.mark.parametrize("routine", ["gemv", "gemm"])
def test_a_beta_on_the_device_is_not_used_without_c(worker, routine):
    attributes = BLAS | {"routine": routine, "m": 2, "a_ld": 2, "scalar_args": True}
    attributes |= {"n": 2} if routine == "gemv" else {"k": 2}
    d = Buffer("f32", (2, 1))
    assert (
        run(worker, "blas", attributes, [numbers(2, 2), numbers(2), numbers(1), numbers(1)], d)
        == ""
    )
    np.testing.assert_array_equal(d.array()[:, 0], [5, 11])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("change", [{"alpha_re": 2.0}, {"scalar_args": True}])
def test_trsv_has_no_alpha_whatever_its_batch(worker, batch, change):
    attributes = BLAS | {"routine": "trsv", "m": 2, "a_ld": 2, "c_stride": 2, "batch": batch}
    operands = [numbers(2, 2), numbers(batch, 2)]
    operands += [numbers(1), numbers(1)] if "scalar_args" in change else []
    said = run(
        worker, "blas", attributes | {"has_c": True} | change, operands, Buffer("f32", (batch, 2))
    )
    assert f"{next(iter(change)).removesuffix('_re')} must be" in said


@pytest.mark.parametrize("routine", ["scal", "gemm"])
def test_what_lies_beyond_c_is_passed_on(worker, routine):
    attributes = BLAS | {"routine": routine, "n": 2, "alpha_re": 10.0, "has_c": True}
    attributes |= {"b_ld": 2, "c_ld": 2, "beta_re": 1.0} if routine == "gemm" else {}
    c, d = numbers(5), Buffer("f32", (5,))
    operands = [numbers(1), numbers(2), c] if routine == "gemm" else [c]
    assert run(worker, "blas", attributes, operands, d) == ""
    np.testing.assert_array_equal(
        d.array(), [11, 22, 3, 4, 5] if routine == "gemm" else [10, 20, 3, 4, 5]
    )


@pytest.mark.parametrize(
    ("change", "operands", "size", "says"),
    [
        ({"m": 3, "a_ld": 1}, (3, 1), 4, "d must hold exactly 3 elements, got 4"),
        ({"m": 3, "c_ld": 2}, (3, 1), 5, "c must be given where its layout leaves gaps"),
        ({"batch": 2, "c_stride": 2}, (1, 1), 3, "c must be given where its layout leaves gaps"),
        (
            {"batch": 2, "m": 3, "c_stride": 1, "has_c": True},
            (3, 1, 4),
            4,
            "c_stride must be at least 3 over a batch, got 1",
        ),
        ({"routine": "dot", "m": 2}, (1, 1), 1, "m must be 1 for dot, got 2"),
        ({"routine": "asum", "alpha_re": 2.0}, (1,), 1, "alpha must be 1 for asum"),
        ({"routine": "nrm2", "beta_re": 1.0}, (1,), 1, "beta must be 0 for nrm2"),
        ({"routine": "dot", "op_b": "T"}, (1, 1), 1, "op_b must be N for dot, got T"),
        (
            {"routine": "trsv", "right": True, "has_c": True},
            (1, 1),
            1,
            "right must be false for trsv",
        ),
        (
            {"scalar_args": True, "routine": "iamax"},
            (1, 1, 1),
            1,
            "scalar_args must be false for iamax",
        ),
    ],
    ids=str,
)
def test_calls_that_leave_something_open(worker, change, operands, size, says):
    arrays = [numbers(elements) for elements in operands]
    assert says in run(worker, "blas", BLAS | change, arrays, Buffer("f32", (size,)))


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-12, 1])
def test_up_offset_without_a_second_matrix(worker, offset):
    operands = [numbers(2, 4), numbers(12 + min(offset, 0) or 1)]
    said = run(worker, "gemm", GEMM | {"up_offset": offset}, operands, Buffer("f32", (2, 3)))
    assert f"up_offset must be 0 unless gated, got {offset}" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "host cannot run this: it has no function"),
        ({"gated": True}, "host cannot run this: it has no gated product"),
        ({"gated": True, "up_offset": 3}, "host cannot run this: it has no gated product"),
        ({"gated": True, "beta": 1.0}, "a function must be all that follows the product"),
        ({"up_offset": 3}, "up_offset must be 0 unless gated, got 3"),
        ({"gated": True, "function": ""}, "a gated product must have a function"),
        ({"function": "", "function_library": "relu"}, "function must be named where it reads"),
        ({"function_reads": [0] * 8}, "function_reads must be at most 12 times nine numbers"),
    ],
    ids=str,
)
def test_a_function_is_of_a_product_or_of_both_of_a_gated_one(worker, change, says):
    attributes = GEMM | FUNCTION | {"b_ld": 6} | change
    operands = [numbers(2, 4), numbers(4, 6)]
    if attributes["gated"] and not attributes["up_offset"]:
        operands.append(numbers(4, 6))
    if "beta" in change:
        operands.append(numbers(2, 3))
    assert says in run(worker, "gemm", attributes, operands, Buffer("f32", (2, 3)))


# Of operand 0, four bytes each: as D lies.
AS_D = [0, 4, 0, 0, 0, 0, 3, 2, 1]


@pytest.mark.parametrize(
    ("reads", "results", "elements", "says"),
    [
        (AS_D, [*WHOLE], 6, "host cannot run this: it has no function"),
        ([*AS_D[:6], 6, 2, 1], [*WHOLE, *BESIDE], 12, "host cannot run this: it has no function"),
        (
            [0, 4, 3, 0, 0, 0, 6, 2, 1],
            [*WHOLE, *BESIDE],
            12,
            "host cannot run this: it has no function",
        ),
        (
            [*AS_D[:6], 0, 2, 1],
            [*WHOLE],
            6,
            "an operand in the place of d must be read where that is",
        ),
        (
            [*AS_D[:8], 0],
            [*WHOLE],
            6,
            "an operand in the place of d must be read where that is written",
        ),
        (
            [0, 4, 1, 0, 0, 0, 0, 2, 1],
            [*WHOLE],
            6,
            "an operand in the place of d must be read where",
        ),
        ([0, 2, *AS_D[2:]], [*WHOLE], 6, "an operand in the place of d must be read where that is"),
    ],
    ids=str,
)
def test_an_operand_in_the_place_of_d(worker, reads, results, elements, says):
    function = {"function": "f", "function_reads": reads, "function_results": results}
    operands = [numbers(2, 4), numbers(4, 3), numbers(elements)]
    d = Buffer("f32", (elements,), shares=2)
    assert says in run(worker, "gemm", GEMM | function, operands, d)


@pytest.mark.parametrize(
    ("results", "sizes", "says"),
    [
        ([WHOLE, BESIDE], [12], "host cannot run this: it has no function"),
        ([WHOLE, BESIDE], [6], "d must hold at least 12 elements, got 6"),
        ([WHOLE, WHOLE, BESIDE], [6, 12], "host cannot run this: it has no function"),
        ([WHOLE, WHOLE, BESIDE], [6, 6], "a function's result must have exactly 48 bytes, got 24"),
        ([BY_COLUMNS], [2], "host cannot run this: it has no function"),
        ([BY_COLUMNS, (4, 2, 8)], [2, 2], "a function's result must have exactly 12 bytes, got 8"),
        ([(4, 1, 16)], [1], "d must hold at least 2 elements, got 1"),
        ([BESIDE], [6], "must lie beside a whole one with elements of as many bytes"),
        ([WHOLE, (2, 3, 1)], [12], "must lie beside a whole one with elements of as many bytes"),
        ([WHOLE, BY_COLUMNS, BESIDE], [6, 2], "must lie beside a whole one with elements of as"),
        ([WHOLE, BESIDE, BESIDE], [12], "must lie beside a whole one with elements of as many"),
        ([WHOLE, (4, 4, 1)], [6, 6], "result must be whole, reduced, or beside another, got 4"),
        ([(2, 0, 1)], [6], "bytes of a function's first result must be those of d, got 2"),
        ([], [6], "function_results must be one to six times three numbers, got 0"),
        ([WHOLE, (4, 1, 0)], [6, 2], "be 8, or 16 columns of one product, got 0"),
        ([WHOLE, (4, 2, 16)], [6, 3], "be 8, or 16 columns of one product, got 16"),
        ([(4, 0, 8)], [6], "be 8, or 16 columns of one product, got 8"),
    ],
    ids=str,
)
def test_results_that_lie_beside_each_other(worker, results, sizes, says):
    attributes = GEMM | {"function": "f", "function_results": [n for x in results for n in x]}
    buffers = [Buffer("f32", (size,)) for size in sizes]
    assert says in run(worker, "gemm", attributes, [numbers(2, 4), numbers(4, 3)], *buffers)


def test_strides_that_no_buffer_bears_out(worker):
    for change in (
        {"m": 1, "a_ld": 2**62},
        {"a_outer_stride": 2**40},
        {"b_inner_stride": 2**63 - 1},
    ):
        d = Buffer("f32", (change.get("m", 2), 3))
        said = run(worker, "gemm", GEMM | change, [numbers(2, 4), numbers(4, 3)], d)
        assert "stride must be less than 2^36 where none follows" in said
    said = run(worker, "blas", BLAS | {"a_stride": 2**60}, [numbers(1)] * 2, Buffer("f32", (1,)))
    assert "a_stride must be less than 2^59" in said


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"batch": 4, "a_outer_stride": 2**62}, "a"),
        ({"batch": 2, "batch_inner": 2, "b_inner_stride": 2**63 - 1}, "b"),
        ({"a_ld": 2**61}, "a"),
        ({"gated": True, "up_offset": 2**62} | FUNCTION, "b"),
    ],
    ids=str,
)
def test_strides_of_what_has_no_elements(worker, change, name):
    """No buffer holds what they reach, and what they reach has no address."""
    attributes = GEMM | {"k": 0} | change
    batch = attributes["batch"]
    said = run(worker, "gemm", attributes, [numbers(0), numbers(0)], Buffer("f32", (batch, 2, 3)))
    assert f"{name} must span fewer than 2^36 elements where it has none" in said


@pytest.mark.parametrize(
    ("change", "results", "says"),
    [
        ({}, [("f32", (7,))], "d must hold exactly 6 elements, got 7"),
        ({}, [("f32", (6,)), ("s4", (512,))], "workspace must be u8"),
    ],
    ids=str,
)
def test_results_of_a_product(worker, change, results, says):
    said = run(
        worker,
        "gemm",
        GEMM | change,
        [numbers(2, 4), numbers(4, 3)],
        *(Buffer(*x) for x in results),
    )
    assert says in said


@pytest.mark.parametrize(
    ("change", "shared"),
    [({}, 0), ({}, 1), ({"beta": 1.0}, 0), (FUNCTION, 1)],
    ids=str,
)
def test_a_result_in_the_place_of_a_factor(worker, change, shared):
    attributes = GEMM | {"n": 4, "m": 4, "b_ld": 4} | change
    operands = [numbers(4, 4)] * (3 if "beta" in change else 2)
    said = run(worker, "gemm", attributes, operands, Buffer("f32", (4, 4), shares=shared))
    assert f"operand {shared} must not overlap result 0" in said


def test_a_result_in_the_place_of_c(worker):
    attributes = GEMM | {"n": 4, "m": 4, "b_ld": 4, "beta": 1.0}
    operands = [numbers(4, 4)] * 3
    d = Buffer("f32", (4, 4), shares=2)
    assert run(worker, "gemm", attributes, operands, d) == ""
    x = operands[0].array()
    np.testing.assert_array_equal(d.array(), x @ x + x)


def test_results_in_one_place(worker):
    attributes = GEMM | {"n": 4, "m": 4, "b_ld": 4}
    attributes |= {"function": "f", "function_reads": [0, 4, 0, 0, 0, 0, 4, 4, 1]}
    attributes["function_results"] = [*WHOLE, *WHOLE]
    results = [Buffer("f32", (4, 4), shares=2) for _ in range(2)]
    assert "results must not overlap" in run(
        worker, "gemm", attributes, [numbers(4, 4)] * 3, *results
    )


def test_only_a_single_element_is_a_kernel(worker):
    """What a program has after its operands, of kernels that it carries."""
    operands = [numbers(2, 4), numbers(4, 3)]
    kernel, none = Buffer.of(np.ones(1, bool), "pred"), Buffer.of(np.ones(0, bool), "pred")
    d = Buffer("f32", (2, 3))
    assert not run(worker, "gemm", GEMM, [*operands, kernel, kernel], d)
    np.testing.assert_array_equal(d.array(), operands[0].array() @ operands[1].array())
    assert run(worker, "gemm", GEMM, [*operands, none], d)
    assert run(worker, "gemm", GEMM, [*operands, kernel, numbers(1)], d)


# --- grouped products -----------------------------------------------------------------------------


def ragged_operands(k=5, groups=2, num_sizes=2):
    sizes = Buffer.of(np.full(num_sizes, 3, np.int32), "s32")
    return [numbers(6, k), numbers(groups, k, 4), sizes, Buffer.of(np.zeros(1, np.int32), "s32")]


@pytest.mark.parametrize("dtype", ["s4", "u4", "s8", "f32", "token", "unknown"])
def test_a_workspace_is_bytes(worker, dtype):
    """Packed types have fewer bytes than elements."""
    attributes = RAGGED | {"gathered": True, "a_rows": 6}
    operands = [*ragged_operands(), Buffer.of(np.arange(6, dtype=np.int32), "s32")]
    workspace = Buffer(dtype, (6 * 5 * 4,))
    said = run(worker, "ragged", attributes, operands, Buffer("f32", (6, 4)), workspace)
    assert "workspace must be u8, got XLA type" in said


def test_a_gather_of_more_bytes_than_there_are(worker):
    """Its rows are few, and what it gathers them into would have 2^64 bytes."""
    most = 2**31 - 1
    attributes = RAGGED | {"form": "contraction", "gathered": True, "m": most, "k": most, "n": 0}
    operands = ragged_operands()
    said = run(worker, "ragged", attributes, [*operands, operands[2]], Buffer("f32", (2, 0)))
    assert "must have fewer than 2^59 elements" in said


def test_no_more_groups_than_sizes(worker):
    """With K = 0 nothing else holds them."""
    attributes = RAGGED | {"k": 0, "groups": 2**31 - 1}
    said = run(worker, "ragged", attributes, ragged_operands(k=0), Buffer("f32", (6, 4)))
    assert "groups must be at most num_sizes=2, got 2147483647" in said


# Of operand 0, four bytes each: a row of four for each of two groups.
BY_GROUP = [0, 4, 0, 0, 4, 0, 0, 6, 1]


@pytest.mark.parametrize(
    ("change", "elements", "result", "says"),
    [
        ({}, 8, 24, "host cannot run this: it has no function"),
        ({}, 7, 24, "operand 0 of the function must hold all that is read of it"),
        ({"groups": 0}, 0, 24, "host cannot run this: it has no function"),
        ({}, 8, 23, "a function's result must have exactly 96 bytes, got 92"),
        ({"function_results": [*WHOLE, *BY_COLUMNS]}, 8, 12, "must be whole in a grouped product"),
        ({"function_reads": [*BY_GROUP[:2], -1, *BY_GROUP[3:]]}, 9, 24, "must hold all that is"),
        ({"function_reads": [*BY_GROUP[:4], 2**62, *BY_GROUP[5:]]}, 8, 24, "must hold all that is"),
        ({"form": "contraction"}, 8, 24, "epilogue must be empty when form is contraction"),
        ({"function": "x; y"}, 8, 24, "function must be a name, got x; y"),
    ],
    ids=str,
)
def test_a_function_of_a_grouped_product(worker, change, elements, result, says):
    function = {"function": "f", "function_reads": BY_GROUP, "function_results": [*WHOLE, *WHOLE]}
    attributes = RAGGED | function | change
    operands = [*ragged_operands(groups=attributes["groups"]), numbers(elements)]
    results = Buffer("f32", (6, 4)), Buffer("f32", (result,))
    assert says in run(worker, "ragged", attributes, operands, *results)


def test_the_result_of_a_grouped_product(worker):
    said = run(worker, "ragged", RAGGED, ragged_operands(), Buffer("f32", (25,)))
    assert "d must hold exactly 24 elements, got 25" in said


# --- transpositions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"out_col_stride": 4}, False),  # It would write some elements twice and others never.
        ({"in_row_stride": 4}, False),
        ({"rows": 2**31 - 1, "in_row_stride": 2**62, "out_col_stride": 2**31 - 1}, False),
        ({"batch_out_strides": [7]}, False),
        ({"batch_out_strides": [3], "out_col_stride": 6}, True),
        ({"rows": 1, "in_row_stride": 99, "out_col_stride": 1, "batch_in_strides": [5]}, False),
        ({"batch_extents": [2, 1], "batch_out_strides": [15, 15]}, False),
        ({"batch_extents": [2, 1], "batch_in_strides": [15, 1]}, False),
    ],
    ids=str,
)
def test_a_transposition_permutes_a_packed_array(change, fits):
    if modules.cuda is None:
        pytest.skip(modules.reason("cuda"))
    transposition = {"element_bytes": 4, "rows": 3, "cols": 5, "in_row_stride": 5}
    transposition |= {"out_col_stride": 3, "batch_extents": [2], "batch_in_strides": [15]}
    transposition |= {"batch_out_strides": [15]} | change
    assert (modules.cuda.reject_transposition(transposition) == "") == fits


@pytest.mark.parametrize("dtype", ["unknown", "token", "f64", "s4"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_fragments_are_of_integers(dtype, position):
    if modules.cuda is None:
        pytest.skip(modules.reason("cuda"))
    buffers = [Buffer("s32", (32, 4)), Buffer("s32", (32, 2)), Buffer("s32", (32, 4))]
    buffers[position] = Buffer(dtype, (32, 4))
    attributes = {"shape": "m16n8k16", "dtype": "f16", "accumulator": "f32"}
    call = Call("tcgemm_fragment_mma", "", attributes, buffers[:2], buffers[2:])
    with Worker(modules.cuda.__file__) as worker:
        outcome = execute(worker, call)
    assert outcome.code == INVALID_ARGUMENT
    assert "fragment_mma: " + "abd"[position] in outcome.message
