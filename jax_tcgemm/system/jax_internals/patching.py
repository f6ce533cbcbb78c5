"""Names of JAX that `patch` needs: errors, the ragged product, and kernels of Pallas."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core


def _find_sharding_type_error() -> type[Exception]:
    """Return JAX's exception for operands with incompatible shardings over explicit axes."""
    try:
        return importlib.import_module("jax._src.core").ShardingTypeError
    except (ImportError, AttributeError):
        return TypeError


ShardingTypeError = _find_sharding_type_error()


def _find_ragged_dot_general_p() -> core.Primitive | None:
    """The primitive of `lax.ragged_dot`, which has no public name, from a trace of one.

    None where JAX makes its ragged products of other primitives.
    """
    shapes = ((1, 1), jnp.float32), ((1, 1, 1), jnp.float32), ((1,), jnp.int32)
    jaxpr = jax.make_jaxpr(lax.ragged_dot)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    numbers = lax.RaggedDotDimensionNumbers
    of_numbers = (
        eqn.primitive
        for eqn in jaxpr.eqns
        if any(isinstance(value, numbers) for value in eqn.params.values())
    )
    return next(of_numbers, None)


ragged_dot_general_p = _find_ragged_dot_general_p()


def _find_scaled_matmul_p() -> core.Primitive | None:
    """The primitive of `jax.nn.scaled_matmul`, which has no public name, from a trace of one.

    None where JAX has no such function, or makes it of other primitives.
    """
    x, scales = (jax.ShapeDtypeStruct((1, 1, k), jnp.float8_e4m3fn) for k in (32, 1))
    try:
        jaxpr = jax.make_jaxpr(jax.nn.scaled_matmul)(x, x, scales, scales).jaxpr
        while len(jaxpr.eqns) == 1 and (inner := jaxpr.eqns[0].params.get("jaxpr")) is not None:
            jaxpr = inner.jaxpr
    except (AttributeError, TypeError, ValueError):
        return None
    primitives = [eqn.primitive for eqn in jaxpr.eqns]
    is_one = len(primitives) == 1 and jaxpr.eqns[0].params.keys() == {"preferred_element_type"}
    return primitives[0] if is_one else None


scaled_matmul_p = _find_scaled_matmul_p()


def in_pallas_kernel() -> bool:
    """Whether what is being traced is the body of a Pallas kernel.

    Pallas says so to itself only, in a place that changes. But whoever traces, differentiates,
    batches or lowers a body is one of its modules, and that is on the stack.
    """
    if "jax.experimental.pallas" not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if _is_of_pallas(frame.f_globals.get("__name__", "")):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _is_of_pallas(module: str) -> bool:
    folders = module.split(".")
    # Its `ops` are users of Pallas, with products of their own outside of kernels.
    return folders[0] == "jax" and "pallas" in folders and "ops" not in folders
