"""`patch`: products of code that takes no `dot_general` run as ours.

`jnp.matmul`, `jnp.einsum`, `@` and their like all end in one place, the bind of `dot_general_p`, on
whatever way and under whatever name a library reached them; `lax.ragged_dot` in a second one. These
are replaced, for as long as any thread is inside `patch`; the replacement does nothing in a thread
that is not.
"""

import contextlib
import functools
import sys
import threading

from jax._src.lax.lax import ragged_dot_general_p  # Not public anywhere.
from jax.extend.core.primitives import dot_general_p

from jax_tcgemm.dot_general import dot_general
from jax_tcgemm.ragged_dot import ragged_dot_general
from jax_tcgemm.routing import Routing, routed, routing
from jax_tcgemm.selection import check_names


def _dot_general(how: Routing, lhs, rhs, **params):
    return dot_general(lhs, rhs, **params, implementation=how.implementation)


def _ragged_dot_general(how: Routing, lhs, rhs, group_sizes, **params):
    return ragged_dot_general(lhs, rhs, group_sizes, **params, implementation=how.implementation)


_ROUTES = {dot_general_p: _dot_general, ragged_dot_general_p: _ragged_dot_general}

_lock = threading.Lock()
_num_inside = 0


@contextlib.contextmanager
def patch(*, implementation: str | None = None):
    """Runs the products of code that takes no `dot_general`, as if it called ours.

    Whatever is traced or called in the block, in this thread, gets `jax_tcgemm.dot_general` for
    `jnp.matmul`, `jnp.dot`, `jnp.einsum`, `jnp.tensordot`, `lax.dot_general` and `@`, under
    whatever name, and `jax_tcgemm.ragged_dot_general` for `lax.ragged_dot`; and so do the gradients
    of it. For libraries without a hook of their own, such as Equinox and Haiku; where one can be
    passed a `dot_general`, that is the better way.

    It also decorates a function, whose products are then ours wherever it is called or traced::

        forward = jax.jit(jax_tcgemm.patch()(model))

    What counts is where a function is *traced*. JAX's caches tell apart what was traced inside and
    outside, so that a function used in both places is compiled twice; a jaxpr, an executable or the
    functions that `jax.vjp` returned stay what they were. The rules of a `jax.custom_vjp` are
    traced when the gradient is taken: take it in the block.

    Blocks nest: the innermost counts, and `implementation="xla"` gives back XLA's own product for a
    part. Other threads, also those that are started in the block, are not affected. Whatever its
    own thread runs is, also what other coroutines do while the block waits in one: there, decorate
    a function. The bodies of Pallas kernels are left alone, and so is what is no `dot_general`:
    convolutions, factorisations, `jax.nn.scaled_matmul`.

    Args:
      implementation: name of an implementation (`jax_tcgemm.info()` lists them), which then runs
        every product or the call fails; None selects one for each, and `jax_tcgemm.explain`, called
        in the block, says which.

    Returns:
      A context manager, which is also a decorator. On exit, also by an exception, everything is as
      it was.

    Raises:
      TypeError: for an implementation that is not a string.
      ValueError: for an unknown implementation; and, from a product in the block, what
        `jax_tcgemm.dot_general` and `ragged_dot_general` raise for what they cannot take.

    Numerics:
      Those of `jax_tcgemm.dot_general`, with the precision that the code asks for.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x = jnp.ones((64, 32))
      >>> with jax_tcgemm.patch():
      ...     len(jax_tcgemm.explain(lambda x: jnp.einsum("ik,jk->ij", x, x) @ x, x))
      2
    """
    check_names("patch", implementation, None)
    with _replaced_binds(), routed(Routing(implementation)):
        yield


@contextlib.contextmanager
def _replaced_binds():
    """Replaces the bind of each routed primitive, until the last thread leaves."""
    global _num_inside
    with _lock:
        if _num_inside == 0:
            for primitive, route in _ROUTES.items():
                primitive.bind = functools.partial(_bind, primitive, route)
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                for primitive in _ROUTES:
                    del primitive.bind


def _bind(primitive, route, *args, **params):
    how = routing.value
    if how is None or _in_pallas_kernel():
        return type(primitive).bind(primitive, *args, **params)
    return route(how, *args, **params)


def _in_pallas_kernel() -> bool:
    """A kernel's body is traced like any function, but Pallas lowers only JAX's primitives."""
    pallas = sys.modules.get("jax._src.pallas.core")
    return pallas is not None and pallas._pallas_tracing_env.grid_context is not None
