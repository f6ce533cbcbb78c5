"""The primitive `tcgemm_all_reduce`: `lax.psum` of one array over manual mesh axes.

    out = sum of x over the devices of `axes`

`primitives/all_reduce.py` lowers it. Parameters, all static: options; axes, a tuple of names;
devices, their number; covers_mesh, whether these are all devices of the mesh.

Its tangent and its transpose are those of `lax.psum`.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.sharding.layout import num_devices
from jax_tcgemm.system.jax_internals import ad, batching, xla, zero_tangent

all_reduce_p = core.Primitive("tcgemm_all_reduce")


def all_reduce(
    x: jax.Array,
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
    options: CallOptions | None = None,
) -> jax.Array:
    """Return the sum of x over the devices of manual mesh axes.

    Args:
      x: the device's array, which varies over the axes.
      axes: names of the axes.
      axis_sizes: size of every axis of the mesh.
      options: options of the call; None those of a sum that follows a sharded product.
    """
    options = options or CallOptions("all_reduce")
    return all_reduce_p.bind(x, **parameters(axes, axis_sizes, options))


def parameters(axes: tuple[str, ...], axis_sizes: Mapping[str, int], options: CallOptions) -> dict:
    """Return the primitive's parameters for a sum over mesh axes."""
    devices = num_devices(axes, axis_sizes)
    covers_mesh = devices == num_devices(axis_sizes, axis_sizes)
    return {"options": options, "axes": axes, "devices": devices, "covers_mesh": covers_mesh}


def _abstract_eval(x, *, axes, **params):
    del params
    # Also which mesh axes the sum varies over.
    (out,) = jax.make_jaxpr(lambda x: lax.psum(x, axes))(x).out_avals
    return out


def _jvp(primals, tangents, *, axes, **params):
    ((x,), (dx,)) = primals, tangents
    out = all_reduce_p.bind(x, axes=axes, **params)
    return out, zero_tangent(out) if type(dx) is ad.Zero else lax.psum(dx, axes)


def _transpose(ct, x, *, axes, **params):
    del params
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval)]
    return list(jax.linear_transpose(lambda x: lax.psum(x, axes), x.aval)(ct))


def _batch(axis_data, args, dims, *, axes, **params):
    ((x,), (dim,)) = args, dims
    name = getattr(axis_data, "name", None)
    if name not in axes or dim is None:
        return all_reduce_p.bind(x, axes=axes, **params), dim
    # jax.vmap gave its axis the name of a mesh axis, which it hides.
    others = tuple(axis for axis in axes if axis != name)
    summed = jnp.sum(x, dim, dtype=x.dtype)
    return lax.psum(summed, others) if others else summed, None


all_reduce_p.def_impl(functools.partial(xla.apply_primitive, all_reduce_p))
all_reduce_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[all_reduce_p] = _jvp
ad.primitive_transposes[all_reduce_p] = _transpose
batching.fancy_primitive_batchers[all_reduce_p] = _batch
