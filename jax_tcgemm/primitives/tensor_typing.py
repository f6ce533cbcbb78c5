"""Types of results, from the same operation in JAX's own terms."""

from collections.abc import Callable

import jax

from jax_tcgemm.system.jax_internals import strong_type


def type_of(function: Callable) -> Callable:
    """An abstract evaluation rule that says what `function` of such operands would return.

    Shape, dtype, explicit sharding and varying axes of a shard_map all come from there.
    """

    def abstract_eval(*avals, **params):
        strong = map(strong_type, avals)
        closed = jax.make_jaxpr(lambda *operands: function(*operands, **params))(*strong)
        (out,) = closed.out_avals
        return out

    return abstract_eval
