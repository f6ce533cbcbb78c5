"""Arrays rounded to 8 bits on one device: `quantized` carries a plan of request.py out."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device.call import call
from jax_tcgemm.device.request import Plan
from jax_tcgemm.problem.operands.quantized import spread
from jax_tcgemm.sharding.partitioning import resharded
from jax_tcgemm.sharding.shardings import explicit, whole


def quantized(x, *given, dtype, tiles, plan: Plan) -> tuple[jax.Array, ...]:
    """Carries out a plan: values and scales of x and, where there are tiles for it, its transpose.

    Args:
      x: the array.
      *given: its scales, where they are known: those of all tiles, and no result.
      dtype: of the values.
      tiles: of x, and of its transpose, the extents of what has one scale.
      plan: the plan.
    """
    if plan.runs_by_xla:
        return by_xla(x, *given, dtype=dtype, tiles=tiles)
    problem = plan.problem
    leading = x.shape[:-2]
    operands = [x.reshape(problem.batch, problem.rows, problem.columns)]
    for scale in given:
        scale = jnp.broadcast_to(scale, (*leading, 1, 1))
        operands.append(scale.reshape(problem.batch))
    results = problem.results()
    found = call(problem, plan.choice, operands, list(results.values()))
    shaped = []
    for name, result in zip(results, found, strict=True):
        ends = x.shape[-2:][::-1] if name.startswith("transposed") else x.shape[-2:]
        if name.endswith("scales"):
            # Rows of the folded array are those of all that it is made of.
            across = result.shape[-1]
            down = result.shape[-2] if problem.form == "blocks" else ends[0]
            ends = down, across
        shaped.append(result.reshape(*leading, *ends))
    return tuple(shaped)


def by_xla(x, *given, dtype, tiles) -> tuple[jax.Array, ...]:
    """Quantize in XLA, as a plan does in a kernel."""
    wide = x.astype(jnp.float32)
    found = []
    for i, tile in enumerate(tiles):
        own = jnp.swapaxes(wide, -1, -2) if i else wide
        scales = given[0] if given else scales_of(own, dtype, tile)
        # As XLA divides by what is repeated, which makes the bits of both steps its own.
        values = own * spread(1 / scales, own.shape, tile)
        found.append((jnp.round(values) if dtype == np.int8 else values).astype(dtype))
        if not given:
            found.append(scales)
    return tuple(found)


def scales_of(x, dtype, tile) -> jax.Array:
    """Return float32 scales, one for each block."""
    # XLA makes this of a division by a constant.
    inverse = np.float32(1) / np.float32(_largest_number(dtype))
    # Compared as integers, as kernels do, so that NaN is the largest and the scale has it, too.
    magnitudes = lax.bitcast_convert_type(x, np.uint32) & np.uint32(0x7FFFFFFF)
    scales = lax.bitcast_convert_type(_largest(magnitudes, tile), np.float32) * inverse
    tiny = jnp.finfo(jnp.float32).tiny
    return jnp.where(scales < tiny, tiny, scales)


def _with_whole_blocks(x, axis: int, size: int) -> jax.Array:
    """An array whose blocks along an axis no explicit mesh axis divides."""
    if (sharding := explicit(x)) is None:
        return x
    shards = sharding.shard_shape(x.shape)[axis]
    return x if shards % size == 0 else resharded(x, whole(x, (axis,)))


def _largest_number(dtype) -> float:
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).max


def _largest(magnitudes, tile) -> jax.Array:
    """The largest of each block."""
    counts, axes, split = [], [], magnitudes
    for size in tile:
        # Dimensions before are split already.
        axis = split.ndim - magnitudes.ndim + len(counts)
        extent = split.shape[axis]
        if size == 1:
            counts.append(extent)
            continue
        if isinstance(extent, int) and size < extent:
            counts.append(-(-extent // size))
            split = _with_whole_blocks(split, axis, size)
            padding = [(0, 0, 0)] * split.ndim
            padding[axis] = (0, counts[-1] * size - extent, 0)
            split = lax.pad(split, split.dtype.type(0), padding)
            # One at a time, as explicit mesh axes have it.
            shape = *split.shape[:axis], counts[-1], size, *split.shape[axis + 1 :]
            split, axis = split.reshape(shape), axis + 1
        else:
            counts.append(1)
        axes.append(axis)
    largest = jnp.max(split, axis=tuple(axes), initial=0)
    return largest.reshape(counts)
