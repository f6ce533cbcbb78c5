"""Whether JAX's own products become ours while a thread traces: the state that `patch` sets.

A `jax.make_user_context` is local to its thread and part of the key of each of JAX's caches of
traces, lowerings and executables. So nothing traced with one value is ever used with another.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Routing:
    """What a product that is routed to ours is called with."""

    implementation: str | None = None


# None, or a Routing. `with routing(None):` leaves JAX's own products alone: our lowering rules
# need it, which use them.
routing = jax.make_user_context(None)
