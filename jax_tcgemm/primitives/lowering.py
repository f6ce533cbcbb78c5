"""How the primitives register their lowering: one rule, told the platform."""

import functools
from collections.abc import Callable

from jax.extend import core
from jax.interpreters import mlir


def register(primitive: core.Primitive, lower: Callable) -> None:
    """Registers `lower(ctx, *operands, platform=..., **params)` for every platform.

    The platform is "cpu" or "cuda"; elsewhere the name of that, or of those, joined by slashes.
    """

    def lower_elsewhere(ctx, *operands, **params):
        platforms = ctx.platforms or ctx.module_context.platforms
        return lower(ctx, *operands, platform="/".join(platforms), **params)

    for platform in ("cpu", "cuda"):
        rule = functools.partial(lower, platform=platform)
        mlir.register_lowering(primitive, rule, platform=platform)
    mlir.register_lowering(primitive, lower_elsewhere)
