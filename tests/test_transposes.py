"""Products read through transposes of their operands instead of having XLA write them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import draw

import jax_tcgemm
from jax_tcgemm.primitives.transposes import through
from jax_tcgemm.system import modules

BF16 = jnp.bfloat16


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, BF16)


def lowered(f, *operands) -> str:
    return jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def reads_transposed(text: str) -> bool:
    """Whether a call or product reads what a transpose makes."""
    made = {
        line.split("=")[0].strip() for line in text.splitlines() if "stablehlo.transpose" in line
    }
    users = [line for line in text.splitlines() if "custom_call" in line or "dot_general" in line]
    arguments = [line.partition("(")[2].partition(")")[0].split(", ") for line in users]
    return any(name in made for names in arguments for name in names)


CASES = {
    "rhs": (lambda x, w: jax_tcgemm.matmul(x, w.T), (256, 512), (384, 512)),
    "lhs": (lambda x, w: jax_tcgemm.matmul(x.T, w), (512, 256), (512, 384)),
    "both": (lambda x, w: jax_tcgemm.matmul(x.T, w.T), (512, 256), (384, 512)),
    "twice": (lambda x, w: jax_tcgemm.matmul(x, w.mT.mT.mT), (256, 512), (384, 512)),
    "batch": (lambda x, w: jax_tcgemm.matmul(x, w.mT), (3, 256, 512), (3, 384, 512)),
    "moved batch": (
        lambda x, w: jax_tcgemm.matmul(x, jnp.transpose(w, (1, 2, 0))),
        *((3, 256, 512), (384, 3, 512)),
    ),
    "layer": (
        lambda x, w: jax_tcgemm.linear(x, w.T, activation="silu"),
        *((256, 512), (384, 512)),
    ),
    "epilogue": (
        lambda x, w: jax_tcgemm.matmul(x, w.T, epilogue=lambda acc: jnp.tanh(acc).astype(BF16)),
        *((256, 512), (384, 512)),
    ),
    "gated": (
        lambda x, w: jax_tcgemm.gated_linear(x, (w[0].T, w[1].T)),
        *((256, 512), (2, 384, 512)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_transposed_in_memory(name):
    f, *shapes = CASES[name]
    assert not reads_transposed(lowered(f, *(struct(*shape) for shape in shapes)))


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    f, *shapes = CASES[name]
    x, w = (draw(shape, "float32") for shape in shapes)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(f)(x, w)
        exact = jax.jit(lambda *a: f(*map(lax.optimization_barrier, a)))(x, w)
    np.testing.assert_allclose(got, exact, rtol=2e-2 if name == "epilogue" else 1e-5, atol=1e-3)


@pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))
def test_what_is_explained_is_what_is_lowered():
    f = CASES["rhs"][0]
    (call,) = jax_tcgemm.explain(f, struct(256, 512), struct(384, 512), platform="cuda")
    assert call.problem.layout == "NT"
    assert "b_transposed = true" in lowered(f, struct(256, 512), struct(384, 512))


def test_matrices_of_a_gate_are_read_alike():
    """One transposed alone is still written: both are one operand of the kernel."""
    f = lambda x, w: jax_tcgemm.gated_linear(x, (w[0].T, w[1]))  # noqa: E731
    x, w = draw((8, 16), "float32"), draw((2, 16, 16), "float32")
    exact = jax.nn.silu(x @ w[0].T) * (x @ w[1])
    np.testing.assert_allclose(jax.jit(f)(x, w), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_operands(axis_type):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    x, w = draw((8, 16), "float32"), draw((12, 16), "float32")
    with jax.set_mesh(mesh):
        on = [
            jax.device_put(array, NamedSharding(mesh, spec))
            for array, spec in ((x, P("a")), (w, P("b")))
        ]
        got = jax.jit(CASES["rhs"][0])(*on)
    np.testing.assert_allclose(got, x @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [0, 1])
def test_dimension_numbers_against_lax(side):
    """Random permutations of operands with two batch, two contracted and two free dimensions."""
    generator = np.random.default_rng(side)
    for _ in range(20):
        axes = [list(generator.permutation(6)) for _ in range(2)]
        extents = {"b": (2, 3), "k": (4, 5), "m": (6, 7), "n": (8, 9)}
        kinds = ["b", "b", "k", "k", "m", "m"], ["b", "b", "k", "k", "n", "n"]
        shapes, contract, batch = [], [], []
        for order, names in zip(axes, kinds, strict=True):
            sizes = [extents[name][i % 2] for i, name in enumerate(names)]
            shapes.append([sizes[i] for i in order])
            batch.append(tuple(order.index(i) for i in (0, 1)))
            contract.append(tuple(order.index(i) for i in (2, 3)))
        operands = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
        numbers = tuple(map(tuple, (contract, batch)))
        permutation = tuple(int(i) for i in generator.permutation(6))
        exact = lax.transpose(lax.dot_general(*operands, numbers), permutation)
        order = tuple(int(i) for i in generator.permutation(6))
        inverse = np.argsort(order)
        sources = list(operands)
        sources[side] = operands[side].transpose(inverse)
        new_numbers, new_permutation = through(numbers, permutation, (6, 6), side, order)
        got = lax.transpose(lax.dot_general(*sources, new_numbers), new_permutation)
        np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-3)
