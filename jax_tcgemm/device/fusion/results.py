"""Arrays of a fused call: operands as kernels read them, and results as a function has them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.device.fusion.levels import Levels
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.function import Function, Result
from jax_tcgemm.problem.gemm import Problem


@dataclasses.dataclass(frozen=True)
class Made:
    """The results of a call with an epilogue, and the function's results in these.

    Attributes:
      placed: the function as the call has it.
      function: as it was given.
      shape: of an accumulator.
      extents: batch, m and n of the problem.
      levels: what the dimensions of the accumulator are in it.
    """

    placed: Function
    function: core.ClosedJaxpr
    shape: tuple[int, ...]
    extents: tuple[int, int, int]
    levels: Levels

    def arrays(self, out_dtype: str) -> list[jax.ShapeDtypeStruct]:
        """The results of the call, of which the first is D, of that dtype."""
        found = []
        for number, x, has_two in self.placed.arrays:
            shape = self._types[number].shape if has_two else self.shape
            if x.over:
                shape = x.shape(*self.extents)
            dtype = x.dtype if found else DTYPES[out_dtype]
            found.append(jax.ShapeDtypeStruct(shape, dtype))
        return found

    def results(self, found: list[jax.Array]) -> list[jax.Array]:
        """The results of the function, from those of the call."""
        found[0] = carried(found[0], self.placed.results[0].dtype)
        ordered, types = {}, self._types
        for x, (number, result, _) in zip(found, self.placed.arrays, strict=True):
            x = _reduced(x, result, self.levels, self.shape) if result.over else x
            ordered[number] = lax.reshape(x, types[number].shape).astype(types[number].dtype)
        return [ordered[number] for number in types]

    @property
    def _types(self) -> dict:
        """The function's results, by the number of the first that is in the same array."""
        numbers = sorted(number for number, *_ in self.placed.arrays)
        return dict(zip(numbers, self.function.out_avals, strict=True))


def result_arrays(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    """Return the types of a call's results, with the dimensions of the problem."""
    found = [jax.ShapeDtypeStruct(problem.d_shape, DTYPES[problem.out_dtype])]
    for _, x, has_two in problem.function.arrays[1:] if problem.function else ():
        *rows, columns = x.shape(problem.batch, problem.m, problem.n)
        shape = (*rows, *((2,) if has_two else ()), columns)
        found.append(jax.ShapeDtypeStruct(shape, x.dtype))
    return found


_REDUCTIONS = {
    "sum": lambda x, axes: jnp.sum(x, axes, dtype=x.dtype),
    "max": jnp.max,
    "min": jnp.min,
}


def _reduced(x: jax.Array, result: Result, levels: Levels, shape) -> jax.Array:
    """Reduce what a kernel has stored of a reduction, one value for each CTA tile."""
    batch = (*levels.outer, *levels.inner)
    # None stands for what they were reduced to.
    axes = (*batch, *levels.m, None) if result.over == "columns" else (*batch, None, *levels.n)
    number = x.shape[2 if result.over == "columns" else 1]
    x = lax.reshape(x, [number if axis is None else shape[axis] for axis in axes])
    over = [i for i, axis in enumerate(axes) if axis is None or axis in result.dimensions]
    return _REDUCTIONS[result.kind](x, tuple(over))


def stored(x: jax.Array) -> jax.Array:
    """An operand as kernels read it. A single truth value would pass for a kernel."""
    return x.astype(np.uint8) if x.dtype == np.bool_ else x


def carried(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the values that a D of another dtype of the same size holds."""
    if x.dtype == dtype:
        return x
    return x != 0 if dtype == np.bool_ else lax.bitcast_convert_type(x, dtype)
