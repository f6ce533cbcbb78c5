"""Qwix providers that use this library's products; only this module imports Qwix.

    model = qwix.quantize_model(model, PtqProvider(rules))
    parameters = pack_params(qwix.quantize_params(parameters, types))

Install Qwix with `pip install qwix`. Qwix quantizes by its rules, and this library multiplies.
`PtqProvider` serves with quantized weights, and with quantized activations where a rule says so.
`QtProvider` trains. `_private` looks up names of Qwix that are not public and reports missing
names.
"""

import functools
import importlib.util
import sys
from types import ModuleType

import jax
import qwix
from flax import nnx
from jax import lax
from jax import numpy as jnp

from jax_tcgemm.problem.dtypes import FLOAT8
from jax_tcgemm.problem.operands.quantized import ValueKind, is_quantized, value_kind
from jax_tcgemm.products.dot_general import dot_general
from jax_tcgemm.products.ragged.ragged_dot import ragged_dot, ragged_dot_general
from jax_tcgemm.quantization import packed_parameter
from jax_tcgemm.quantization.packed_parameter import PackedParameter
from jax_tcgemm.quantization.quantize import dequantize
from jax_tcgemm.tensor.einsum import einsum


class PtqProvider(qwix.PtqProvider):
    """`qwix.PtqProvider` with products of this library, including expert products.

    Rules also quantize `lax.ragged_dot`. A weight of shape (g, k, n) gets one scale per group and
    column, and per tile of k if a rule has a `tile_size`. An activation gets per-row scales.
    `pack_params` packs weights that are served beside 16-bit activations.

    Args:
      rules: quantization rules; see `qwix.PtqProvider`. op_names of rules may include "ragged_dot".
      **options: options of `qwix.PtqProvider`.

    Raises:
      ImportError: if the installed version of Qwix makes quantized parameters elsewhere.
    """

    def __init__(self, rules, **options):
        _private("PtqProvider", _serving(), *_OF_SERVING)
        super().__init__(rules, _dot_general_fn=_dot_general, _einsum_fn=_einsum, **options)

    def get_intercept_map(self):
        """Return the map of `qwix.PtqProvider` with `lax.ragged_dot` added."""
        return super().get_intercept_map() | {"jax.lax.ragged_dot": self.ragged_dot}

    def asarray(self, a, dtype=None, *args, **kwargs):
        """Convert to an array like `qwix.PtqProvider`, also packed parameters."""
        if isinstance(a, PackedParameter):
            return a if dtype is None else a.astype(dtype)
        return super().asarray(a, dtype, *args, **kwargs)

    def ragged_dot(self, lhs, rhs, group_sizes, *args, **kwargs):
        """Return `lax.ragged_dot`, with quantized operands where a rule says so."""
        rule, op_id = self._get_current_rule_and_op_id("ragged_dot")
        if rule is None or rule.weight_qtype is None:
            return lax.ragged_dot(lhs, rhs, group_sizes, *args, **kwargs)
        ptq, own = _serving(), {"_qarray_module": self._qarray_module}

        def how_to_quantize(*channelwise_axes, is_weight=False):
            kind = "weight" if is_weight else "act"
            return self._qarray_module.HowToQuantize(
                qtype=getattr(rule, f"{kind}_qtype"),
                channelwise_axes=channelwise_axes,
                tiled_axes={1: rule.tile_size} if rule.tile_size else {},
                calibration_method=getattr(rule, f"{kind}_calibration_method"),
            )

        if isinstance(rhs, ptq.WithAux):
            rhs = rhs.array
        elif name := ptq.flax_util.find_param(rhs):
            how = how_to_quantize(0, 2, is_weight=True)
            rhs = ptq.create_quantized_param(name, rhs, how, **own).array
        elif rule.act_qtype is not None:
            rhs = ptq.quantize_act(rhs, how_to_quantize(0, 2), rule, f"{op_id}_rhs", **own)
        if rule.act_qtype is not None:
            lhs = ptq.quantize_act(lhs, how_to_quantize(0), rule, f"{op_id}_lhs", **own)
        return _ragged_dot(lhs, rhs, group_sizes, *args, **kwargs)


def pack_params(params):
    """Pack the eligible weights among parameters that Qwix quantized.

    Pack parameters once. A model of `PtqProvider` accepts packed parameters in place of its own,
    and the kernels of weight-only quantization then read the packed weights beside 16-bit
    activations. `pack_params` runs on any device, also in `jax.jit` and `jax.eval_shape`.

    Args:
      params: a pytree of parameters, made by `qwix.quantize_params` or by `init` of the quantized
        model, or an NNX model that `qwix.quantize_model` returned.

    Returns:
      The params with packed weights. Parameters that cannot be packed are unchanged, such as
      weights whose tile size is not a multiple of 32.

    Raises:
      TypeError: if the qtype of a parameter is unknown.
      ValueError: if no parameter is quantized.
      ImportError: under the conditions of `PtqProvider`.

    Numerics:
      Integers, floats and scales do not change, and results have the same dtype as with Qwix. The
      kernels need bfloat16 or float16 activations; with others, the weight is dequantized.
      Quantized activations are dequantized, too: if a rule also quantizes activations and the
      product should run in 8 bits, do not pack the weight.

    Examples:
      >>> import jax, jax.numpy as jnp, qwix
      >>> from flax import linen
      >>> from jax_tcgemm.quantization.qwix import PtqProvider, pack_params
      >>> rules = [qwix.QuantizationRule(weight_qtype="int4", tile_size=128)]
      >>> x = jnp.ones((4, 256), jnp.bfloat16)
      >>> model = qwix.quantize_model(linen.Dense(64, dtype="bfloat16"), PtqProvider(rules))
      >>> parameters = model.init(jax.random.key(0), x)
      >>> packed = pack_params(parameters)
      >>> packed["params"]["kernel"].array.weight.format.qtype
      'int4'
      >>> bool(jnp.allclose(model.apply(packed, x), model.apply(parameters, x), atol=0.02))
      True
    """
    op, ptq = "pack_params", _serving()
    _private(op, ptq, *_OF_SERVING)
    found = []

    def packed(x):
        if not isinstance(x, ptq.WithAux):
            return x
        found.append(x)
        array = ptq.flax_util.unbox(x.array)
        if not is_quantized(array):  # But a scale of activations, or packed already.
            return x
        axes = [axis for axis in range(array.ndim) if axis not in x.how.channelwise_axes]
        weight = packed_parameter.packed_parameter(op, array, axes)
        if weight is None:
            return x
        box = type(x.array.qvalue)
        weight = jax.tree.map(box, weight) if issubclass(box, nnx.Variable) else weight
        return x.replace(array=weight)

    params = jax.tree.map(packed, params, is_leaf=lambda x: isinstance(x, ptq.WithAux))
    if not found:
        raise ValueError(
            f"{op}: params must have parameters that Qwix quantized, got none in params of type "
            f"{type(params).__name__}; see qwix.quantize_params"
        )
    return params


class QtProvider(qwix.QtProvider):
    """`qwix.QtProvider`, which trains with quantized products, on this library's products.

    Rules determine which products are quantized and how, in the forward pass and, with a
    `bwd_qtype`, in the backward pass. The products of `dot_general`, `einsum` and `ragged_dot` and
    the products of both gradients are `jax_tcgemm.dot_general` and `ragged_dot`, which multiply
    8-bit operands and scale the accumulator.

    Args:
      rules: quantization rules; see `qwix.QtProvider`.
      **options: options of `qwix.QtProvider`.

    Raises:
      ImportError: if the installed version of Qwix keeps these products elsewhere.
    """

    def __init__(self, rules, **options):
        _training()
        super().__init__(rules, **options)

    def dot_general(self, *args, **kwargs):
        """Return the product of `qwix.QtProvider`, computed by this library."""
        return _training().QtProvider.dot_general(self, *args, **kwargs)

    def einsum(self, *args, **kwargs):
        """Return the einsum of `qwix.QtProvider`, computed by this library."""
        return _training().QtProvider.einsum(self, *args, **kwargs)

    def ragged_dot(self, *args, **kwargs):
        """Return the grouped product of `qwix.QtProvider`, computed by this library."""
        return _training().QtProvider.ragged_dot(self, *args, **kwargs)


# --- products of serving ------------------------------------------------------------------------


def _dot_general(lhs, rhs, dimension_numbers, **how):
    if isinstance(rhs, PackedParameter):
        return packed_parameter.product(_array(lhs), rhs, dimension_numbers, **how)
    op = "dot_general"
    lhs, rhs = _operand(op, "lhs", lhs), _operand(op, "rhs", rhs)
    return dot_general(lhs, rhs, dimension_numbers, **how)


def _einsum(subscripts, lhs, rhs):
    if isinstance(rhs, PackedParameter):
        return packed_parameter.einsum_product(subscripts, _array(lhs), rhs)
    op = "tensor.einsum"
    return einsum(subscripts, *(_operand(op, f"operand {i}", x) for i, x in enumerate((lhs, rhs))))


def _ragged_dot(lhs, rhs, group_sizes, *args, **how):
    names = "precision", "preferred_element_type", "group_offset", "out_sharding"
    how |= dict(zip(names, args, strict=False))
    if isinstance(rhs, PackedParameter):
        return packed_parameter.grouped_product(_array(lhs), rhs, group_sizes, **how)
    op = "ragged_dot"
    lhs, rhs = _operand(op, "lhs", lhs), _operand(op, "rhs", rhs)
    return ragged_dot(lhs, rhs, group_sizes, **how)


def _array(x) -> jax.Array:
    return qwix.dequantize(x) if is_quantized(x) else x


def _operand(op: str, name: str, x):
    """An operand as our products take it: entries of a codebook as an array."""
    if not is_quantized(x):
        return x
    is_nf4 = value_kind(op, name, x.qtype, x.qvalue.dtype) is ValueKind.NF4
    return qwix.dequantize(x) if is_nf4 else x


# --- products of training -----------------------------------------------------------------------
# Qwix's rules of differentiation call its own products by the names of modules. Ours are called by
# copies of these modules, which leaves Qwix as it is for everyone else.


@functools.cache
def _training() -> ModuleType:
    """A copy of the module of `qwix.QtProvider`, the products of whose methods are ours."""
    op, qt = "QtProvider", sys.modules[qwix.QtProvider.__module__]
    _private(op, qt, "dot_general_qt", "ragged_dot_qt", "QtProvider")
    _private(op, qt.dot_general_qt, "dot_general", "dot_general_qt")
    _private(op, qt.ragged_dot_qt, "ragged_dot", "ragged_dot_qt")
    dense, grouped = qt.dot_general_qt.dot_general, qt.ragged_dot_qt.ragged_dot
    _private(op, dense, "dot_general", "get_how_to_quantize")
    _private(op, grouped, "ragged_dot", "ragged_dot_general")
    dense = _copy(dense, dot_general=_dot_general)
    own = {"ragged_dot": _ragged_dot, "ragged_dot_general": _gradient_of_matrices}
    return _copy(
        qt,
        dot_general_qt=_copy(qt.dot_general_qt, dot_general=dense),
        ragged_dot_qt=_copy(qt.ragged_dot_qt, ragged_dot=_copy(grouped, **own)),
    )


def _copy(module: ModuleType, **replaced) -> ModuleType:
    """A copy of a module in which some names stand for something else."""
    spec = importlib.util.find_spec(module.__name__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    vars(copy).update(replaced)
    return copy


def _gradient_of_matrices(
    lhs,
    rhs,
    group_sizes,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
):
    """`ragged_dot_general` of (m, k) and (m, n) to (g, k, n), sums over the rows of each group.

    No kernel does that of integers, and of two 8-bit floats that differ: they are converted to
    bfloat16, in which they are exact.
    """
    run = functools.partial(
        ragged_dot_general,
        group_sizes=group_sizes,
        ragged_dot_dimension_numbers=dimension_numbers,
        precision=precision,
        group_offset=group_offset,
    )
    if not is_quantized(rhs):
        lhs = dequantize(lhs) if is_quantized(lhs) else lhs
        return run(lhs, rhs, preferred_element_type=preferred_element_type)
    if lhs.dtype in FLOAT8 and lhs.dtype == rhs.qvalue.dtype:
        return run(lhs, rhs, preferred_element_type=preferred_element_type)
    dtype = jnp.bfloat16 if lhs.dtype.itemsize == 1 else lhs.dtype
    lhs, values = (x.astype(dtype) for x in (lhs, rhs.qvalue))
    out = run(lhs, values, preferred_element_type=jnp.float32) * rhs.scale
    return out.astype(preferred_element_type or rhs.scale.dtype)


# --- what is not public -------------------------------------------------------------------------

_OF_SERVING = ("WithAux", "create_quantized_param", "quantize_act", "flax_util")


def _serving() -> ModuleType:
    """The module of `qwix.PtqProvider`."""
    return sys.modules[qwix.PtqProvider.__module__]


def _private(op: str, module: ModuleType, *names: str) -> None:
    """Raises ImportError where one of Qwix's modules lacks a name."""
    for name in names:
        if not hasattr(module, name):
            raise ImportError(
                f"{op}: {module.__name__} must have {name}, as of qwix 0.1.8, got qwix "
                f"{qwix.__version__}; install that version"
            )
