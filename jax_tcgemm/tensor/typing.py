"""Types of results, from the same operation in JAX's own terms."""

from collections.abc import Callable

import jax


def type_of(function: Callable) -> Callable:
    """An abstract evaluation rule that says what `function` of such operands would return.

    Shape, dtype, explicit sharding and varying axes of a shard_map all come from there.
    """

    def abstract_eval(*avals, **params):
        structs = [
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=x.sharding, manual_axis_type=x.manual_axis_type
            )
            for x in avals
        ]
        closed = jax.make_jaxpr(lambda *operands: function(*operands, **params))(*structs)
        (out,) = closed.out_avals
        return out

    return abstract_eval
