"""Recognition of a loss's labels in the equations that use them."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.passes.losses.heads import SHAPING, VARYING
from jax_tcgemm.passes.losses.writing import Writer


class Labels:
    """Labels of a loss.

    Attributes:
      variable: the labels; None until an equation uses labels.
    """

    def __init__(self, shape: tuple[int, ...], writer: Writer):
        self._shape, self._writer = shape, writer
        self.variable: core.Var | None = None

    def one_hot(self, eqn: core.JaxprEqn) -> bool:
        """Return whether an equation compares the labels with positions in the vocabulary."""
        for labels, positions in (eqn.invars, eqn.invars[::-1]):
            if isinstance(labels, core.Literal) or isinstance(positions, core.Literal):
                return False
            axis, label = self._axis_of_positions(positions), self._root(labels)
            ndim = positions.aval.ndim
            if axis is not None and axis - ndim == -1 and self._writer.is_row(label.aval.shape):
                return self._is_label(label)
        return False

    def are_gathered(self, eqn: core.JaxprEqn) -> bool:
        """Return whether a gather has the element of each row at its label."""
        (x, indices), params = eqn.invars, eqn.params
        numbers = params["dimension_numbers"]
        is_one_of_each = (
            _are_of_rows(
                x.aval.shape,
                *(numbers.collapsed_slice_dims, numbers.start_index_map),
                *(numbers.operand_batching_dims, numbers.start_indices_batching_dims),
            )
            and _drops(params["mode"])
            and (params["fill_value"] is None or np.isnan(params["fill_value"]))
        )
        # A label that is none has a loss of NaN.
        return is_one_of_each and self._is_label(self._root(indices))

    def are_scattered(self, eqn: core.JaxprEqn) -> bool:
        """Return whether a scatter-add adds to the element of each row at its label."""
        (x, indices, _), params = eqn.invars, eqn.params
        numbers = params["dimension_numbers"]
        is_one_of_each = _are_of_rows(
            x.aval.shape,
            *(numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims),
            *(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims),
        ) and _drops(params["mode"])
        return is_one_of_each and self._is_label(self._root(indices))

    def _is_label(self, label: core.Var) -> bool:
        """Return whether a variable has the labels; the first candidate has."""
        if not self._writer.is_row(label.aval.shape):
            return False
        if self.variable is None:
            self.variable = label
        return label is self.variable

    def _root(self, x: core.Var) -> core.Var:
        """Return the row of integers from which `x` derives by reshapes and broadcasts."""
        eqn = self._writer.made_by.get(x)
        while eqn is not None and eqn.primitive.name in (*SHAPING, *VARYING):
            (before,) = eqn.invars
            if isinstance(before, core.Literal) or not keeps_order(eqn):
                break
            if not self._writer.is_row(before.aval.shape):
                break
            x, eqn = before, self._writer.made_by.get(before)
        return x

    def _axis_of_positions(self, x: core.Var) -> int | None:
        """Return the axis along which a variable counts from 0 up to the vocabulary, or None."""
        eqn = self._writer.made_by.get(x)
        if eqn is None:
            return None
        name, shape = eqn.primitive.name, x.aval.shape
        if name == "iota":
            axis = eqn.params["dimension"]
            return axis if shape[axis] == self._shape[-1] else None
        passing = (*SHAPING, *VARYING, "convert_element_type")
        if name not in passing or isinstance(eqn.invars[0], core.Literal):
            return None
        before = self._axis_of_positions(eqn.invars[0])
        if before is None or name == "convert_element_type":
            return before if jnp.issubdtype(x.aval.dtype, jnp.integer) else None
        if name == "broadcast_in_dim":
            return int(eqn.params["broadcast_dimensions"][before])
        longest = [axis for axis, extent in enumerate(shape) if extent != 1]
        return longest[0] if len(longest) == 1 else None


def _are_of_rows(shape, taken, indexed, batch, batch_of_indices) -> bool:
    """Return whether a gather or scatter has one index per row, in the last dimension.

    Dimensions of size 1 need not be batch dimensions.
    """
    axis = len(shape) - 1
    rows = {i for i in range(axis) if shape[i] != 1}
    are_in_order = all(list(dims) == sorted(dims) for dims in (batch, batch_of_indices))
    return tuple(taken) == tuple(indexed) == (axis,) and rows <= {*batch} and are_in_order


def _drops(mode) -> bool:
    """Return whether a gather or scatter drops or excludes indices out of bounds."""
    return mode in (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def keeps_order(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation changes dimensions of size 1, or repeats along the last one."""
    if eqn.primitive.name != "broadcast_in_dim":
        return True
    (x,), (out,) = eqn.invars, eqn.outvars
    is_leading = tuple(eqn.params["broadcast_dimensions"]) == tuple(range(x.aval.ndim))
    extents = zip(x.aval.shape, out.aval.shape[:-1], strict=False)
    return is_leading and all(old == new for old, new in extents)
