import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import selection
from jax_tcgemm.inspect import fragments
from jax_tcgemm.kernels import Instance
from jax_tcgemm.kernels.program import carried
from jax_tcgemm.system import modules

CASES = fragments.fragment_cases()
WMMA_CASES = [case for case in CASES if fragments.is_wmma(case[0])]
MMA_CASES = [
    ("m16n8k16", "f16", "f32"),
    ("m16n8k16", "f16", "f16"),
    ("m16n8k16", "bf16", "f32"),
    ("m16n8k8", "tf32", "f32"),
    ("m16n8k32", "s8", "s32"),
    ("m16n8k32", "u8", "s32"),
]


def case_id(value):
    return "-".join(value) if isinstance(value, tuple) else None


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_each_element_is_held_once(case):
    where = fragments.fragment_map(*case)
    shape, _, operand = case
    assert where.shape == fragments.fragment_shape(shape, operand)
    distinct = where.size // fragments.LANES
    slots = where["lane"] * distinct + where["index"]
    assert sorted(slots.ravel()) == list(range(where.size))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_elements_is_the_inverse_of_map(case):
    where = fragments.fragment_map(*case)
    elements = fragments.fragment_elements(*case)
    assert elements.shape == (fragments.LANES, fragments.fragment_size(*case))
    copies = 0
    for (lane, index), element in zip(np.ndindex(elements.shape), elements.ravel(), strict=True):
        held = where[element["row"], element["col"]]
        assert held["lane"] == lane
        assert index % (where.size // fragments.LANES) == held["index"]
        copies += 1
    assert copies % where.size == 0


def test_published_wmma_accumulator():
    where = fragments.fragment_map("m16n16k16", "f32", "c")
    assert where[1, 12].item() == (6, 4)
    for row, col in np.ndindex(16, 16):
        lane = row % 8 * 4 + col % 8 // 2
        index = col // 8 * 4 + row // 8 * 2 + col % 2
        assert where[row, col].item() == (lane, index)


def test_documented_mma_m16n8k16():
    """PTX ISA, matrix fragments for mma.m16n8k16 with floating point type."""
    a = fragments.fragment_elements("m16n8k16", "f16", "a")
    b = fragments.fragment_elements("m16n8k16", "bf16", "b")
    c = fragments.fragment_elements("m16n8k16", "f32", "c")
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(8):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            col = thread * 2 + (i & 1) + (0 if i < 4 else 8)
            assert a[lane, i].item() == (row, col)
        for i in range(4):
            assert b[lane, i].item() == (thread * 2 + (i & 1) + (0 if i < 2 else 8), group)
            assert c[lane, i].item() == (group if i < 2 else group + 8, thread * 2 + (i & 1))


def test_documented_mma_m16n8k8_tf32():
    a = fragments.fragment_elements("m16n8k8", "tf32", "a")
    b = fragments.fragment_elements("m16n8k8", "tf32", "b")
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(4):
            row = group if i in (0, 2) else group + 8
            assert a[lane, i].item() == (row, thread if i < 2 else thread + 4)
        for i in range(2):
            assert b[lane, i].item() == (thread if i == 0 else thread + 4, group)


def test_documented_mma_m16n8k32_s8():
    a = fragments.fragment_elements("m16n8k32", "s8", "a")
    b = fragments.fragment_elements("m16n8k32", "u8", "b")
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(16):
            row = group if i < 4 or 8 <= i < 12 else group + 8
            assert a[lane, i].item() == (row, thread * 4 + (i & 3) + (0 if i < 8 else 16))
        for i in range(8):
            assert b[lane, i].item() == (thread * 4 + (i & 3) + (0 if i < 4 else 16), group)


def test_float16_operands_are_repeated():
    assert fragments.fragment_size("m16n16k16", "f16", "a") == 16
    assert fragments.fragment_size("m16n16k16", "bf16", "a") == 8
    elements = fragments.fragment_elements("m16n16k16", "f16", "a")
    assert (elements[:, :8] == elements[:, 8:]).all()


def test_grid():
    lines = fragments.fragment_grid("m16n16k16", "f16", "c").splitlines()
    assert lines[0] == "WMMA m16n16k16 f16 c: 16 x 16, lane:index of each element"
    assert len(lines) == 18
    assert lines[3].split()[13] == "6:4"  # row 1, column 12, after the row's number


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m16n16k32", "f16", "a"), "shape must be one of m16n16k16"),
        (("m16n16k16", "f16", "d"), "operand must be a, b or c, got operand='d'"),
        (("m16n16k16", "f64", "a"), "dtype of a must be one of f16, bf16, s8, u8"),
        (("m8n8k4", "f32", "c"), "dtype of c must be one of f64"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        fragments.fragment_map(*arguments)


def kernels_of(*case):
    """What a program brings for a probe."""
    device = selection.target_device("cuda").query()
    sources = modules.cuda.fragment_kernels(*case, device)
    return [carried(Instance("wmma", (header,), *source)) for header, *source in sources]


@pytest.mark.gpu
@pytest.mark.parametrize("column_major", [False, True], ids=["row", "col"])
@pytest.mark.parametrize("case", WMMA_CASES, ids=case_id)
def test_wmma_map_on_gpu(gpu, case, column_major):
    shape, dtype, operand = case
    out = jax.ShapeDtypeStruct((fragments.LANES, fragments.fragment_size(*case)), jnp.int32)

    @jax.jit
    def probe():
        return jax.ffi.ffi_call("tcgemm_fragment_probe", out)(
            *kernels_of(*case), shape=shape, dtype=dtype, operand=operand, column_major=column_major
        )

    with jax.default_device(gpu):
        held = np.asarray(probe())
    elements = fragments.fragment_elements(*case)
    _, cols = fragments.fragment_shape(shape, operand)
    np.testing.assert_array_equal(held, elements["row"] * cols + elements["col"])


@pytest.mark.gpu
@pytest.mark.parametrize("case", MMA_CASES, ids=case_id)
def test_mma_map_on_gpu(gpu, case):
    """Spread a and b over lanes by the map, multiply, collect d by the map."""
    shape, dtype, accumulator = case
    rng = np.random.default_rng(0)
    low, high = (0, 16) if dtype == "u8" else (-8, 8)

    def matrix(operand):
        return rng.integers(low, high, fragments.fragment_shape(shape, operand), np.int32)

    def spread(values, operand):
        elements = fragments.fragment_elements(shape, dtype, operand)
        return jax.device_put(values[elements["row"], elements["col"]], gpu)

    a, b = matrix("a"), matrix("b")
    size = fragments.fragment_size(shape, accumulator, "c")
    out = jax.ShapeDtypeStruct((fragments.LANES, size), jnp.int32)

    @jax.jit
    def multiply(a, b):
        return jax.ffi.ffi_call("tcgemm_fragment_mma", out)(
            *(a, b, *kernels_of(*case)), shape=shape, dtype=dtype, accumulator=accumulator
        )

    held = np.asarray(multiply(spread(a, "a"), spread(b, "b")))
    where = fragments.fragment_map(shape, accumulator, "c")
    np.testing.assert_array_equal(held[where["lane"], where["index"]], a @ b)
