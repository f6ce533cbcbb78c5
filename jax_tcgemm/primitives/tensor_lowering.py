"""How the primitives of tensor operations are lowered: all in the same way."""

import functools
from collections.abc import Callable

from jax.extend import core
from jax.interpreters import mlir

from jax_tcgemm.primitives import partitioning
from jax_tcgemm.primitives.dot_general import obstacle_of
from jax_tcgemm.tensor import planning


def register(primitive: core.Primitive, request_of: Callable, division_of: Callable) -> None:
    """Registers the lowering of a primitive on every platform.

    Args:
      primitive: the primitive.
      request_of: from the types of the operands and the parameters to a `planning.Request`.
      division_of: from the types of each operand and the parameters to a `partitioning.Division`.
    """

    def lower(ctx, *operands, platform, **params):
        obstacle = obstacle_of(platform, *ctx.avals_in, *ctx.avals_out)
        obstacle = obstacle or partitioning.obstacle_to_automatic(ctx)
        request = request_of(ctx.avals_in, params)
        # What XLA runs anyway, it also partitions.
        is_ours = not planning.is_xla(request)
        if not obstacle and is_ours and partitioning.is_divided(ctx):
            return partitioning.lower(ctx, operands, division_of(*ctx.avals_in, params))
        run = planning.lowered(request.operation.kind, request, platform, obstacle)
        return partitioning.lower_on_device(ctx, lambda *operands: (run(*operands),), *operands)

    def lower_elsewhere(ctx, *operands, **params):
        platforms = ctx.platforms or ctx.module_context.platforms
        return lower(ctx, *operands, platform="/".join(platforms), **params)

    for platform in ("cpu", "cuda"):
        rule = functools.partial(lower, platform=platform)
        mlir.register_lowering(primitive, rule, platform=platform)
    mlir.register_lowering(primitive, lower_elsewhere)
