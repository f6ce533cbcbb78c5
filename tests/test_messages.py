"""Every refusal names the public function that was called, whichever others that goes through."""

import functools
import inspect
import math
import re

import hypothesis
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import AxisType, PartitionSpec

import jax_tcgemm
from jax_tcgemm import blas, tensor

X = jnp.ones((4, 4))
VECTOR = jnp.ones(4)
SIZES = jnp.array([3, 1])
LABELS = jnp.array([0, 3, 1, 1])
GROUPS = jnp.ones((2, 4, 4))
QUANTIZED = jax_tcgemm.quantize(X, axis=0)
INTEGERS = jnp.zeros((4, 4), jnp.int8)
PACKED = jax_tcgemm.pack_weights(INTEGERS, X[:1], group_size=None, dtype="int4")
GPTQ = {
    "qweight": jnp.zeros((1, 8), jnp.int32),
    "qzeros": jnp.zeros((1, 1), jnp.int32),
    "scales": jnp.ones((1, 8)),
}
MLP = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}
# A batch dimension is ragged: an ordinary product.
RAGGED_BATCH = jax.lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
RAGGED_ROWS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def _over_one_device(collective):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i")}
    return lambda x, **how: jax.shard_map(
        lambda x: collective(x, X, "i", **how), mesh=mesh, **specs
    )(x)


# Calls of the public functions, by their names.
CALLS = {
    "matmul": lambda x, **how: jax_tcgemm.matmul(x, X, **how),
    "matmul with a bias": lambda x, **how: jax_tcgemm.matmul(x, X, bias=VECTOR, **how),
    "matmul with an epilogue": lambda x, **how: jax_tcgemm.matmul(x, X, epilogue=jnp.tanh, **how),
    "dot_general": lambda x, **how: jax_tcgemm.dot_general(x, X, (((1,), (0,)), ((), ())), **how),
    "linear": lambda x, **how: jax_tcgemm.linear(x, X, **how),
    "linear with an activation": lambda x, **how: jax_tcgemm.linear(x, X, activation="silu", **how),
    "gated_linear": lambda x, **how: jax_tcgemm.gated_linear(x, (X, X), **how),
    "mlp": lambda x, **how: jax_tcgemm.mlp(x, MLP, **how),
    "linear_cross_entropy": lambda x, **how: jax_tcgemm.linear_cross_entropy(x, X, LABELS, **how),
    "linear_log_prob": lambda x, **how: jax_tcgemm.linear_log_prob(x, X, LABELS, **how),
    "linear_top_k": lambda x, **how: jax_tcgemm.linear_top_k(x, X, 2, **how)[0],
    "matmul of quantized arrays": lambda x, **how: jax_tcgemm.matmul(
        jax_tcgemm.quantize(x), QUANTIZED, **how
    ),
    "linear of quantized arrays": lambda x, **how: jax_tcgemm.linear(
        x, QUANTIZED, VECTOR, activation="silu", **how
    ),
    "ragged_dot of quantized arrays": lambda x, **how: jax_tcgemm.ragged_dot(
        x, jax_tcgemm.quantize(GROUPS), SIZES, **how
    ),
    "scaled_matmul": lambda x, **how: jax_tcgemm.scaled_matmul(x, X, 2.0, VECTOR[:, None], **how),
    "ragged_dot": lambda x, **how: jax_tcgemm.ragged_dot(x, GROUPS, SIZES, **how),
    "ragged_dot with an activation": lambda x, **how: jax_tcgemm.ragged_dot(
        x, GROUPS, SIZES, activation="silu", **how
    ),
    "ragged_dot_general": lambda x, **how: jax_tcgemm.ragged_dot_general(
        x, GROUPS, SIZES, RAGGED_ROWS, **how
    ),
    "ragged_dot_general over batches": lambda x, **how: jax_tcgemm.ragged_dot_general(
        x.reshape(2, 2, 4), GROUPS, SIZES, RAGGED_BATCH, **how
    ),
    "gated_ragged_linear": lambda x, **how: jax_tcgemm.gated_ragged_linear(
        x, jnp.ones((2, 4, 2, 4)), SIZES, **how
    ),
    "combine_rows": lambda x, **how: jax_tcgemm.combine_rows(
        x, jnp.zeros((2, 2), jnp.int32), **how
    ),
    "all_reduce": _over_one_device(lambda x, _, axis, **how: jax_tcgemm.all_reduce(x, axis, **how)),
    "all_gather_matmul": _over_one_device(jax_tcgemm.all_gather_matmul),
    "matmul_reduce_scatter": _over_one_device(jax_tcgemm.matmul_reduce_scatter),
    "blas.gemm": lambda x, **how: blas.gemm(x, x, **how),
    "blas.gemm_batched": lambda x, **how: blas.gemm_batched([x], [x], **how)[0],
    "blas.gemv": lambda x, **how: blas.gemv(X, x[0], **how),
    "blas.gbmv": lambda x, **how: blas.gbmv(x[:, :1], VECTOR, kl=0, ku=0, **how),
    "blas.trsv": lambda x, **how: blas.trsv(X, x[0], **how),
    "blas.trsm": lambda x, **how: blas.trsm(X, x, **how),
    "blas.syrk": lambda x, **how: blas.syrk(x, **how),
    "blas.syr2k": lambda x, **how: blas.syr2k(x, X, **how),
    "blas.iamax": lambda x, **how: blas.iamax(x[0], **how),
    "blas.iamin": lambda x, **how: blas.iamin(x[0], **how),
    "blas.amax": lambda x, **how: blas.amax(x[0], **how),
    "blas.amin": lambda x, **how: blas.amin(x[0], **how),
    "blas.asum": lambda x, **how: blas.asum(x[0], **how),
    "blas.nrm2": lambda x, **how: blas.nrm2(x[0], **how),
    "blas.dot": lambda x, **how: blas.dot(x[0], VECTOR, **how),
    "blas.scal": lambda x, **how: blas.scal(2, x[0], **how),
    "blas.axpy": lambda x, **how: blas.axpy(2, x[0], VECTOR, **how),
    "blas.swap": lambda x, **how: blas.swap(x[0], VECTOR, **how)[0],
    "tensor.contract": lambda x, **how: tensor.contract("ij,jk->ik", x, X, **how),
    "tensor.einsum": lambda x, **how: tensor.einsum("ij,jk->ik", x, X, **how),
    "tensor.permute": lambda x, **how: tensor.permute("ij->ji", x, **how),
    "tensor.elementwise_binary": lambda x, **how: tensor.elementwise_binary(
        "ij,ij->ij", x, X, **how
    ),
    "tensor.elementwise_trinary": lambda x, **how: tensor.elementwise_trinary(
        "ij,ij,ij->ij", x, X, X, **how
    ),
    "tensor.reduce": lambda x, **how: tensor.reduce("ij->i", x, **how),
}
NOT_DIFFERENTIABLE = ("blas.iamax", "blas.iamin")


def _on_gpus_alone(op):
    """An implementation that cannot run here."""
    library = {"blas": "cublas", "tensor": "cutensor", "combine_rows": "simt"}
    if op in ("blas.syrk", "blas.syr2k"):
        return "wgmma"
    return library.get(op.partition(".")[0], "wgmma")


@pytest.mark.parametrize("call", CALLS)
def test_a_refusal_names_the_function_that_was_called(call):
    op = call.partition(" ")[0]
    f = functools.partial(CALLS[call], implementation=_on_gpus_alone(op))
    for attempt in (
        lambda: jax.jit(f).lower(X),
        lambda: jax.jit(jax.vmap(f)).lower(jnp.ones((2, 4, 4))),
        lambda: jax_tcgemm.explain(f, X),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(op)}: implementation must be able to"):
            attempt()


@pytest.mark.parametrize("call", [call for call in CALLS if call not in NOT_DIFFERENTIABLE])
def test_derivatives_inherit_the_name(call, monkeypatch, capsys):
    monkeypatch.setenv("TCGEMM_PRINT_CHOICE", "1")
    op = call.partition(" ")[0]
    f = functools.partial(CALLS[call], implementation="xla")
    jax.jit(jax.value_and_grad(lambda x: f(x).sum())).lower(X)
    lines = capsys.readouterr().err.splitlines()
    # Some make their operands so.
    lines = [line for line in lines if not line.startswith("jax_tcgemm: quantize: ")]
    assert lines
    assert not [line for line in lines if not line.startswith(f"jax_tcgemm: {op}: ")]


# --- every argument, with what it may not be ----------------------------------------------------

SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
FOUR = jax.ShapeDtypeStruct((4,), jnp.float32)
BAND = jax.ShapeDtypeStruct((4, 3), jnp.float32)
NN = (((1,), (0,)), ((), ()))


def _einsum(subscripts, a, b, optimize="auto", precision=None, implementation=None):
    return tensor.einsum(
        subscripts, a, b, optimize=optimize, precision=precision, implementation=implementation
    )


# A function with arguments that it takes, by the name that messages give it.
VALID = {
    "matmul": (jax_tcgemm.matmul, {"a": SQUARE, "b": SQUARE}),
    "dot_general": (
        jax_tcgemm.dot_general,
        {"lhs": SQUARE, "rhs": SQUARE, "dimension_numbers": NN},
    ),
    "linear": (jax_tcgemm.linear, {"x": SQUARE, "w": SQUARE}),
    "gated_linear": (jax_tcgemm.gated_linear, {"x": SQUARE, "weights": jnp.ones((4, 2, 4))}),
    "mlp": (jax_tcgemm.mlp, {"x": SQUARE, "params": MLP}),
    "linear_cross_entropy": (
        jax_tcgemm.linear_cross_entropy,
        {"x": SQUARE, "w": SQUARE, "labels": LABELS},
    ),
    "linear_log_prob": (
        jax_tcgemm.linear_log_prob,
        {"x": SQUARE, "w": SQUARE, "labels": LABELS},
    ),
    "scaled_matmul": (
        jax_tcgemm.scaled_matmul,
        {"lhs": SQUARE, "rhs": SQUARE, "lhs_scales": 1.0, "rhs_scales": VECTOR[:, None]},
    ),
    "quantize": (jax_tcgemm.quantize, {"x": SQUARE}),
    "dequantize": (jax_tcgemm.dequantize, {"x": QUANTIZED}),
    "matmul of quantized arrays": (jax_tcgemm.matmul, {"a": QUANTIZED, "b": SQUARE}),
    "gated_linear of quantized arrays": (
        jax_tcgemm.gated_linear,
        {"x": QUANTIZED, "weights": jax_tcgemm.quantize(jnp.ones((4, 2, 4)))},
    ),
    "ragged_dot of quantized arrays": (
        jax_tcgemm.ragged_dot,
        {"lhs": QUANTIZED, "rhs": jax_tcgemm.quantize(GROUPS), "group_sizes": SIZES},
    ),
    "matmul of a packed weight": (jax_tcgemm.matmul, {"a": SQUARE, "b": PACKED}),
    "linear of a packed weight": (jax_tcgemm.linear, {"x": SQUARE, "w": PACKED}),
    "pack_weights": (
        jax_tcgemm.pack_weights,
        {"q": INTEGERS, "scale": X[:1], "group_size": None, "dtype": "int4"},
    ),
    "pack_mxfp4": (jax_tcgemm.pack_mxfp4, {"w": jnp.ones((32, 4))}),
    "pack_nvfp4": (jax_tcgemm.pack_nvfp4, {"w": jnp.ones((16, 4))}),
    "from_gptq": (jax_tcgemm.from_gptq, {"source": GPTQ}),
    "from_awq": (jax_tcgemm.from_awq, {"source": GPTQ | {"qweight": jnp.zeros((8, 1), int)}}),
    "from_compressed_tensors": (
        jax_tcgemm.from_compressed_tensors,
        {"source": {"weight": INTEGERS, "weight_scale": X[:, :1]}},
    ),
    "from_gpt_oss": (
        jax_tcgemm.from_gpt_oss,
        {
            "source": {
                "_blocks": jnp.zeros((1, 2, 1, 16), jnp.uint8),
                "_scales": jnp.zeros((1, 2, 1), jnp.uint8),
            }
        },
    ),
    "from_modelopt": (jax_tcgemm.from_modelopt, {"source": {}}),
    "from_bitsandbytes": (jax_tcgemm.from_bitsandbytes, {"source": {}}),
    "from_qwix": (jax_tcgemm.from_qwix, {"source": {"qvalue": INTEGERS, "scale": X[:1]}}),
    "ragged_dot": (jax_tcgemm.ragged_dot, {"lhs": SQUARE, "rhs": GROUPS, "group_sizes": SIZES}),
    "ragged_dot_general": (
        jax_tcgemm.ragged_dot_general,
        {
            **{"lhs": SQUARE, "rhs": GROUPS, "group_sizes": SIZES},
            "ragged_dot_dimension_numbers": RAGGED_ROWS,
        },
    ),
    "gated_ragged_linear": (
        jax_tcgemm.gated_ragged_linear,
        {"x": SQUARE, "weights": jnp.ones((2, 4, 2, 4)), "group_sizes": SIZES},
    ),
    "combine_rows": (
        jax_tcgemm.combine_rows,
        {"rows": SQUARE, "indices": jnp.zeros((2, 2), jnp.int32)},
    ),
    "explain": (
        lambda f, platform="cpu": jax_tcgemm.explain(f, platform=platform),
        {"f": lambda: 0},
    ),
    "patch": (lambda implementation: jax_tcgemm.patch(implementation=implementation)(abs), {}),
    "blas.gemm": (blas.gemm, {"a": SQUARE, "b": SQUARE, "c": SQUARE}),
    "blas.gemm_batched": (blas.gemm_batched, {"a": [X], "b": [X], "c": [X]}),
    "blas.gemv": (blas.gemv, {"a": SQUARE, "x": FOUR, "y": FOUR}),
    "blas.gbmv": (blas.gbmv, {"a": BAND, "x": FOUR, "y": FOUR, "kl": 1, "ku": 1}),
    "blas.to_band": (blas.to_band, {"a": SQUARE, "kl": 1, "ku": 1}),
    "blas.from_band": (blas.from_band, {"band": BAND, "columns": 4, "kl": 1, "ku": 1}),
    "blas.trsv": (blas.trsv, {"a": SQUARE, "b": FOUR}),
    "blas.trsm": (blas.trsm, {"a": SQUARE, "b": SQUARE}),
    "blas.syrk": (blas.syrk, {"a": SQUARE, "c": SQUARE}),
    "blas.syr2k": (blas.syr2k, {"a": SQUARE, "b": SQUARE, "c": SQUARE}),
    **{
        f"blas.{name}": (getattr(blas, name), {"x": FOUR})
        for name in ("iamax", "iamin", "amax", "amin", "asum", "nrm2")
    },
    **{f"blas.{name}": (getattr(blas, name), {"x": FOUR, "y": FOUR}) for name in ("dot", "swap")},
    "blas.scal": (blas.scal, {"alpha": 2.0, "x": FOUR}),
    "blas.axpy": (blas.axpy, {"alpha": 2.0, "x": FOUR, "y": FOUR}),
    "blas.Options": (blas.Options, {}),
    "tensor.contract": (
        tensor.contract,
        {"subscripts": "ij,jk->ik", "a": SQUARE, "b": SQUARE, "c": SQUARE, "beta": 1},
    ),
    "tensor.einsum": (_einsum, {"subscripts": "ij,jk->ik", "a": SQUARE, "b": SQUARE}),
    "tensor.permute": (tensor.permute, {"subscripts": "ij->ji", "a": SQUARE}),
    "tensor.elementwise_binary": (
        tensor.elementwise_binary,
        {"subscripts": "ij,ij->ij", "a": SQUARE, "c": SQUARE},
    ),
    "tensor.elementwise_trinary": (
        tensor.elementwise_trinary,
        {"subscripts": "ij,ij,ij->ij", "a": SQUARE, "b": SQUARE, "c": SQUARE},
    ),
    "tensor.reduce": (tensor.reduce, {"subscripts": "ij->i", "a": SQUARE, "c": FOUR, "beta": 1}),
}
UNUSUAL = {
    **{
        "None": None,
        "True": True,
        "a name": "magic",
        "bytes": b"x",
        "a dict": {},
        "a list": [1, 2],
    },
    **{
        "nothing": (),
        "an object": object(),
        "a function": abs,
        "a type": int,
        "a pair": (X, VECTOR),
    },
    **{"0": 0, "-1": -1, "1.5": 1.5, "NaN": math.nan, "2**31": 2**31, "2**63": 2**63},
    **{"10**400": 10**400, "a complex number": 1j, "a half-empty pair": (None, X)},
    **{"text": np.array("x"), "objects": np.array([1, "a"], object), "a mask": np.ma.ones(3)},
    **{
        "no rows": jnp.ones((0, 4)),
        "one array more": jnp.ones((2, 3, 4)),
        "a scalar": jnp.ones(()),
    },
    **{"5 x 7": jnp.ones((5, 7)), "integers": jnp.ones((4, 4), jnp.int32), "a vector": VECTOR},
    **{"quantized": QUANTIZED, "quantized wrongly": jax_tcgemm.QuantizedArray(X, VECTOR)},
    **{"packed": PACKED},
    **{"float8": jnp.ones((4, 4), jnp.float8_e4m3fn), "a key": jax.random.key(0)},
    **{"symbolic": jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, m"), jnp.float32)},
    **{"one symbolic": jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32)},
    **{"too long": jax.ShapeDtypeStruct((2**31, 4), jnp.float32), "a dtype": jnp.float32},
    **{"no such axis": PartitionSpec("nope"), "an axis twice": PartitionSpec("i", "i")},
    **{"other numbers": (((5,), (0,)), ((), ())), "fractions": (((1.5,), (0,)), ((), ()))},
    **{"no modes": ",->", "a mode too many": "ijk,jk->ij", "ellipses": "...i,ij->...j"},
}


def _error_of(op, function, given) -> str:
    """What a call is refused with, "" where it is not."""
    types = {name: x for name, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in given.items() if name not in types}
    try:
        if op in ("explain", "patch", "blas.Options"):
            function(**given)
        else:
            jax.eval_shape(functools.partial(function, **static), **types)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("op", VALID)
@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(data=strategies.data())
def test_whatever_an_argument_is_the_message_names_the_function(op, data):
    function, valid = VALID[op]
    op = op.partition(" ")[0]
    name = data.draw(strategies.sampled_from([*inspect.signature(function).parameters]))
    label = data.draw(strategies.sampled_from([*UNUSUAL]))
    # What the function that is explained, or an epilogue, raises is its own.
    hypothesis.assume(name not in ("f", "epilogue") or not callable(UNUSUAL[label]))
    error = _error_of(op, function, valid | {name: UNUSUAL[label]})
    expected = rf"{re.escape(op)}: (.*must .*, got .*; |.* dtypes .*no available implicit)"
    assert not error or re.match(expected, error, re.DOTALL)


def test_numbers_at_the_edge_work():
    a, x = jnp.arange(12.0).reshape(4, 3), jnp.arange(1.0, 4)
    # An increment beyond every extent: the first element alone takes part.
    assert blas.asum(x, increment=2**31) == blas.asum(x, increment=10**400) == 1
    assert blas.axpy(2, x, x, n=1, increment_x=2**40, increment_y=2**40).tolist() == [3, 2, 3]
    assert blas.amax(x, increment=2**31) == 1
    # A matrix without columns.
    assert blas.gbmv(a, jnp.ones(0), jnp.ones(4), kl=1, ku=1, columns=0, beta=3).tolist() == [3] * 4
    assert blas.gbmv(a, jnp.ones(4), kl=1, ku=1, columns=0, trans="T").shape == (0,)
    assert blas.to_band(jnp.ones((4, 0)), 1, 1).tolist() == [[0] * 3] * 4
    assert blas.from_band(a, 0, 1, 1).shape == (4, 0)
    wide = jnp.arange(1.0, 13).reshape(4, 3)
    assert blas.from_band(blas.to_band(wide, 3, 2), 3, 3, 2).tolist() == wide.tolist()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: blas.gemm(None, X), "blas.gemm: a must be an array"),
        (lambda: blas.from_band(jnp.ones((4, 3)), -1, 1, 1), "columns must be an integer of at"),
        (lambda: blas.from_band(jnp.ones((4, 3)), 4, 1, 2), "must be kl + ku + 1 = 4"),
        (lambda: blas.from_band(jnp.ones((4, 3)), 2**31, 1, 1), "columns must be at most 2**31"),
        (lambda: blas.to_band(X, 2**31 - 1, 1), "kl + ku + 1 must be at most 2**31 - 1"),
        (lambda: jax_tcgemm.linear(X, X, 2**31), "linear: bias must be what jax.numpy.asarray"),
        (lambda: jax_tcgemm.matmul(X, X, precision={}), "matmul: precision must be None"),
        (lambda: jax_tcgemm.linear(X, X, alpha=10**400), "linear: alpha must be at most"),
    ],
)
def test_refused_by_name(call, says):
    with pytest.raises((ValueError, TypeError)) as info:
        call()
    assert says in str(info.value)
