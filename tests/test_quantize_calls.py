"""Arrays rounded to 8 bits as calls: what runs them, in transformations and over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quantize_cases import LARGEST, Case
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import quantize
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.system import modules

needs_cuda = pytest.mark.skipif(modules.cuda is None, reason="there is no CUDA module")
X = jax.ShapeDtypeStruct((3, 256, 384), jnp.bfloat16)


def calls(how, x=X):
    return jax_tcgemm.explain(lambda x: quantize(x, **how), x, platform="cuda")


@pytest.mark.parametrize("form", ["lines", "blocks", "rows"])
@pytest.mark.parametrize("out", LARGEST)
def test_bits_of_the_definition(form, out):
    """What XLA makes has those that the kernels are tested for."""
    how = {"lines": {"block": (1, 128)}, "blocks": {"block": (128, 128)}, "rows": {"axis": -1}}
    transposed = form != "rows"
    case = Case(form, 200, 300, out, transposed=transposed, batch=2)
    f = functools.partial(quantize, dtype=DTYPES[out], with_transpose=transposed, **how[form])
    made = jax.jit(f)(case.array)
    made = made if transposed else (made,)
    assert not case.mismatch([x for q in made for x in (q.qvalue, q.scale)])


@needs_cuda
@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"block": (1, 128)}, "768x384 bf16->f8e4m3fn scales of 1x128"),
        ({"block": (128, 128)}, "3x256x384 bf16->f8e4m3fn scales of 128x128"),
        (
            {"block": (1, 128), "with_transpose": True},
            "3x256x384 bf16->f8e4m3fn scales of 1x128 and transposed",
        ),
        ({"axis": -1, "dtype": "int8"}, "768x384 bf16->s8 scales of rows"),
        ({}, "3x256x384 bf16->f8e4m3fn by a scale"),
        ({"with_transpose": True}, "3x256x384 bf16->f8e4m3fn by a scale and transposed"),
    ],
    ids=str,
)
def test_the_kernel_is_chosen(how, problem):
    (call,) = calls(how)
    assert (call.implementation, str(call.problem)) == ("quantize", problem)
    assert call.bytes > 3 * 256 * 384 * 3
    (call,) = calls({**how, "implementation": "xla"})
    assert call.implementation == "xla"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"axis": 0}, "scales of such parts of an array are XLA's"),
        ({"block": (1, 64)}, "scales of such parts of an array are XLA's"),
        ({"axis": -1, "with_transpose": True}, "rows of an array and of its transpose are XLA's"),
    ],
    ids=str,
)
def test_what_is_left_to_xla(how, why):
    (call,) = calls(how)
    assert call.implementation == "xla"
    assert why in call.why
    with pytest.raises(ValueError, match="^quantize: implementation must be able to run the op"):
        calls({**how, "implementation": "quantize"})


def test_the_kernel_is_refused_elsewhere():
    with pytest.raises(ValueError, match="it runs on cuda, not on cpu"):
        quantize(jnp.ones((4, 128)), block=(1, 128), implementation="quantize")
    with pytest.raises(ValueError, match="must be one of quantize, xla, got implementation='wg"):
        quantize(jnp.ones((4, 128)), block=(1, 128), implementation="wgmma")


@needs_cuda
def test_training_is_by_the_kernel():
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((512, 384), jnp.bfloat16)
    for recipe, word in (("current", "by a scale"), ("block128", "scales of")):
        product = jax_tcgemm.Fp8DotGeneral(recipe)
        f = lambda x, w, product=product: product(x, w, (((1,), (0,)), ((), ()))).sum()  # noqa: E731
        report = jax_tcgemm.explain(jax.grad(f, (0, 1)), x, w, platform="cuda")
        names = [str(c.problem) for c in report if c.implementation == "quantize"]
        assert sum(word in name and name.endswith("transposed") for name in names) == 3


@pytest.mark.parametrize(
    "how", [{}, {"axis": -1}, {"block": (1, 128)}, {"block": (128, 128), "with_transpose": True}]
)
def test_mapped_calls_are_those_of_their_entries(how):
    x = normal(3, 2, 130, 256)
    f = functools.partial(quantize, **how)
    mapped = jax.vmap(jax.vmap(f), 1, 1)(x)
    for i in range(3):
        for j in range(2):
            own = jax.tree.map(lambda a, i=i, j=j: a[i, j], mapped)
            jax.tree.map(np.testing.assert_array_equal, own, f(x[i, j]))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"with_transpose": True},
        {"axis": -1},
        {"block": (1, 128)},
        {"block": (1, 128), "with_transpose": True},
    ],
    ids=str,
)
def test_divided_arrays(how, axis_type):
    """Over rows; what every device has is what one device makes of the whole."""
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    if "block" in how and "with_transpose" in how and axis_type == AxisType.Explicit:
        pytest.skip("scales of divided blocks are not repeated over explicit axes")
    mesh = jax.make_mesh((2,), ("x",), (axis_type,), devices=jax.devices()[:2])
    x = normal(256, 256)
    f = jax.jit(functools.partial(quantize, **how))
    expected = f(x)
    with jax.set_mesh(mesh):
        divided = jax.device_put(x, NamedSharding(mesh, P("x", None)))
        jax.tree.map(np.testing.assert_array_equal, f(divided), expected)
