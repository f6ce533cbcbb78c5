"""Grouped products with generated functions, emulated: groups end rows and have operands."""

import dataclasses
import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference
from emulated import Emulator, carried
from kernel_instances import wgmma_ragged
from mistakes import Mistake
from mutants import mutants

from jax_tcgemm.device import grouped
from jax_tcgemm.device.fusion import grouped_epilogue
from jax_tcgemm.kernels import nvrtc
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.selection.devices import ASSUMED_GPU

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

BF16, F32, BOOL = (np.dtype(x) for x in (jnp.bfloat16, np.float32, np.bool_))
# Those of form rows; the last one alone is of gated products and gathers rows.
CONFIGS = {
    "128x256x64_c2x1x1_co_t": "128, 256, 2, 1, 1, false, true",
    "128x64x64_c1x1x1_co_t": "128, 64, 1, 1, 1, false, true",
    "256x128x64_c1x2x1_co_t": "256, 128, 1, 2, 1, false, true",
}
SHARES_WEIGHTS = "256x128x64_c1x2x1_co_t"
K, GROUPS, OFFSET = 72, 5, 1
# The first is of a group before those of the weights, the last of one after them; and rows remain.
SIZES = [9, 1, 0, 70, 17, 33, 4]
NUM_ROWS = 50


def everything(acc, scale, bias, column, row, residual, flag):
    """Three results, of three widths, from operands of every kind and both indices."""
    z = acc * scale + bias + column * row
    y = jnp.where(flag, z, -z) + residual
    i, j = (jax.lax.broadcasted_iota(jnp.int32, acc.shape, acc.ndim - d) for d in (2, 1))
    kept = jnp.where((i + j) % 3 == 0, 1, y).astype(jnp.bfloat16)
    return kept, (z * 4).astype(jnp.int8), (y + 1).astype(jnp.float16)


def no_rows(acc, bias):
    """None of its results is of a dtype that is stored by rows."""
    return (acc + bias) > 0, (acc * 2 + bias).astype(jnp.int32) + 1


def gate(acc, up, scale, bias, residual):
    """Three results, of which the last is of one of the products alone."""
    kept = jnp.where(acc > 0, acc * scale, acc) * (up + bias) + residual
    return kept.astype(jnp.bfloat16), (up - acc) >= 0, (up + 1).astype(jnp.float16)


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of a grouped product.

    `kinds`: of each operand "g1" or "gn" for a number or a row for each group, "n", "m1", "mn", and
    its dtype. With a batch, operands marked by a "b" have it.
    """

    function: object
    n: int
    kinds: tuple[tuple[str, np.dtype], ...]
    gated: bool = False
    gathered: bool = False
    num_rows: int = 142
    batch: int | None = None

    @property
    def num_b(self):
        return 2 if self.gated else 1

    @property
    def batch_shape(self):
        return () if self.batch is None else (self.batch,)

    @functools.cached_property
    def operands(self):
        rng, m, n = np.random.default_rng(len(self.kinds)), self.num_rows, self.n
        shapes = {"g1": (GROUPS, 1, 1), "gn": (GROUPS, 1, n), "n": (n,), "m1": (m, 1), "mn": (m, n)}
        found = []
        for kind, dtype in self.kinds:
            own = self.batch_shape if kind.startswith("b") else ()
            name = kind.removeprefix("b")
            own = own or (1,) * len(self.batch_shape) * name.startswith("g")
            numbers = rng.integers(-3, 4, (*own, *shapes[name]))
            found.append(numbers % 2 == 0 if dtype == BOOL else numbers.astype(dtype))
        return found

    @functools.cached_property
    def by_group(self):
        return tuple("g" in kind for kind, _ in self.kinds)

    def given(self, groups):
        """What the function is given, from the groups of each entry's rows, of which -1 is none."""
        for x, is_by_group in zip(self.operands, self.by_group, strict=True):
            if is_by_group:
                every = np.broadcast_to(x, (len(groups), *x.shape[-3:]))
                pairs = zip(every, np.maximum(groups, 0), strict=True)
                x = np.stack([own[numbers, 0] for own, numbers in pairs])
                x = x.reshape(*self.batch_shape, *x.shape[1:])
            yield jnp.asarray(x)

    @functools.cached_property
    def folded(self):
        """The problem, and which operands it takes."""
        shape = *self.batch_shape, self.num_rows, self.n
        accs = [jax.ShapeDtypeStruct(shape, F32)] * self.num_b
        groups = np.zeros((self.batch or 1, self.num_rows), int)
        product = grouped.Product(
            options=CallOptions("ragged_dot"),
            form="rows",
            batches=(self.batch_shape,) * 3,
            m=self.num_rows,
            n=self.n,
            k=K,
            groups=GROUPS,
            num_sizes=len(SIZES),
            rhs_transposed=False,
            gated=self.gated,
            gathered_rows=NUM_ROWS if self.gathered else None,
            lhs_dtype=BF16,
            rhs_dtype=BF16,
            result_dtype=F32,
            precision=None,
        )
        jaxpr = jax.make_jaxpr(self.function)(*accs, *self.given(groups))
        shapes = tuple(x.shape for x in self.operands)
        whole = grouped_epilogue.Product(product, jaxpr, shapes, self.by_group)
        found = whole.folded(ASSUMED_GPU)
        assert not isinstance(found, str), found
        return found

    @property
    def configs(self):
        alone = self.gated or self.gathered
        return [SHARES_WEIGHTS] if alone else [*CONFIGS]

    def kernel(self, config):
        function = self.folded.problem.function
        own = wgmma_ragged(CONFIGS[config], f"Function<tcgemm::elementwise::{function.name}>")
        return dataclasses.replace(own, definitions=function.definitions)

    def check(self, emulator, config, **how):
        """All results; rows of no group are zeros in each."""
        problem, used = self.folded.problem, self.folded.operands
        rng, batch = np.random.default_rng(0), self.batch_shape
        halves = (2,) if self.gated else ()
        a = rng.integers(-2, 3, (*batch, NUM_ROWS if self.gathered else self.num_rows, K))
        b = rng.integers(-2, 3, (*batch, GROUPS, K, *halves, self.n))
        sizes = np.stack([np.roll(SIZES, 2 * i) for i in range(self.batch or 1)])
        gather = rng.integers(-2, NUM_ROWS + 2, self.num_rows).astype(np.int32)
        arrays = {
            "a": a.astype(BF16),
            "b": b.astype(BF16),
            "group_sizes": sizes.astype(np.int32),
            "group_offset": np.full(self.batch or 1, OFFSET, np.int32),
        }
        tokens = a.reshape(-1, *a.shape[-2:])
        if self.gathered:
            arrays["gather"] = gather
            inside = (gather >= 0) & (gather < NUM_ROWS)
            tokens = np.where(inside[:, None], a[np.where(inside, gather, 0)], 0)[None]
        for i, number in enumerate(used):
            x = self.operands[number]
            arrays[f"function operand {i}"] = x.view(np.uint8) if x.dtype == BOOL else x
        got = emulator.run(problem, arrays, implementation="wgmma", config=config, **how)
        weights = np.moveaxis(b.reshape(-1, GROUPS, K, self.num_b, self.n), 3, 0)
        groups = np.full((len(sizes), self.num_rows), -1)
        for i, own in enumerate(sizes):
            bounds = reference.bounds(own, self.num_rows, OFFSET, GROUPS)
            for group, (begin, end) in enumerate(bounds):
                groups[i, begin:end] = group
        accs = np.stack(
            [
                [
                    reference.rows(x, w, own, OFFSET)
                    for x, w, own in zip(tokens, both, sizes, strict=True)
                ]
                for both in weights
            ]
        )
        accs = accs.astype(np.float32).reshape(-1, *batch, self.num_rows, self.n)
        expected = self.function(*map(jnp.asarray, accs), *self.given(groups))
        is_there = (groups >= 0).reshape(*batch, self.num_rows, 1)
        for place, number in enumerate(problem.function.order):
            own = np.asarray(expected[number])
            own = np.where(is_there, own, np.zeros_like(own))
            found = got[place].reshape(own.shape)
            if place == 0 and found.dtype.itemsize == 1:
                found = found.view(np.bool_ if own.dtype == BOOL else own.dtype)
            assert found.dtype == own.dtype
            np.testing.assert_array_equal(found, own)


ALL = (("g1", F32), ("gn", BF16), ("n", F32), ("m1", F32), ("mn", BF16), ("mn", BOOL))
GATE = (("gn", F32), ("g1", BF16), ("mn", BF16))
CALLS = {
    "everything": Call(everything, 264, ALL),
    "no rows": Call(no_rows, 136, (("gn", F32),)),
    "batches": Call(
        lambda acc, x, y, z: ((acc * x + y).astype(jnp.float32), (acc + z) > 0),
        *(72, (("bgn", F32), ("g1", F32), ("bmn", BF16))),
        batch=2,
    ),
    "gated": Call(gate, 168, GATE, gated=True),
    "gathered": Call(everything, 136, ALL, gathered=True),
    "gated and gathered": Call(gate, 136, GATE, gated=True, gathered=True),
}
CASES = [(name, config) for name, call in CALLS.items() for config in call.configs]


@pytest.fixture(scope="session")
def functions(run_folder, cases_of):
    """The kernels of all calls that run."""
    cases = [(x["name"], x["config"]) for x in cases_of(test_function)]
    return Emulator(run_folder / "grouped_functions", *(kernel_of(case) for case in cases))


def kernel_of(case):
    name, config = case
    return carried(CALLS[name].kernel(config))


@pytest.mark.parametrize(("name", "config"), CASES, ids=map("-".join, CASES))
def test_function(functions, name, config):
    CALLS[name].check(functions, config, seed=len(name))


COMPILED = (("everything", SHARES_WEIGHTS), ("gated and gathered", SHARES_WEIGHTS))
COMPILED += (("no rows", "128x64x64_c1x1x1_co_t"),)


@pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason())
@pytest.mark.parametrize(("name", "config"), COMPILED, ids=map("-".join, COMPILED))
def test_compiles_without_faults(name, config):
    """Multiplications that wait for each other are one."""
    assert nvrtc.compile_kernel(CALLS[name].kernel(config)).faults == ()


KERNEL, TILE = "kernels/wgmma/ragged_function.cuh", "epilogue/function.cuh"
READS = "epilogue/function_reads.cuh"
BLOCKS = "kernels/wgmma/ragged_store.cuh"
STORE = "kernels/wgmma/function_store.cuh"
FIRST, SECOND, _ = CONFIGS
MISTAKES = [
    Mistake(
        TILE, "as_if_all_rows_were_of_the_group", "batch_.m_end", "params_.m", ("no rows", SECOND)
    ),
    Mistake(
        STORE,
        "whole_where_the_rows_of_all_groups_are",
        "batch.m_end",
        "params.m",
        ("everything", SECOND),
    ),
    Mistake(TILE, "columns_not_bounded", "n < params_.n", "n <= params_.n", ("everything", FIRST)),
    Mistake(
        READS, "operands_of_the_first_group", "inner(group)", "inner(0)", ("everything", FIRST)
    ),
    Mistake(READS, "operands_of_the_first_entry", "outer(entry)", "outer(0)", ("batches", FIRST)),
    Mistake(READS, "results_of_the_first_entry", "idx(entry)", "idx(0)", ("batches", FIRST)),
    Mistake(KERNEL, "no_zeros", case=("everything", FIRST)),
    Mistake(KERNEL, "zeros_in_a_row_of_the_next_group", "< end", "<= end", ("no rows", FIRST)),
    Mistake(KERNEL, "zeros_in_every_other_row", "+= 2", "+= 4", ("no rows", FIRST)),
    Mistake(
        BLOCKS,
        "the_same_block_twice",
        "acc[next][v]",
        "acc[next - 1][v]",
        ("everything", SHARES_WEIGHTS),
    ),
    Mistake(TILE, "gate_for_up", "up", "acc", ("gated", SHARES_WEIGHTS)),
    Mistake(
        "kernels/wgmma/ragged_kernel.cuh",
        "consumers_of_the_same_columns",
        "first_row / 2",
        "0",
        ("gated", SHARES_WEIGHTS),
    ),
    Mistake(
        "kernels/wgmma/ragged_kernel.cuh",
        "tiles_too_far_apart",
        " / 2",
        "",
        ("gated", SHARES_WEIGHTS),
    ),
]


def check(emulator, case):
    name, config = case
    CALLS[name].check(emulator, config)


@pytest.fixture(scope="session")
def mistaken(functions, run_folder, cases_of):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    cases = [x["mistake"].case for x in cases_of(test_mistakes_are_found)]
    how = {"kernels_of": lambda case: [kernel_of(case)], "check": check, "like": functions}
    return mutants(run_folder / "grouped_functions_mistaken", MISTAKES, cases, **how)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1
    with pytest.raises((AssertionError, RuntimeError), match="not equal|wrote outside|Mismatched"):
        check(mistaken, mistake.case)
