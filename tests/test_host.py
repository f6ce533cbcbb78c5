"""What the host implementation computes: csrc/cpu, through the FFI call itself."""

import concurrent.futures
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_call import CASES, DEVICE, ISAS, LAYOUTS, Call, check_all, query, wide

from jax_tcgemm.system import modules

pytestmark = pytest.mark.usefixtures("x64")


def skip_without(config):
    reason = modules.cpu.reject("host", config, query(Call(1, 1, 1)), DEVICE)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_dtype_and_layout(isa, case, layout):
    skip_without(isa)
    shapes = [(1, 1, 1), (3, 17, 63), (65, 3, 257), (63, 65, 17)]
    check_all([Call(m, n, k, case, layout, isa) for m, n, k in shapes])


@pytest.mark.parametrize("case", ["f32", "bf16", "f64", "s8", "c64"])
@pytest.mark.parametrize("m", [1, 2, 5, 14, 17, 257])
def test_odd_shapes(case, m):
    shapes = itertools.product((1, 3, 17, 65, 257), (1, 2, 63, 257))
    check_all([Call(m, n, k, case) for n, k in shapes])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["f32", "bf16", "f64", "u8_s8", "c128"])
@pytest.mark.parametrize(
    "shape",
    [(600, 40, 10), (40, 1100, 10), (20, 30, 3001), (530, 530, 520)],
    ids=["blocks of rows", "blocks of columns", "depths of K", "blocks and depths"],
)
def test_more_than_one_block(shape, case, layout):
    Call(*shape, case, layout).check()


@pytest.mark.parametrize("case", ["f32", "f16", "bf16", "f64", "s8", "c64"])
@pytest.mark.parametrize("shape", [(1, 700, 900), (700, 1, 900), (1, 1, 5000), (1, 3, 33)])
def test_vectors(shape, case):
    check_all([Call(*shape, case, layout) for layout in LAYOUTS])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("alpha", "beta"), [(2.0, 0.0), (1.0, 1.0), (-3.0, 2.0), (0.0, 1.0)], ids=str
)
def test_alpha_and_beta(case, alpha, beta):
    check_all([Call(19, 37, k, case, alpha=alpha, beta=beta) for k in (0, 40, 1500)])


def test_fractional_alpha():
    Call(9, 9, 9, alpha=0.1, beta=-0.7).check()


@pytest.mark.parametrize("case", CASES)
def test_no_terms_give_zero(case):
    got = Call(5, 70, 0, case).run()
    np.testing.assert_array_equal(got, np.zeros((1, 5, 70), got.dtype))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (0, 0, 0)])
def test_empty_matrices(shape):
    assert Call(*shape).run().shape == (1, *shape[:2])


def test_empty_batch():
    assert Call(3, 4, 5, batch=(0, 1)).run().shape == (0, 3, 4)


@pytest.mark.parametrize("case", ["f32", "bf16", "s8", "c64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch(case, layout):
    check_all(
        [
            Call(5, 7, 9, case, layout, batch=(1, 300)),
            Call(70, 90, 30, case, layout, batch=(2, 3)),
        ]
    )


@pytest.mark.parametrize(
    ("a_strides", "b_strides"),
    [
        ((0, 0), (0, 0)),
        ((0, 7 * 9), (9 * 5, 0)),
        ((7 * 9, 0), (0, 9 * 5)),
        ((3, 1000), (500, 1)),
    ],
    ids=["both broadcast", "crossed", "crossed back", "overlapping"],
)
def test_batch_strides(a_strides, b_strides):
    Call(7, 5, 9, batch=(3, 4), a_strides=a_strides, b_strides=b_strides).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["f32", "f16", "u8", "c128"])
def test_leading_dimensions(case, layout):
    Call(20, 35, 50, case, layout, a_ld=61, b_ld=83, batch=(1, 2)).check()


@pytest.mark.parametrize("config", ["auto", *ISAS])
@pytest.mark.parametrize("case", ["f32", "f16", "bf16", "tf32", "f64"])
def test_nan_and_infinity_spread_along_their_row(config, case):
    skip_without(config)
    for value in (np.nan, np.inf):
        call = Call(20, 40, 70, case, config=config)
        a, b = (np.array(x) for x in call.operands)
        a[3 * 70 + 11] = value
        b[:] = np.abs(np.where(b == 0, b.dtype.type(1), b))
        d = wide(call.run(a, b), CASES[case][2])
        np.testing.assert_array_equal(d[0, 3], np.full(40, value))
        assert np.isfinite(np.delete(d[0], 3, axis=0)).all()


def test_infinity_times_zero_is_nan():
    call = Call(1, 40, 2)
    a, b = np.array([np.inf, 1], np.float32), np.zeros(80, np.float32)
    assert np.isnan(call.run(a, b)).all()


@pytest.mark.parametrize("config", ["auto", *ISAS])
def test_every_float16_survives(config):
    """A product with the identity returns every float16 as it was: subnormals, infinities."""
    skip_without(config)
    bits = np.arange(2**16, dtype=np.uint16)
    x = bits.view(np.float16)
    finite = np.isfinite(x)
    for start in range(0, 2**16, 2**12):
        part = x[start : start + 2**12]
        d = Call(2**12, 1, 1, "f16", config=config).run(part, np.ones(1, np.float16)).reshape(-1)
        keep = finite[start : start + 2**12]
        np.testing.assert_array_equal(d[keep], part[keep])
        np.testing.assert_array_equal(d[~keep], part[~keep])


@pytest.mark.parametrize("config", ["auto", *ISAS])
@pytest.mark.parametrize("case", ["f32_f16", "f32_bf16"])
def test_rounding_to_half_is_to_nearest_even(config, case):
    skip_without(config)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 40000, dtype=np.uint32).view(np.float32)
    near_half = rng.standard_normal(40000) * np.exp2(rng.integers(-30, 18, 40000))
    x = np.concatenate([x, near_half.astype(np.float32), np.float32([65504, 65519.996, 65520])])
    x = x[~(np.abs(x) < np.finfo(np.float32).tiny)]  # XLA may flush what float32 cannot hold
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(jnp.dtype(CASES[case][2]))
    got = Call(x.size, 1, 1, case, config=config).run(x, np.ones(1, np.float32)).reshape(-1)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_beta_zero_ignores_c():
    """A C that is there although beta == 0 is not read."""
    call = Call(9, 9, 9, beta=0.0)
    got = call.run(*call.operands, np.full(call.shape, np.nan, np.float32))
    np.testing.assert_array_equal(got, call.run())


def test_c_may_be_the_memory_of_d():
    for case in ("f32", "bf16", "c64"):
        call = Call(40, 70, 1500, case, beta=1.0)
        run = jax.jit(functools.partial(call.bind, input_output_aliases={2: 0}), donate_argnums=2)
        got = run(*(jnp.asarray(x) for x in call.operands), jnp.array(call.c))
        np.testing.assert_array_equal(got, call.run())


@pytest.mark.parametrize("case", ["f32", "bf16", "f64", "c64"])
def test_repeats_are_bitwise_equal(case):
    call = Call(200, 300, 1500, case)
    first = call.run()
    for _ in range(5):
        np.testing.assert_array_equal(call.run().view(np.uint8), first.view(np.uint8))


@pytest.mark.parametrize("case", ["f32", "bf16", "s8", "c64"])
def test_an_item_does_not_depend_on_its_batch(case):
    """The order of summation is fixed by the product alone, not by what runs beside it."""
    batched = Call(64, 300, 1500, case, batch=(1, 6), a_strides=(0, 0), b_strides=(0, 0)).run()
    alone = Call(64, 300, 1500, case)
    alone = alone.run(
        *Call(64, 300, 1500, case, batch=(1, 6), a_strides=(0, 0), b_strides=(0, 0)).operands
    )
    for item in batched:
        np.testing.assert_array_equal(item, alone[0])


@pytest.mark.parametrize("isa", ISAS)
def test_int32_sums_wrap(isa):
    skip_without(isa)
    k = 2**17 + 3
    for case, x, y in [("s8", -128, -128), ("u8", 255, 255), ("s8_u8", -128, 255)]:
        a, b, d, *_ = CASES[case]
        got = Call(1, 2, k, case, config=isa).run(np.full(k, x, a), np.full(2 * k, y, b))
        want = np.array(x * y * k, np.int64).astype(d)
        np.testing.assert_array_equal(got, np.full((1, 1, 2), want))


def test_concurrent_calls():
    calls = [Call(m, 90, 400, case) for m in (1, 33, 250) for case in ("f32", "bf16", "s8", "c64")]
    want = [call.run() for call in calls]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for got, expected in zip(pool.map(Call.run, calls), want, strict=True):
                np.testing.assert_array_equal(got, expected)
