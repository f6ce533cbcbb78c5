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
from jax_tcgemm.products.ragged.ragged_dot import ragged_dot_general
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
    """Replace JAX's products by this library's, for code without a `dot_general` argument.

    Code that is traced or called in the block, in this thread, uses `jax_tcgemm.dot_general` for
    `jnp.matmul`, `jnp.dot`, `jnp.einsum`, `jnp.tensordot`, `lax.dot_general` and `@`, under
    whatever name, and `jax_tcgemm.ragged_dot_general` for `lax.ragged_dot`. The gradients of such
    code use these functions, too. `patch` serves libraries without a hook, such as Equinox and
    Haiku. If a library accepts a `dot_general` argument, prefer the argument.

    `patch` also decorates a function, whose products are then replaced wherever the function is
    called or traced::

        forward = jax.jit(jax_tcgemm.patch()(model))

    The block applies where a function is *traced*. JAX's caches distinguish functions traced inside
    the block from functions traced outside, so a function used in both places is compiled twice. A
    jaxpr, an executable and the functions that `jax.vjp` returned do not change. The rules of a
    `jax.custom_vjp` are traced when the gradient is computed: compute the gradient in the block.

    Blocks nest: the innermost block counts, and `implementation="xla"` restores XLA's product for a
    part. Other threads are not affected, not even threads started in the block. All code that runs
    in the thread is affected, including other coroutines while the block waits in a coroutine;
    decorate a function there instead. The bodies of Pallas kernels do not change. Operations other
    than `dot_general` do not change, either, such as convolutions, factorizations and
    `jax.nn.scaled_matmul`.

    Args:
      implementation: name of the implementation that must run every product (`jax_tcgemm.info()`
        lists the names); a call fails if the implementation cannot. None selects an implementation
        for each product; `jax_tcgemm.explain`, called in the block, reports the implementation.

    Returns:
      A context manager that is also a decorator. The exit from the block, also by an exception,
      restores JAX's products. `patch().__enter__()` without an exit lasts as long as the process,
      in this thread.

    Raises:
      TypeError: if the implementation is not a string.
      ValueError: if the implementation is unknown. A product in the block raises the errors of
        `jax_tcgemm.dot_general` and `ragged_dot_general`.

    Warns:
      RuntimeWarning: if this version of JAX does not allow its primitives to be replaced. Products
        are then JAX's own.

    Numerics:
      The rules of `jax_tcgemm.dot_general` apply, with the precision that the code requests.

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
    """Context manager and decorator that `patch` returns.

    There is no finalizer: a block that is entered and never left stays in effect.
    """

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
    """Replace the bind of each routed primitive, until the last block is left."""
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
