"""State set by `patch`: whether JAX's own products are replaced by ours while a thread traces.

A `jax.make_user_context` is local to its thread and part of the keys of JAX's caches of traces,
lowerings and executables. So a trace made with one value is never used with another.
"""

import dataclasses
import threading

import jax


@dataclasses.dataclass(frozen=True)
class Routing:
    """Arguments of products that replace JAX's own."""

    implementation: str | None = None


# None, or a Routing. Our lowering rules, which use JAX's own products, run in
# `with routing(None):`, where none are replaced.
routing = jax.make_user_context(None)


class _Entered(threading.local):
    """Routings that this thread has entered and not left, and the value outside of them."""

    def __init__(self):
        self.routings = []
        self.outside = None


_entered = _Entered()


def enter(how: Routing) -> None:
    """Start to replace JAX's products in this thread."""
    if not _entered.routings:
        _entered.outside = routing.value
    _entered.routings.append(how)
    _set(how)


def leave(how: Routing) -> None:
    """Undo one `enter`.

    Generators and coroutines may leave blocks in any order; the last entered block that is still
    open has effect.
    """
    for i in reversed(range(len(_entered.routings))):
        if _entered.routings[i] is how:
            del _entered.routings[i]
            break
    _set(_entered.routings[-1] if _entered.routings else _entered.outside)


def _set(how: Routing | None) -> None:
    routing(how).__enter__()  # Never exited, since the value to restore may have changed.
