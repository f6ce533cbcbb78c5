"""Whether JAX's own products become ours while a thread traces: the state that `patch` sets.

A `jax.make_user_context` is local to its thread and part of the key of each of JAX's caches of
traces, lowerings and executables. So nothing traced with one value is ever used with another.
"""

import dataclasses
import threading

import jax


@dataclasses.dataclass(frozen=True)
class Routing:
    """What a product that is routed to ours is called with."""

    implementation: str | None = None


# None, or a Routing. `with routing(None):` leaves JAX's own products alone: our lowering rules
# need it, which use them.
routing = jax.make_user_context(None)


class _Entered(threading.local):
    """What this thread has entered and not left, and the value around it."""

    def __init__(self):
        self.routings = []
        self.outside = None


_entered = _Entered()


def enter(how: Routing) -> None:
    """Routes products from here on, in this thread."""
    if not _entered.routings:
        _entered.outside = routing.value
    _entered.routings.append(how)
    _set(how)


def leave(how: Routing) -> None:
    """Undoes one `enter`.

    Generators and coroutines leave blocks in any order; what counts then is the last one entered
    that is still open.
    """
    for i in reversed(range(len(_entered.routings))):
        if _entered.routings[i] is how:
            del _entered.routings[i]
            break
    _set(_entered.routings[-1] if _entered.routings else _entered.outside)


def _set(how: Routing | None) -> None:
    routing(how).__enter__()  # Left open: what it would restore need not be what is due then.
