"""Whether a row's bits must be its own while a thread traces, and for how many rows it is chosen.

A `jax.make_user_context`, as in routing.py: part of the key of each of JAX's caches of traces.
"""

import jax

# 0 where it need not.
invariance = jax.make_user_context(0)
