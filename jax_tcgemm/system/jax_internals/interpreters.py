"""Rules for JAX's other interpreters, registered when these are imported."""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable

from jax import lax
from jax.extend import core
from jax.extend.core.primitives import dot_general_p, transpose_p

# Names of modules that are not imported yet, each with a callback for its import.
_waiting: list[tuple[str, Callable[[types.ModuleType], None]]] = []


def when_imported(module: str, register: Callable[[types.ModuleType], None]) -> None:
    """Calls `register` with a module of JAX's: now, or when a product is bound after its import.

    We do not import it, because few need it and it takes time. Where it lacks what `register` looks
    for, its interpreter does without our rule.
    """
    _waiting.append((module, register))
    register_imported()


def register_imported() -> None:
    """Registers what has waited for modules that are imported now."""
    for entry in [entry for entry in _waiting if entry[0] in sys.modules]:
        module, register = entry
        try:
            register(sys.modules[module])
        except (AttributeError, KeyError):
            continue  # It is still being imported, or of a JAX that has no such table.
        _waiting.remove(entry)


def check_nans(primitive: core.Primitive) -> None:
    """Lets `checkify.float_checks` look for NaN in what a primitive returns."""

    def register(checkify):
        rule = functools.partial(checkify.nan_error_check, primitive)
        checkify.error_checks[primitive] = rule

    when_imported("jax._src.checkify", register)


def register_jet(primitive: core.Primitive, rule: Callable) -> None:
    """Gives `jax.experimental.jet` the rule of a primitive, as its table `jet_rules` wants it."""

    def register(jet):
        jet.jet_rules[primitive] = rule

    with contextlib.suppress(ImportError):  # It takes no time.
        importlib.import_module("jax.experimental.jet")
    when_imported("jax.experimental.jet", register)


def register_sparse_product(primitive: core.Primitive, to_lax: Callable) -> None:
    """Gives `jax.experimental.sparse` a product: its own of sparse arrays, transposed.

    Args:
      primitive: the primitive.
      to_lax: from its parameters to those of `lax.dot_general_p`, and the order of the result.
    """

    def register(sparse):
        for rules in (sparse.sparse_rules_bcoo, sparse.sparse_rules_bcsr):
            rules[primitive] = functools.partial(run, rules[dot_general_p], sparse)

    def run(product, sparse, environment, *operands, **params):
        params, permutation = to_lax(params)
        (out,) = product(environment, *operands, **params)
        if permutation == tuple(range(len(permutation))):
            return (out,)
        if out.is_sparse():
            transpose = sparse.sparse_rules_bcoo[transpose_p]
            return transpose(environment, out, permutation=permutation)
        return (environment.dense(lax.transpose(environment.data(out), permutation)),)

    when_imported("jax.experimental.sparse.transform", register)


def register_roofline(primitive: core.Primitive, flops: Callable) -> None:
    """Gives `jax.experimental.roofline` the cost of a primitive.

    Args:
      primitive: the primitive.
      flops: from the types of its operands and its parameters to its operations, by JAX's count: a
        multiplication and an addition for each pair of factors, of whatever type.
    """

    def register(roofline):
        def cost(ctx, *_, **params):
            count = flops(*ctx.avals_in, **params)
            moved = sum(x.size * x.dtype.itemsize for x in (*ctx.avals_in, *ctx.avals_out))
            return roofline.RooflineResult(
                flops=count, unfused_flops=count, hbm_bytes=moved, unfused_hbm_bytes=moved
            )

        roofline.register_roofline(primitive)(cost)

    when_imported("jax.experimental.roofline", register)
