"""Primitives that call functions, and primitives that consist of other primitives."""

from jax import lax

# Functions of functions, to which it does not matter here how these are differentiated.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)
# Under which of its parameters each has its function.
CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _integer_pow(x, *, y):
    """By as few products as JAX, in its order."""
    if y == 0:
        return lax.full_like(x, 1)
    power, rest = None, abs(y)
    while rest:
        if rest % 2:
            power = x if power is None else lax.mul(power, x)
        rest //= 2
        if rest:
            x = lax.mul(x, x)
    return lax.div(lax.full_like(power, 1), power) if y < 0 else power


def _one_minus_square(x):
    one = lax.full_like(x, 1)
    return lax.mul(lax.add(one, x), lax.sub(one, x))


def _polynomial(x, *coefficients, unroll=None):
    """From the coefficient of the lowest power to that of the highest."""
    *rest, value = coefficients
    for coefficient in reversed(rest):
        value = lax.add(lax.mul(value, x), coefficient)
    return value


# Primitives that are several of others: each of these rounds.
EXPANSIONS = {
    "integer_pow": _integer_pow,
    "one_minus_square": _one_minus_square,
    "polynomial": _polynomial,
    "square": lambda x: lax.mul(x, x),
}
