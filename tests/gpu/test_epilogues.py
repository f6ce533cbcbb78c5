"""Every epilogue on the GPU beside JAX in float64: each implementation, type, layout and shape."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from epilogue_call import FORMS, ROUNDING, Fused, check_activation, check_limits, wide

from jax_tcgemm import selection
from jax_tcgemm.problem.activations import ACTIVATIONS
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection.configs import parse_or_none

from .gemm_call import LAYOUTS, choice, implementations, rejection, split_base

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

TYPES = ("bf16", "f16", "bf16 f32", "f16 bf16", "tf32")
# Aligned, one off everything, one tile and more than a GPU has processors, no K, batches.
SHAPES = {
    "aligned": {"m": 256, "n": 256, "k": 256},
    "odd": {"m": 129, "n": 137, "k": 63},
    "odd_long": {"m": 333, "n": 263, "k": 520},
    "rows_of_8": {"m": 77, "n": 200, "k": 40},
    "few_rows": {"m": 3, "n": 520, "k": 128},
    "one_column": {"m": 130, "n": 1, "k": 24},
    "no_k": {"m": 33, "n": 24, "k": 0},
    "batches": {"m": 65, "n": 72, "k": 40, "batch": (2, 3)},
    "batches_of_bias": {"m": 65, "n": 71, "k": 40, "batch": (1, 3), "bias_per_batch": True},
}
MANY_TILES = {"m": 2056, "n": 2056, "k": 128}

# What an implementation runs of what, so that refusing it is a failure.
HAND_WRITTEN = ("wgmma", "mma_sync", "wmma_tiled", "wmma_naive")
LIBRARY_FORMS = ("bias", "gelu", "gelu_aux", "gelu_bare", "relu", "dgelu")


def run(name: str, calls: list[tuple[str, Fused]], seed=0):
    """The operands and all results of several (config, case), by one program.

    D lies in the memory of an operand where there is one like it; other results and workspaces
    mostly in memory that was filled with NaN and freed.
    """
    drawn = [case.draw(np.random.default_rng([seed, i])) for i, (_, case) in enumerate(calls)]

    def program(drawn):
        return [
            case.call(arrays, choice(name, config, case.problem))
            for (config, case), arrays in zip(calls, drawn, strict=True)
        ]

    poison = [jnp.full(1 << 22, jnp.nan, jnp.float32) for _ in range(8)]
    jax.block_until_ready(poison)
    del poison
    results = jax.device_get(jax.jit(program)(jax.device_put(drawn)))
    return drawn, [[wide(x) for x in result] for result in results]


def check(name: str, calls: list[tuple[str, Fused]]):
    drawn, results = run(name, calls)
    for (config, case), arrays, got in zip(calls, drawn, results, strict=True):
        try:
            case.compare(got, arrays)
        except AssertionError as error:
            raise AssertionError(f"{name}/{config}: {error}") from error


def first_config(name: str, problem: Problem) -> str:
    """The first config that accepts a problem, split or not."""
    configs = implementations()[name]
    found = next((config for config in configs if not rejection(name, config, problem)), None)
    assert found is not None, rejection(name, configs[0], problem)
    return found


def chosen(name: str, problem: Problem) -> selection.Choice:
    return choice(name, first_config(name, problem), problem)


def shapes_of(case: Fused):
    for label, shape in SHAPES.items():
        if "bias_per_batch" not in shape or case.bias != "none":
            yield label, dataclasses.replace(case, **shape)


def in_kernel_configs():
    """Some configs of wgmma of each kind, which run a function themselves."""
    return [
        config
        for config in implementations().get("wgmma", ())
        if not split_base(config) and config in IN_KERNEL
    ]


IN_KERNEL = (
    *("128x256x64_c2x1x1_co", "128x128x64_c1x2x1_pp", "64x64x64_c1x1x1_pp", "128x64x64_c1x1x2_co"),
    *("192x176x64_c1x2x1_co_t", "256x128x64_c1x1x1_co_t", "64x128x64_c1x1x1_pp_t"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", in_kernel_configs())
def test_wgmma_configs_in_the_kernel(config, layout):
    """A third of the forms, in turns of types and shapes; of some many tiles, too."""
    cases = []
    for i, form in enumerate(FORMS):
        turn = i + LAYOUTS.index(layout)
        if turn % 3:
            continue
        shapes = [SHAPES[("odd_long", "rows_of_8", "aligned")[turn // 3 % 3]]]
        shapes += [MANY_TILES] if turn % 7 == 0 else []
        types = ("bf16", "f16 f32")[turn % 2]
        cases += [
            dataclasses.replace(FORMS[form], types=types, layout=layout, **each) for each in shapes
        ]
    check("wgmma", [(config, case) for case in cases])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_forms_in_every_shape(name, form):
    """Types and layouts take turns, from another start for each form; one program for all."""
    calls = []
    for i, (_, case) in enumerate(shapes_of(FORMS[form]), list(FORMS).index(form)):
        types, layout = TYPES[i % len(TYPES)], LAYOUTS[i % len(LAYOUTS)]
        case = dataclasses.replace(case, types=types, layout=layout)
        calls.append((first_config(name, case.problem), case))
    check(name, calls)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_every_type_and_layout(name, types):
    calls = []
    for form in ("gelu_aux", "dsilu_sums", "gated_all", "dgated_sums"):
        for i, layout in enumerate(LAYOUTS):
            shape = SHAPES[("aligned", "odd")[i % 2]]
            case = dataclasses.replace(FORMS[form], types=types, layout=layout, **shape)
            calls.append((first_config(name, case.problem), case))
    check(name, calls)


@pytest.mark.parametrize("name", ["wgmma", "mma_sync"])
def test_every_config(name):
    """Each config that splits nothing, and each number of splits once, in one program."""
    configs = {
        (parse_or_none(c).num_splits if split_base(c) else c): c for c in implementations()[name]
    }
    calls = []
    for i, config in enumerate(configs.values()):
        form, types = ("gelu_aux", "gated_all", "dgated_sums")[i % 3], ("bf16", "tf32")[i % 2]
        case = dataclasses.replace(FORMS[form], types=types, m=140, n=200, k=520)
        calls += [(config, case)] if not rejection(name, config, case.problem) else []
    check(name, calls)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", LIBRARY_FORMS)
def test_cublaslt(form, layout):
    types = ("bf16", "f16")[LAYOUTS.index(layout) % 2]
    for label, case in shapes_of(dataclasses.replace(FORMS[form], types=types, layout=layout)):
        reason = rejection("cublaslt", "heuristic0", case.problem)
        if label == "aligned":
            assert not reason
        if not reason:
            drawn, ((got, *rest),) = run("cublaslt", [("heuristic0", case)])
            arrays = drawn[0]
            # Its gelu is an approximation of the hardware's tanh: absolute, not relative, accuracy.
            # Where rows are not aligned, most of its algorithms round to the type of D, too, before
            # they add the bias.
            rounded = 0.0
            if case.bias != "none" and label != "aligned":
                product = case.parts(arrays)["z"] - wide(arrays["bias"])[:, None]
                rounded = 1.2 * ROUNDING[case.out_dtype] * np.abs(product)
            for x, want in zip([got, *rest], case.expected(arrays), strict=True):
                limit = 2**-8 + 2**-7 * np.abs(want) + rounded
                assert (np.abs(x - want) <= limit).all(), case.problem


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["wgmma", "wmma_tiled"])
def test_each_activation_is_that_of_jax(name, activation):
    for types, rtol in {"tf32": 2e-5, "bf16": 2**-8, "f16": 2**-10}.items():
        choose = functools.partial(chosen, name)
        check_activation(choose, activation, types, rtol, 2e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_numbers_give_limits_and_nan_stays(activation):
    check_limits(functools.partial(chosen, "wgmma"), activation, "tf32")


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_column_sums_are_the_same_each_time(name):
    case = dataclasses.replace(FORMS["dsilu_sums"], m=1500, n=700, k=64)
    config = first_config(name, case.problem)
    first = run(name, [(config, case)])[1][0]
    for _ in range(3):
        for x, y in zip(run(name, [(config, case)])[1][0], first, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_nothing_is_read_that_is_not_there(name):
    """With no bias, C or aux the results do not depend on what lies behind the operands."""
    case = dataclasses.replace(FORMS["gelu_bare"], m=100, n=104, k=24)
    arrays = case.draw(np.random.default_rng(0))
    got = case.run(arrays, chosen(name, case.problem))
    case.compare(got, arrays)
    assert np.isfinite(got[0]).all()
