"""JAX's products other than `dot_general` as products of this library, for `accelerate`."""

import contextlib
import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.epilogues.membership import is_call_of_elements
from jax_tcgemm.passes.programs import write
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.encodings.block_scaled import dequantized, is_exact_in_bfloat16
from jax_tcgemm.problem.call_options import CallOptions, Provenance
from jax_tcgemm.products.ragged.ragged_dot import ragged_dot_general
from jax_tcgemm.selection.devices import target_device
from jax_tcgemm.system.jax_internals import as_jaxpr, has_plain_context

OPTIONS = CallOptions("accelerate", provenance=Provenance.ACCELERATED)


def ragged_product(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Return the equations of this library's ragged product, or `eqn` if it is not supported."""
    if not eqn.params.keys() <= _ragged_parameters():
        return [eqn]
    return _traced(eqn, ragged_dot_general)


@functools.cache
def _ragged_parameters() -> frozenset[str]:
    return frozenset(inspect.signature(ragged_dot_general).parameters)


def scaled_product(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Return the equations of a `jax.nn.scaled_matmul` by bfloat16, or `eqn` if it is not exact.

    From compute capability 10.0 on, GPUs multiply the operands as they are.
    """
    x, w, x_scales, w_scales = (var.aval for var in eqn.invars)
    is_exact = is_exact_in_bfloat16(x.dtype, x_scales.dtype)
    is_exact &= is_exact_in_bfloat16(w.dtype, w_scales.dtype)
    if not is_exact or target_device("cuda").compute_capability >= 100:
        return [eqn]
    return _traced(eqn, _multiplied_in_bfloat16)


def _multiplied_in_bfloat16(x, w, x_scales, w_scales, *, preferred_element_type):
    """Multiply (b, m, k) by (b, n, k), with scales of blocks of k."""

    def in_bfloat16(values, scales):
        block = 1, values.shape[2] // scales.shape[2]
        return dequantized(values, scales.astype(np.float32), block).astype(jnp.bfloat16)

    return plain.dot_general(
        in_bfloat16(x, x_scales),
        in_bfloat16(w, w_scales),
        options=OPTIONS,
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=np.dtype(preferred_element_type),
    )


def _traced(eqn: core.JaxprEqn, function: Callable) -> list[core.JaxprEqn]:
    """Return the equations of a function in the place of `eqn`, or `eqn` if it does not trace."""
    if not has_plain_context(eqn):
        return [eqn]
    with contextlib.suppress(Exception):
        closed = jax.make_jaxpr(functools.partial(function, **eqn.params))(
            *(x.aval for x in eqn.invars)
        )
        if closed.consts:
            return [eqn]
        written: list[core.JaxprEqn] = []
        known: dict = {}
        write(as_jaxpr(closed), eqn.invars, eqn.outvars, known, written, is_call_of_elements)
        names = {known[x]: x for x in eqn.outvars}
        if len(names) == len(eqn.outvars):
            return [x.replace(outvars=[names.get(y, y) for y in x.outvars]) for x in written]
    return [eqn]
