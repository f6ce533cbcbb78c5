"""Providers of Qwix whose products are ours; Qwix (`pip install qwix`) is imported here alone.

    model = qwix.quantize_model(model, PtqProvider(rules))
    parameters = pack_params(qwix.quantize_params(parameters, types))

Qwix quantises, by its rules, and this multiplies: `PtqProvider` serves with quantised weights, and
activations where a rule says so, and `QtProvider` trains. What of Qwix is not public is asked for
by `_private`, which says where it is missing.
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
from jax_tcgemm.problem.quantized import is_quantized
from jax_tcgemm.products.dot_general import dot_general
from jax_tcgemm.products.ragged_dot import ragged_dot, ragged_dot_general
from jax_tcgemm.quantization import packed_parameter
from jax_tcgemm.quantization.packed_parameter import PackedParameter
from jax_tcgemm.quantization.quantize import dequantize
from jax_tcgemm.tensor.einsum import einsum


class PtqProvider(qwix.PtqProvider):
    """`qwix.PtqProvider` with our products of quantised arrays, those of experts among them.

    A `lax.ragged_dot` is quantised by the rules, too: a weight (g, k, n) with a scale for each
    group and column, and of tiles of k where a rule has a `tile_size`; an activation with one for
    each row. `pack_params` packs weights once that are to be served beside 16-bit activations.

    Args:
      rules: as of `qwix.PtqProvider`. For "ragged_dot", too, rules may have op_names.
      **options: as of `qwix.PtqProvider`.

    Raises:
      ImportError: for a version of Qwix in which quantised parameters are made elsewhere.
    """

    def __init__(self, rules, **options):
        _private("PtqProvider", _serving(), *_OF_SERVING)
        super().__init__(rules, _dot_general_fn=_dot_general, _einsum_fn=_einsum, **options)

    def get_intercept_map(self):
        """As of `qwix.PtqProvider`, with `lax.ragged_dot`."""
        return super().get_intercept_map() | {"jax.lax.ragged_dot": self.ragged_dot}

    def asarray(self, a, dtype=None, *args, **kwargs):
        """As of `qwix.PtqProvider`, also of packed parameters."""
        if isinstance(a, PackedParameter):
            return a if dtype is None else a.astype(dtype)
        return super().asarray(a, dtype, *args, **kwargs)

    def ragged_dot(self, lhs, rhs, group_sizes, *args, **kwargs):
        """`lax.ragged_dot`, of quantised operands where a rule says so."""
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
    """Packs the weights of 4 and 8 bits among the parameters that Qwix quantised, once.

    A model of `PtqProvider` takes them in the place of those that it is given: what is packed is
    read by the kernels of packed weights, where activations have 16 bits. It runs on any device, in
    `jax.jit` and `jax.eval_shape`, too.

    Args:
      params: a pytree of parameters, as `qwix.quantize_params` or `init` of the quantised model
        makes it; or an NNX model that `qwix.quantize_model` returned.

    Returns:
      The same with packed weights; as it was is what cannot be packed, among that 8-bit floats and
      tiles that are no multiples of 32.

    Raises:
      ValueError: for parameters of which none is quantised.
      ImportError: as `PtqProvider`.

    Numerics:
      The same integers and scales. Results have the dtype that they have with Qwix, but the kernels
      need activations of bfloat16 or float16; others multiply by the weight dequantised. So do
      quantised activations, which are dequantised as well: weights of rules that have them are not
      to be packed where the product of both is to be in 8 bits.

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
            f"{op}: params must have parameters that Qwix quantised, got none in params of type "
            f"{type(params).__name__}; see qwix.quantize_params"
        )
    return params


class QtProvider(qwix.QtProvider):
    """`qwix.QtProvider`, which trains with quantised products, by ours.

    Rules say what is quantised, as ever, and how: forwards, and backwards with a `bwd_qtype`. The
    products of a `dot_general`, an `einsum` and a `ragged_dot`, and those of both gradients, are
    `jax_tcgemm.dot_general` and `ragged_dot`, which multiply the 8 bits and scale what they add up.

    Args:
      rules: as of `qwix.QtProvider`.
      **options: as of `qwix.QtProvider`.

    Raises:
      ImportError: for a version of Qwix in which these products have another place.
    """

    def __init__(self, rules, **options):
        _training()
        super().__init__(rules, **options)

    def dot_general(self, *args, **kwargs):
        """As of `qwix.QtProvider`."""
        return _training().QtProvider.dot_general(self, *args, **kwargs)

    def einsum(self, *args, **kwargs):
        """As of `qwix.QtProvider`."""
        return _training().QtProvider.einsum(self, *args, **kwargs)

    def ragged_dot(self, *args, **kwargs):
        """As of `qwix.QtProvider`."""
        return _training().QtProvider.ragged_dot(self, *args, **kwargs)


# --- products of serving ------------------------------------------------------------------------


def _dot_general(lhs, rhs, dimension_numbers, **how):
    if isinstance(rhs, PackedParameter):
        return packed_parameter.product(_array(lhs), rhs, dimension_numbers, **how)
    return dot_general(_operand(lhs), _operand(rhs), dimension_numbers, **how)


def _einsum(subscripts, lhs, rhs):
    if isinstance(rhs, PackedParameter):
        return packed_parameter.einsum_product(subscripts, _array(lhs), rhs)
    return einsum(subscripts, _operand(lhs), _operand(rhs))


def _ragged_dot(lhs, rhs, group_sizes, *args, **how):
    names = "precision", "preferred_element_type", "group_offset", "out_sharding"
    how |= dict(zip(names, args, strict=False))
    if isinstance(rhs, PackedParameter):
        return packed_parameter.grouped_product(_array(lhs), rhs, group_sizes, **how)
    return ragged_dot(_operand(lhs), _operand(rhs), group_sizes, **how)


def _array(x) -> jax.Array:
    return qwix.dequantize(x) if is_quantized(x) else x


def _operand(x):
    """An operand as our products take it: tables of values as arrays."""
    is_table = is_quantized(x) and isinstance(x.qtype, str) and x.qtype == "nf4"
    return qwix.dequantize(x) if is_table else x


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
