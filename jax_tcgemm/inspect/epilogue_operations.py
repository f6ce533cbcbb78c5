"""Names of the operations that follow a product."""

from collections.abc import Iterator

from jax.extend import core

from jax_tcgemm.system.jax_internals import as_jaxpr

# Operations that move or convert numbers and compute nothing.
_MOVING = frozenset(
    ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "stop_gradient")
)


def epilogue_operations(plan) -> tuple[str, ...]:
    """Return the names of the operations in the epilogue of a plan, each once, in their order.

    Functions that JAX has jitted under a name, such as relu, are one operation. Broadcasts,
    reshapes and conversions are left out.
    """
    product = getattr(plan, "product", None)
    function = getattr(product, "function", None)
    if function is None:
        return ()
    return tuple(dict.fromkeys(_names(as_jaxpr(function))))


def _names(jaxpr: core.Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        inner = as_jaxpr(eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr"))
        name = eqn.params.get("name")
        if inner is not None and (not isinstance(name, str) or not name.isidentifier()):
            yield from _names(inner)
        elif (name := name if inner is not None else eqn.primitive.name) not in _MOVING:
            yield name
