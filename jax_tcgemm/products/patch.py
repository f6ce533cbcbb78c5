"""`patch`: products of code that takes no `dot_general` run as ours.

`jnp.matmul`, `jnp.einsum`, `@` and their like all end in one place, the bind of `dot_general_p`, on
whatever way and under whatever name a library reached them; `lax.ragged_dot` in a second one. These
are replaced, for as long as any thread is inside `patch`; the replacement does nothing in a thread
that is not.
"""

import functools
import inspect
import threading
import warnings

import jax
from jax.extend.core.primitives import dot_general_p

from jax_tcgemm.products.dot_general import dot_general
from jax_tcgemm.products.ragged_dot import ragged_dot_general
from jax_tcgemm.selection import check_names
from jax_tcgemm.system.jax_internals import in_pallas_kernel, ragged_dot_general_p
from jax_tcgemm.system.routing import Routing, enter, leave, routing

# What takes the place of each primitive of JAX's that there is.
_ROUTES = {
    primitive: ours
    for primitive, ours in (
        (dot_general_p, dot_general),
        (ragged_dot_general_p, ragged_dot_general),
    )
    if primitive is not None
}


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
      it was; `patch().__enter__()` without one lasts as long as the process, in this thread.

    Raises:
      TypeError: for an implementation that is not a string.
      ValueError: for an unknown implementation; and, from a product in the block, what
        `jax_tcgemm.dot_general` and `ragged_dot_general` raise for what they cannot take.

    Warns:
      RuntimeWarning: where this version of JAX does not let its primitives be replaced; products
        then stay its own.

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
    return _Block(Routing(implementation))


class _Block:
    """What `patch` returns. It has no finalizer: entered and never left, it stays."""

    def __init__(self, how: Routing):
        self._how = how

    def __enter__(self):
        _replace_binds()
        enter(self._how)

    def __exit__(self, *exception):
        leave(self._how)
        _restore_binds()

    def __call__(self, f):
        @functools.wraps(f)
        def inside(*args, **kwargs):
            with self:
                return f(*args, **kwargs)

        return inside


_lock = threading.Lock()
_num_inside = 0
_replaced = []


def _replace_binds() -> None:
    """Replaces the bind of each routed primitive, until the last block is left."""
    global _num_inside
    with _lock:
        if _num_inside == 0:
            try:
                for primitive, ours in _ROUTES.items():
                    primitive.bind = functools.partial(_bind, primitive, ours)
                    _replaced.append(primitive)
            except (AttributeError, TypeError):
                warnings.warn(
                    "patch: JAX must let the bind of its primitives be replaced, got JAX "
                    f"{jax.__version__}, which does not, so that products stay its own; call "
                    "jax_tcgemm.matmul, or pass jax_tcgemm.dot_general where one is taken",
                    RuntimeWarning,
                    stacklevel=3,
                )
        _num_inside += 1


def _restore_binds() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if _num_inside == 0:
            while _replaced:
                del _replaced.pop().bind


@functools.cache
def _parameters(ours) -> frozenset[str]:
    return frozenset(inspect.signature(ours).parameters)


def _bind(primitive, ours, *args, **params):
    how = routing.value
    # A later JAX may ask for what ours do not know.
    if how is None or not params.keys() <= _parameters(ours) or in_pallas_kernel():
        return type(primitive).bind(primitive, *args, **params)
    return ours(*args, **params, implementation=how.implementation)
