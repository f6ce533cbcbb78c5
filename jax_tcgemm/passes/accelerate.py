"""Public `accelerate`."""

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
    """Rewrite a function so that its products run on this library, with fused epilogues.

        out = f(lax.dot_general(a, b), *operands)    becomes one call

    Here, f is elementwise: a bias, an activation, a residual, a mask, a conversion, or, in a
    backward pass, the derivative of an activation. `accelerate` traces the function. In the jaxpr,
    each `lax.dot_general`, under whatever name it was called, becomes a product of this library,
    together with the elementwise equations that follow and can run at one place in the program.
    `lax.ragged_dot` becomes `jax_tcgemm.ragged_dot_general`, and `jax.nn.scaled_matmul` with scales
    that are 8-bit floats becomes a product of dequantized operands in bfloat16, which is exact, on
    GPUs below compute capability 10.0. The function may contain derivatives::

        step = jax.jit(jax_tcgemm.accelerate(train_step))

    Two products of one operand become one call if an elementwise equation needs an element of each
    product, such as a gate and up. Gate and up of one product with stacked weights are handled
    in the same way. Sums, maxima and minima over whole rows or columns of an epilogue's
    values become results of the call, unless an XLA loop reads the same values and can compute the
    reduction.

    A product that is only the logits of a loss is not computed: above a certain size,
    `jax_tcgemm.linear_cross_entropy` computes the loss, in whatever form it is written, and its
    gradients.

    `accelerate` rewrites inside jit, scan, while, cond, remat, shard_map, functions with custom
    derivatives, and the functions that a `jax.custom_vjp` still runs for its derivatives. These
    stay unchanged: the rules of a `jax.custom_jvp`, the bodies of Pallas kernels, functions with
    effects, and a remat with a policy that is still to be differentiated (a policy distinguishes
    primitives). Code that cannot be rewritten runs unchanged. No product is computed twice, except
    logits of losses whose gradients or maxima need the logits again. No product is omitted.

    At lowering, a kernel is selected for an epilogue only if the fused kernel has a shorter
    estimated time than the bare product and XLA's loop for the rest. Otherwise, the bare product
    runs and XLA computes the epilogue. A product without an epilogue runs on XLA on a GPU, unless
    another implementation was measured to be faster or rows are not 16-byte aligned.
    `jax_tcgemm.explain` shows each fused group and the reason.

    `accelerate` composes with `jax.grad`, `jax.vmap` and `jax.jit`, outside and inside. Compute the
    derivatives of a loss inside, as above, so that the derivatives are accelerated, too.

    Args:
      fn: a function that JAX can trace. Array arguments are traced; Python numbers and all other
        arguments are passed unchanged. As for `jax.jit`, fn must be pure: fn is traced once for
        each combination of array types and other arguments.
      wide: whether to compute epilogues in float32 from the accumulator to the results.
        Intermediate roundings to narrower floats are then omitted, including the rounding of the
        product.
      losses: whether to compute losses without storing logits. None does so if JAX has one device,
        and in a `jax.shard_map` over all axes. In other programs, tokens may be sharded over
        automatic mesh axes, and each chunk's gradient of the weights would be summed over devices.

    Returns:
      A function with the arguments and results of fn.

    Raises:
      TypeError: if `fn` is not a function, `wide` is not a bool, or `losses` is neither a bool nor
        None.

    Numerics:
      Products accumulate as in `jax_tcgemm.dot_general`. Every rounding of the program to a
      narrower dtype stays. With `wide`, the results of an epilogue are rounded once, and
      intermediate values are not rounded. Sums that are results of a call accumulate in float32 or
      wider; groups of eight numbers are added first.

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
