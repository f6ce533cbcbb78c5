"""Calls replayed by XLA's command buffers (CUDA graphs).

XLA captures a run of five or more such calls while it runs them for the first time and replays the
graph afterwards, updating it when buffers move. A handler that kept a pointer, or whose choice
should differ between executions, gives old values then.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm.problem.dtypes import DTYPES

from .gemm_call import ALL_TYPES, Case, call, first_accepted, implementations, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

NUM_CALLS = 8
SIZE = 256
SQUARE = Case("square", SIZE, SIZE, SIZE)
BY_NAME = implementations()


def first_chainable(name):
    """(config, problem) of the first types whose result can be the next product's operand."""
    for types in ALL_TYPES:
        found = first_accepted(name, types)
        if types.inputs == types.out and found and "NN" in found[1]:
            return found[0], make_inputs(types, "NN", SQUARE).problem
    return pytest.fail(f"{name} runs no NN product whose result has its operands' dtype")


def signed_permutations(rng, count):
    """Matrices whose products neither round nor grow, so that a chain stays exact."""
    rows = np.stack([rng.permutation(SIZE) for _ in range(count)])
    signs = rng.choice([-1.0, 1.0], (count, SIZE, 1))
    return signs * np.eye(SIZE)[rows]


def chain(name):
    config, problem = first_chainable(name)

    def step(x, *weights):
        for w in weights:
            poison = jnp.full((1, SIZE, SIZE), jnp.nan, x.dtype)
            x = call(problem, x, w, poison, implementation=name, config=config)[0]
        return x

    return step


def check_steps(step, dtype, steps, keep):
    rng = np.random.default_rng(0)
    kept = []
    for _ in range(steps):
        x = rng.integers(-2, 3, (SIZE, SIZE)).astype(np.float64)
        weights = signed_permutations(rng, NUM_CALLS)
        got = step(*(jnp.asarray(each, dtype) for each in (x, *weights)))
        for w in weights:
            x = x @ w
        np.testing.assert_array_equal(np.asarray(got).astype(np.float64), x)
        if keep:  # The next step's buffers then lie elsewhere.
            kept.append((got, jnp.zeros((len(kept) + 1) * 12345, jnp.int8)))


@pytest.mark.parametrize("keep", [False, True], ids=["same_buffers", "moving_buffers"])
@pytest.mark.parametrize("name", BY_NAME)
def test_chain_follows_its_inputs(name, keep):
    _, problem = first_chainable(name)
    check_steps(jax.jit(chain(name)), DTYPES[problem.out_dtype], steps=12, keep=keep)


@pytest.mark.parametrize("name", BY_NAME)
def test_chain_inside_a_loop(name):
    """The graph is replayed many times by one execution."""
    _, problem = first_chainable(name)
    step = chain(name)
    rng = np.random.default_rng(1)
    x = rng.integers(-2, 3, (SIZE, SIZE)).astype(np.float64)
    weights = signed_permutations(rng, NUM_CALLS)
    dtype = DTYPES[problem.out_dtype]

    @jax.jit
    def program(x, *weights):
        return jax.lax.fori_loop(0, 9, lambda _, x: step(x, *weights), x)

    got = program(*(jnp.asarray(each, dtype) for each in (x, *weights)))
    for _ in range(9):
        for w in weights:
            x = x @ w
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), x)


def test_implementations_mixed_in_one_graph():
    """All that run one dtype, in turn."""
    dtypes = {name: first_chainable(name)[1].out_dtype for name in BY_NAME}
    same = [name for name, dtype in dtypes.items() if dtype == dtypes["mma_sync"]]
    assert len(same) >= 4

    @jax.jit
    def step(x, *weights):
        for i, w in enumerate(weights):
            x = chain(same[i % len(same)])(x, w)
        return x

    check_steps(step, DTYPES[dtypes["mma_sync"]], steps=6, keep=True)
