"""How the primitives of tensor operations are lowered: all in the same way."""

import functools
from collections.abc import Callable

from jax.extend import core

from jax_tcgemm.device import tensor
from jax_tcgemm.primitives import lowering
from jax_tcgemm.sharding import partitioning


def register(
    primitive: core.Primitive,
    product_of: Callable,
    division_of: Callable,
    *,
    cacheable: bool = True,
) -> None:
    """Registers the lowering of a primitive on every platform.

    Args:
      primitive: the primitive.
      product_of: from the types of operands and result and the parameters to a `tensor.Request`.
      division_of: from the types of each operand and the parameters to a `partitioning.Division`.
      cacheable: as of `lowering.register`.
    """

    def lower(ctx, *operands, device, obstacle, **params):
        request = product_of(*ctx.avals_in, *ctx.avals_out, params)
        # What XLA runs anyway, it also partitions.
        is_ours = not tensor.is_xla(request)
        if not obstacle and is_ours and partitioning.is_divided(ctx):
            return partitioning.lower(ctx, operands, division_of(*ctx.avals_in, params))
        plan = tensor.make_plan(request.of_values(operands), device, obstacle)
        run = functools.partial(tensor.run, plan)
        return partitioning.lower_on_device(ctx, lambda *operands: (run(*operands),), *operands)

    lowering.register(primitive, lower, cacheable=cacheable)
