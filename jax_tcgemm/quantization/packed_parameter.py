"""Parameters of any shape as packed weights, and products by them.

A packed weight is contracted along its first dimension, and experts are stacked in front of that. A
parameter may be contracted along any, such as the (heads, size) of an attention's output: what is
packed is (k, free...), with the contracted dimensions as k. Where the first dimension is free and
there are two more, weights of its indices are stacked, (g, k, free...), as `ragged_dot` takes them;
tiles of 16 columns then lie in the order of one weight (k, g, free...), too.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from opt_einsum import parser

from jax_tcgemm.problem.operands.packed_weight import (
    ELEMENT_DTYPES,
    TILE,
    WIDE_SCALE_DTYPES,
    PackedWeight,
    group_size_within,
)
from jax_tcgemm.problem.operands.quantized import ValueKind, value_kind
from jax_tcgemm.products.dot_general import dot_general
from jax_tcgemm.products.ragged.ragged_dot import ragged_dot
from jax_tcgemm.quantization.pack import pack
from jax_tcgemm.tensor.einsum import einsum


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight",),
    meta_fields=("shape", "contracted", "dtype"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class PackedParameter:
    """A parameter whose values are a packed weight.

    Attributes:
      weight: (k, free...), or stacked along the first dimension, (g, k, free...).
      shape: shape of the parameter.
      contracted: the dimensions that products sum over, in order.
      dtype: dtype of the parameter in the type promotion of products.
    """

    weight: PackedWeight
    shape: tuple[int, ...]
    contracted: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions of the parameter."""
        return len(self.shape)

    @property
    def is_stacked(self) -> bool:
        """Whether there is a weight for each index of the first dimension."""
        return _is_stacked(self.ndim, self.contracted)

    def astype(self, dtype) -> "PackedParameter":
        """Return the parameter with another dtype; its scales are not converted."""
        return dataclasses.replace(self, dtype=np.dtype(dtype))

    def dequantize(self, dtype) -> jax.Array:
        """The parameter as an array."""
        order = _order(self.ndim, self.contracted)
        w = self.weight.dequantize(dtype).reshape([self.shape[axis] for axis in order])
        return lax.transpose(w, np.argsort(order))

    def matrix(self) -> PackedWeight | None:
        """Return one weight (k, free...); None if columns of stacked weights do not fill tiles."""
        w = self.weight
        if not self.is_stacked:
            return w
        if w.format.n % TILE != 0:
            return None
        form = dataclasses.replace(w.format, shape=(w.format.k, self.shape[0], *w.format.shape[1:]))
        w = jax.tree.map(lambda x: lax.collapse(x, 0, 2), w)
        return dataclasses.replace(w, format=form)


def _is_stacked(ndim: int, contracted) -> bool:
    return ndim > 2 and 0 not in contracted


def _order(ndim: int, contracted) -> tuple[int, ...]:
    """A parameter's dimensions in the order in which it is packed."""
    free = [axis for axis in range(ndim) if axis not in contracted]
    number = _is_stacked(ndim, contracted)
    return (*free[:number], *contracted, *free[number:])


# --- packing ------------------------------------------------------------------------------------


def packed_parameter(op: str, x, contracted) -> PackedParameter | None:
    """Pack a quantized array.

    Args:
      op: the public function, for messages.
      x: a `QuantizedArray`, or anything with its fields.
      contracted: the dimensions that products sum over, in order.

    Returns:
      The parameter, or None if the values do not have a dtype of 4 or 8 bits, or the blocks of the
      scales are not a multiple of 32 along the contracted dimensions.

    Raises:
      TypeError: if the qtype of x is unknown.
    """
    is_nf4 = value_kind(op, "parameter", x.qtype, x.qvalue.dtype) is ValueKind.NF4
    dtype = "nf4" if is_nf4 else x.qvalue.dtype.name
    has_columns = 0 < len(contracted) < x.qvalue.ndim
    if not has_columns or (dtype not in ELEMENT_DTYPES and not is_nf4):
        return None
    if str(x.scale.dtype) not in WIDE_SCALE_DTYPES:
        return None
    if x.zero_point is not None and x.zero_point.shape != x.scale.shape:
        return None
    shape, order = x.qvalue.shape, _order(x.qvalue.ndim, contracted)
    first = int(_is_stacked(len(shape), contracted))
    last = first + len(contracted)
    sizes = [shape[axis] for axis in order]
    numbers = [x.scale.shape[axis] for axis in order]
    pairs = list(zip(numbers, sizes, strict=True))
    if any(number not in (1, size) for number, size in pairs[:first] + pairs[last:]):
        return None
    # k merges the contracted dimensions. Scales are repeated along all of these before the last one
    # that has several scales, so that each scale belongs to consecutive rows of k.
    split = max((i for i in range(first, last) if numbers[i] > 1), default=first)
    whole = [n if split <= i < last else sizes[i] for i, n in enumerate(numbers)]
    depth, groups = math.prod(sizes[first:last]), math.prod(whole[first:last])
    size = depth // groups
    group_size = group_size_within(size, least=32) if groups > 1 else size
    if group_size is None:
        return None

    def folded(array, extents):
        array = lax.transpose(array, order)
        for axis, (n, extent) in enumerate(zip(array.shape, extents, strict=True)):
            array = jnp.repeat(array, extent // n, axis)
        return array.reshape(*extents[:first], -1, *extents[last:])

    q = folded(x.qvalue, sizes)
    factors = [
        None if array is None else jnp.repeat(folded(array, whole), size // group_size, first)
        for array in (x.scale, x.zero_point)
    ]
    weight = pack(op, q, *factors, group_size if groups > 1 else None, dtype)
    return PackedParameter(weight, shape, tuple(contracted), weight.dtype)


# --- products -----------------------------------------------------------------------------------


def product(lhs, w: PackedParameter, dimension_numbers, **how) -> jax.Array:
    """`dot_general` of an array and a parameter; `how` as for that."""
    (lhs_contract, rhs_contract), (_, rhs_batch) = dimension_numbers
    weight, dtype = w.matrix(), _result_dtype(lhs, w)
    if weight is None or rhs_batch or tuple(sorted(rhs_contract)) != w.contracted:
        return dot_general(lhs, w.dequantize(dtype), dimension_numbers, **how)
    axes = dict(zip(rhs_contract, lhs_contract, strict=True))
    x = _folded(lhs, [axes[axis] for axis in w.contracted])
    numbers = ((x.ndim - 1,), (0,)), ((), ())
    return dot_general(x, weight, numbers, preferred_element_type=dtype, **how)


def einsum_product(subscripts: str, lhs, w: PackedParameter) -> jax.Array:
    """`tensor.einsum` of an array and a parameter."""
    inputs, output, _ = parser.parse_einsum_input((subscripts, lhs, w))
    left, right = inputs.split(",")
    weight, dtype = w.matrix(), _result_dtype(lhs, w)
    contracted = [right[axis] for axis in w.contracted]
    common = set(left) & set(right)
    is_product = common == set(contracted) and not common & set(output)
    is_product &= all(len(set(term)) == len(term) for term in (left, right))
    if weight is None or not is_product:
        return einsum(f"{inputs}->{output}", lhs, w.dequantize(dtype))
    x = _folded(lhs, [left.index(letter) for letter in contracted])
    left, right = (
        "".join(letter for letter in term if letter not in contracted) for term in (left, right)
    )
    k = contracted[0]
    return einsum(f"{left}{k},{k}{right}->{output}", x, weight, preferred_element_type=dtype)


def grouped_product(lhs, w: PackedParameter, group_sizes, **how) -> jax.Array:
    """`ragged_dot` of an array and a parameter of shape (g, k, n); `how` as for that."""
    how["preferred_element_type"] = how.get("preferred_element_type") or _result_dtype(lhs, w)
    if w.is_stacked and w.contracted == (1,):
        return ragged_dot(lhs, w.weight, group_sizes, **how)
    return ragged_dot(lhs, w.dequantize(_result_dtype(lhs, w)), group_sizes, **how)


def _result_dtype(lhs, w: PackedParameter) -> np.dtype:
    return np.dtype(jnp.result_type(lhs.dtype, w.dtype))


def _folded(x, axes) -> jax.Array:
    """An operand whose last dimension is all of some, in this order."""
    x = jnp.moveaxis(x, axes, range(-len(axes), 0))
    return lax.collapse(x, x.ndim - len(axes))
