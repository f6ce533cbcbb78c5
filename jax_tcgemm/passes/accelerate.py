"""The public `accelerate`."""

import functools
from collections.abc import Callable, Hashable

import jax
import numpy as np
from jax.extend import core

from jax_tcgemm.passes.rewriting import Rewriter
from jax_tcgemm.primitives import lowering
from jax_tcgemm.system.exact import Exactly
from jax_tcgemm.system.jax_internals import is_tracer, run_program, trace_context

# Programs that one function keeps.
_MOST_PROGRAMS = 64


def accelerate(fn: Callable, *, wide: bool = False, losses: bool | None = None) -> Callable:
    """Runs a function with its products as ours, and what follows them as their epilogues.

        out = f(lax.dot_general(a, b), *operands)    becomes one call

    where f is elementwise: a bias, an activation, a residual, a mask, a conversion, and in a
    backward pass the derivative of an activation. The function is traced, and in its program each
    `lax.dot_general`, under whatever name it was called, becomes a product of this library,
    together with the elementwise equations that follow it where there is one place in the program
    for all of them; `lax.ragged_dot` becomes `jax_tcgemm.ragged_dot_general`. The program may be
    one that JAX has differentiated already::

        step = jax.jit(jax_tcgemm.accelerate(train_step))

    Two products of one operand are one call where elementwise equations need an element of each,
    as a gate and what it gates; so are the halves of one product, as of stacked weights. Sums,
    maxima and minima over whole rows or columns of what an epilogue computes are results of its
    call, unless a loop of XLA's reads the same and may compute them on its way.

    A product that is only the logits of a loss is not made: the loss, however it is written, and
    its gradients are those of `jax_tcgemm.linear_cross_entropy`, from a size on.

    Looked into are jit, scan, while, cond, remat, shard_map, functions with derivatives of their
    own, and what a `jax.custom_vjp` still has to do for its derivatives; the rules of a
    `jax.custom_jvp` stay as they are. So do the bodies of Pallas kernels, what has effects, and
    remat with a policy that is still to be differentiated, since a policy tells primitives apart.
    What cannot be rewritten runs as it was. No product is computed twice, but logits of losses
    whose gradients, or whose largest ones, need them again, and none is left out.

    Whether a kernel computes an epilogue is decided where the program is lowered: only where that
    should take less time than the bare product and what XLA makes of the rest. Everywhere else it
    runs as those, and a product alone on a GPU by XLA, but where another one was measured to be
    faster or rows do not begin on 16 bytes. `jax_tcgemm.explain` shows each group, and why.

    It composes with `jax.grad`, `jax.vmap` and `jax.jit` around it and inside of it. The
    derivatives of a loss are best taken inside, as above: then they are accelerated, too.

    Args:
      fn: a function that JAX can trace. Arguments that are arrays are traced; Python's own numbers
        and everything else that is no array it gets as they are. As for `jax.jit` it must be pure:
        it is traced once for the types of the arrays, and the others.
      wide: compute epilogues in float32 from the accumulator to their results: what the function
        rounds to narrower floats in between is not rounded, and neither is the product.
      losses: whether to make losses without their logits; None does so where JAX has one device,
        and in a `jax.shard_map` over all axes. Elsewhere tokens may be divided over automatic mesh
        axes, which would have each chunk's gradient of the weights summed over devices.

    Returns:
      A function of the same arguments and results.

    Raises:
      TypeError: when `fn` is no function, `wide` no truth value, or `losses` neither one nor None.

    Numerics:
      Those of the function, with its products summed as by `jax_tcgemm.dot_general`: every rounding
      to a narrower dtype that the program has stays where it is. With `wide` they are fewer, and
      the results of an epilogue are each rounded once. Sums that are results of a call are added up
      in float32 at least, eight numbers first.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> def layer(x, w, bias):
      ...     return x + jax.nn.gelu(x @ w + bias)
      >>> x, w, bias = jnp.ones((8, 16)), jnp.ones((16, 16)), jnp.ones(16)
      >>> fast = jax_tcgemm.accelerate(layer)
      >>> bool(jnp.allclose(fast(x, w, bias), layer(x, w, bias)))
      True
      >>> [eqn.primitive.name for eqn in jax.make_jaxpr(fast)(x, w, bias).eqns]
      ['tcgemm_epilogue_product']
    """
    if not callable(fn):
        raise TypeError(
            f"accelerate: fn must be a function, got fn of type {type(fn).__name__}; decorate one, "
            "or pass it"
        )
    if not isinstance(wide, bool):
        raise TypeError(
            f"accelerate: wide must be True or False, got wide of type {type(wide).__name__}; pass "
            "other arguments to the function that it returns"
        )
    if not (losses is None or isinstance(losses, bool)):
        raise TypeError(
            f"accelerate: losses must be True, False or None, got losses of type "
            f"{type(losses).__name__}; pass other arguments to the function that it returns"
        )
    programs: dict = {}

    @functools.wraps(fn)
    def accelerated(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [x for x in leaves if _is_array(x)]
        others = tuple(_Traced if _is_array(x) else x for x in leaves)
        types = tuple(map(jax.typeof, arrays))
        key = _key(tree, others, types)
        program = None if key is None else programs.get(key)
        if program is None:
            program = _Program.of(fn, tree, others, types, wide=wide, losses=losses)
            if key is not None and not program.holds_tracers:
                programs[key] = program
                if len(programs) > _MOST_PROGRAMS:
                    programs.pop(next(iter(programs)), None)
        return program(arrays)

    return accelerated


class _Traced:
    """Stands for an argument or a result that is traced."""


def _is_ours(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is of a primitive of this library, whose kernels are compiled from then.

    That is as soon as it is bound.
    """
    return eqn.primitive in lowering.PRIMITIVES


def _is_array(x) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic) or is_tracer(x)


def _key(tree, others: tuple, types: tuple) -> Hashable | None:
    """Return the key of a rewritten program; None where an argument has no hash."""
    try:
        return tree, Exactly(others), types, trace_context()
    except TypeError:
        return None


class _Program:
    """A rewritten program, how its results are arranged, and what of them is no array."""

    def __init__(self, closed: core.ClosedJaxpr, tree, others: list):
        self._closed, self._tree, self._others = closed, tree, others

    @classmethod
    def of(cls, fn: Callable, tree, others: tuple, types: tuple, **how) -> "_Program":
        """Traces a function and rewrites what it does."""
        results = None, []

        def flat(*arrays):
            nonlocal results
            rest = iter(arrays)
            leaves = [next(rest) if x is _Traced else x for x in others]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            found, out_tree = jax.tree.flatten(fn(*args, **kwargs))
            results = out_tree, [_Traced if _is_array(x) else x for x in found]
            return [x for x in found if _is_array(x)]

        closed = jax.make_jaxpr(flat)(*types)
        rewriter = Rewriter(functools.partial(accelerate, **how), **how)
        return cls(rewriter(closed), *results)

    @property
    def holds_tracers(self) -> bool:
        """Whether it is of one trace only, whose arrays the function has closed over."""
        return any(map(is_tracer, self._closed.consts))

    def __call__(self, arrays):
        found = iter(run_program(self._closed, arrays, _is_ours))
        leaves = [next(found) if x is _Traced else x for x in self._others]
        return jax.tree.unflatten(self._tree, leaves)
