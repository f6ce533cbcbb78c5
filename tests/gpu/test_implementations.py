"""Every CUDA implementation by name, over types, layouts, shapes, batches and configs."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.problem.dtypes import DTYPES

from .gemm_call import (
    ALL_TYPES,
    CASES,
    CONFIG_CASES,
    LARGE_CASES,
    LAYOUTS,
    PLAIN,
    SPLIT_CASES,
    Case,
    Types,
    accepted_layouts,
    call,
    first_accepted,
    implementations,
    make_inputs,
    mismatch,
    rejection,
    run_all,
    split_base,
    wide,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

TENSOR_CORE_HALF = ("f16 f16 f32", "f16 f32 f32", "bf16 bf16 f32", "bf16 f32 f32")

# What each implementation promises to run, so that refusing it is a failure.
REQUIRED = {
    "simt_naive": ("f32 f32 f32", "f64 f64 f64", "c64 c64 f32"),
    "simt_tiled": ("f32 f32 f32", "f64 f64 f64", "c64 c64 f32"),
    "wmma_naive": (
        *TENSOR_CORE_HALF,
        *("f16 f16 f16", "f32 f32 tf32", "f64 f64 f64", "s8 s32 s32", "u8 s32 s32"),
    ),
    "wmma_tiled": (
        *TENSOR_CORE_HALF,
        *("f16 f16 f16", "f32 f32 tf32", "f64 f64 f64", "s8 s32 s32", "u8 s32 s32"),
    ),
    "mma_sync": (
        *(*TENSOR_CORE_HALF, "f32 f32 tf32"),
        *("s8 s32 s32", "u8 s32 s32", "s8,u8 s32 s32", "u8,s8 s32 s32"),
    ),
    "wgmma": (
        *(*TENSOR_CORE_HALF, "f32 f32 tf32"),
        *("s8 s32 s32", "u8 s32 s32", "s8,u8 s32 s32", "u8,s8 s32 s32"),
    ),
    "cublaslt": (
        *TENSOR_CORE_HALF,
        *("f16 f16 f16", "f32 f32 f32", "f32 f32 tf32", "f64 f64 f64", "s8 s32 s32"),
        *("c64 c64 f32", "c64 c64 tf32", "c128 c128 f64"),
    ),
}

BY_NAME = implementations()
# What runs by name alone: for each implementation and types, the first config that takes them.
RUNS = {
    (name, types): found
    for name in BY_NAME
    for types in ALL_TYPES
    if (found := first_accepted(name, types)) is not None
}
TYPE_RUNS = [
    pytest.param(name, types, config, layouts, id=f"{name}-{types}")
    for (name, types), (config, layouts) in RUNS.items()
]
LAYOUT_RUNS = [
    pytest.param(name, types, config, layout, id=f"{name}-{types}-{layout}")
    for (name, types), (config, layouts) in RUNS.items()
    for layout in layouts
]


def config_runs():
    """Every config with each inputs and accumulator it takes; the results' dtypes take turns."""
    for name, configs in BY_NAME.items():
        for config_idx, config in enumerate(configs):
            accepted = {}
            for types in ALL_TYPES:
                if not split_base(config) and (layouts := accepted_layouts(name, config, types)):
                    accepted.setdefault((types.inputs, types.compute), []).append((types, layouts))
            for same in accepted.values():
                types, layouts = same[config_idx % len(same)]
                yield pytest.param(name, config, types, layouts, id=f"{name}-{config}-{types}")


# cuBLASLt's configs have a test of their own, and so have those that only split K.
CONFIG_RUNS = [each for each in config_runs() if each.values[0] != "cublaslt"]
RANK_RUNS = [each for each in config_runs() if each.values[0] == "cublaslt"]
SPLIT_RUNS = [
    pytest.param(name, base, id=f"{name}-{base}")
    for name, configs in BY_NAME.items()
    for base in configs
    if base in map(split_base, configs)
]


def split_by_acceptance(name, config, inputs):
    """Those inputs that the config runs; each of the others must be refused with a reason."""
    accepted = [each for each in inputs if not rejection(name, config, each.problem)]
    assert accepted, f"{name} {config} refuses every case"
    return accepted


def assert_right(results, inputs):
    wrong = [
        text for got, each in zip(results, inputs, strict=True) if (text := mismatch(got, each))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_implementation_has_promises():
    assert set(BY_NAME) == set(REQUIRED)


@pytest.mark.parametrize("name", REQUIRED)
def test_runs_what_it_promises(name):
    refused = []
    for names in REQUIRED[name]:
        types = Types(*names.split())
        # cuBLASLt's integer kernels have one layout; everything else has all four.
        layouts = ["NT"] if (name, types.inputs) == ("cublaslt", "s8") else list(LAYOUTS)
        if RUNS.get((name, types), ("", []))[1] != layouts:
            refused.append(types)
    assert not refused


@pytest.mark.parametrize(("name", "types", "config", "layout"), LAYOUT_RUNS)
def test_values(name, types, config, layout):
    inputs = split_by_acceptance(name, config, [make_inputs(types, layout, c) for c in CASES])
    assert_right(run_all(inputs, implementation=name, config=config), inputs)


@pytest.mark.parametrize(("name", "config", "types", "layouts"), CONFIG_RUNS)
def test_config(name, config, types, layouts):
    inputs = [make_inputs(types, layout, case) for layout in layouts for case in CONFIG_CASES]
    inputs += [make_inputs(types, layouts[0], case) for case in LARGE_CASES]
    inputs = split_by_acceptance(name, config, inputs)
    assert_right(run_all(inputs, implementation=name, config=config), inputs)


@pytest.mark.parametrize(("name", "base"), SPLIT_RUNS)
def test_split_configs(name, base):
    """Numbers of parts, of very many some for each base; types and layouts take turns."""
    kinds = [types for types in ALL_TYPES if accepted_layouts(name, base, types)]
    splits = [config for config in BY_NAME[name] if split_base(config) == base]
    step = max(len(splits) // 9, 1)
    splits = splits[BY_NAME[name].index(base) % step :: step]
    for split_idx, config in enumerate(splits):
        types = kinds[split_idx % len(kinds)]
        inputs = [
            make_inputs(types, LAYOUTS[(split_idx + case_idx) % 4], case)
            for case_idx, case in enumerate(SPLIT_CASES)
        ]
        inputs = split_by_acceptance(name, config, inputs)
        assert_right(run_all(inputs, implementation=name, config=config), inputs)


@pytest.mark.parametrize(("name", "config", "types", "layouts"), RANK_RUNS)
def test_cublaslt_rank(name, config, types, layouts):
    """How many algorithms there are for a problem is known only to the library on the device."""
    for case in (PLAIN, Case("all_odd", 257, 255, 131)):
        inputs = make_inputs(types, layouts[-1], case)
        if rejection(name, config, inputs.problem):
            continue
        try:
            results = run_all([inputs], implementation=name, config=config)
        except jax.errors.JaxRuntimeError as error:
            if "cuBLASLt proposes" not in str(error):
                raise
        else:
            assert_right(results, [inputs])


@pytest.mark.parametrize(("name", "types", "config", "layouts"), TYPE_RUNS)
def test_result_apart_from_c(name, types, config, layouts):
    """C and D in different memory, C unchanged."""
    case = Case("alpha_beta_odd", 77, 51, 40, batch=(1, 2), alpha=2.0, beta=-1.0)
    inputs = make_inputs(types, layouts[0], case)
    if rejection(name, config, inputs.problem):
        inputs = make_inputs(types, layouts[0], Case("aligned_beta", 64, 64, 64, beta=-1.0))

    @jax.jit
    def program(a, b, c):
        d = call(inputs.problem, a, b, c, implementation=name, config=config, in_place=False)
        return d, c + 0

    d, c = jax.device_get(program(inputs.a, inputs.b, inputs.c))
    assert_right([d], [inputs])
    np.testing.assert_array_equal(c, inputs.c)


# Spacing of the numbers after 1 in each accumulator, and in each dtype of a result.
ACCUMULATOR_EPS = {"f16": 2.0**-10, "f32": 2.0**-23, "tf32": 2.0**-23, "f64": 2.0**-52, "s32": 0.0}
OUT_EPS = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23, "f64": 2.0**-52}
OUT_EPS |= {"c64": OUT_EPS["f32"], "c128": OUT_EPS["f64"], "s32": 0.0}
REAL_CASES = [Case("long_k", 128, 128, 4096), Case("odd_long_k", 193, 160, 1031)]


@pytest.mark.parametrize(("name", "types", "config", "layouts"), TYPE_RUNS)
def test_accuracy(name, types, config, layouts):
    """Normally distributed operands against float64.

    Element by element: |error| <= eps(out) |D| + 16 eps(accumulator) |A||B|, and for TF32, which
    rounds (or cuts) each operand to 11 bits, 2^-9 |A||B| more. As a whole:
    ||error|| <= (eps(out) + 4 sqrt(K) eps(accumulator) [+ 2^-9]) ||D||.
    """
    inputs = [make_inputs(types, lay, case, real=True) for lay in layouts for case in REAL_CASES]
    inputs = split_by_acceptance(name, config, inputs)
    eps, out_eps = ACCUMULATOR_EPS[types.compute], OUT_EPS[types.out]
    operand_eps = 2.0**-9 if types.compute == "tf32" else 0.0
    for got, each in zip(run_all(inputs, implementation=name, config=config), inputs, strict=True):
        error = np.abs(wide(got) - each.expected)
        absolute = np.matmul(np.abs(wide(each.a_values)), np.abs(wide(each.b_values)))
        bound = out_eps * np.abs(each.expected) + (16 * eps + operand_eps) * absolute
        assert np.all(error <= bound), f"{each.problem}: {np.nanmax(error - bound)} over the bound"
        relative = np.linalg.norm(error) / np.linalg.norm(each.expected)
        assert relative <= out_eps + 4 * each.problem.k**0.5 * eps + operand_eps, each.problem


@pytest.mark.parametrize(("name", "types", "config", "layouts"), TYPE_RUNS)
def test_repeats_bit_for_bit(name, types, config, layouts):
    """Also where K is long and the tiles are few, which invites split-K."""
    cases = [Case("few_tiles", 64, 64, 8192), Case("odd_tiles", 257, 136, 1000)]
    inputs = [make_inputs(types, layouts[0], case, real=True) for case in cases]
    inputs = split_by_acceptance(name, config, inputs)
    first = run_all(inputs, implementation=name, config=config)
    for _ in range(3):
        again = run_all(inputs, implementation=name, config=config)
        for x, y in zip(first, again, strict=True):
            assert x.tobytes() == y.tobytes()


def first_types(name):
    """The first types that the implementation's default config runs."""
    return next(
        t for (n, t), (config, _) in RUNS.items() if (n, config) == (name, BY_NAME[name][0])
    )


def small_inputs(name, case):
    types = first_types(name)
    return make_inputs(types, RUNS[name, types][1][0], case)


@pytest.mark.parametrize("name", BY_NAME)
def test_runs_on_the_stream_of_its_operands(name):
    """A is ready only after a long computation, which a launch on another stream would overtake."""
    inputs = small_inputs(name, PLAIN)
    config = BY_NAME[name][0]

    @jax.jit
    def program(a, b, c, slow):
        slow = jax.lax.fori_loop(0, 20, lambda _, x: x @ x, slow)
        a = a + slow[0, 0].astype(a.dtype)  # slow stays 0.
        return call(inputs.problem, a, b, c, implementation=name, config=config)

    slow = jnp.zeros((4096, 4096), jnp.float32)
    wrong = np.full_like(inputs.a, 1)
    for a in (wrong, inputs.a):  # The first run leaves a wrong A in the memory of the second.
        d = jax.device_get(program(a, inputs.b, inputs.c, slow))
    assert_right([d], [inputs])


@pytest.mark.parametrize("name", BY_NAME)
def test_runs_from_several_threads(name):
    """First calls of different shapes at once."""
    inputs = [small_inputs(name, Case(f"threads_{i}", 64, 64 + 8 * i, 64)) for i in range(8)]
    config = BY_NAME[name][0]

    def run(each):
        return run_all([each], implementation=name, config=config)[0]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, inputs * 4))
    assert_right(results, inputs * 4)


@pytest.mark.parametrize("name", BY_NAME)
def test_public_matmul(name):
    """`jax_tcgemm.matmul` by name under jit, vmap and grad."""
    types = first_types(name)
    rng = np.random.default_rng(0)
    a = rng.integers(-2, 3, (3, 72, 40)).astype(DTYPES[types.a])
    b = rng.integers(-2, 3, (40, 56)).astype(DTYPES[types.b])
    # Full float32 has to be asked for; for everything else the precision says nothing.
    precision = None if types.compute == "tf32" else "highest"

    def product(a, b):
        return jax_tcgemm.matmul(
            a,
            b,
            implementation=name,
            precision=precision,
            preferred_element_type=DTYPES[types.out],
        )

    expected = wide(a) @ wide(b)
    np.testing.assert_array_equal(wide(np.asarray(jax.jit(product)(a, b))), expected)
    mapped = jax.jit(jax.vmap(product, in_axes=(0, None)))
    np.testing.assert_array_equal(wide(np.asarray(mapped(a, b))), expected)
    gradient = jax.jit(jax.grad(lambda b: product(a, b).sum().real))(b)
    np.testing.assert_array_equal(
        wide(np.asarray(gradient)), np.broadcast_to(wide(a).sum((0, 1))[:, None], b.shape)
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_handler_refuses_with_the_rule(name):
    """A program that was lowered for what an implementation does not run: an error, no crash."""
    types = Types("f16", "c128", "f64")
    inputs = make_inputs(types, "NN", PLAIN)
    config = BY_NAME[name][0]
    reason = rejection(name, config, inputs.problem)
    assert reason
    refused = selection.Choice(name, config, "as a program may say that nobody chose for")
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        run_all([inputs], implementation=name, config=config, chosen=refused)
    assert "INVALID_ARGUMENT" in str(raised.value)
    assert f"{name} cannot run this: {reason}" in str(raised.value)
