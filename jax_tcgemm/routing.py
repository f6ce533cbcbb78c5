"""Whether JAX's own products become ours while a thread traces: the state that `patch` sets.

A `jax.make_user_context` is local to its thread and part of the key of each of JAX's caches of
traces, lowerings and executables. So nothing traced with one value is ever used with another.
"""

import contextlib
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


class _Blocks(threading.local):
    """The blocks of this thread that are open, and the value around them."""

    def __init__(self):
        self.open = []
        self.outside = None


_blocks = _Blocks()


@contextlib.contextmanager
def routed(how: Routing):
    """A block in which products are routed.

    Generators and coroutines leave blocks in any order; what counts then is the last one entered
    that is still open.
    """
    if not _blocks.open:
        _blocks.outside = routing.value
    entry = [how]
    _blocks.open.append(entry)
    routing(how).__enter__()  # Left open: what it would restore need not be what is due then.
    try:
        yield
    finally:
        _blocks.open = [other for other in _blocks.open if other is not entry]
        routing(_blocks.open[-1][0] if _blocks.open else _blocks.outside).__enter__()
