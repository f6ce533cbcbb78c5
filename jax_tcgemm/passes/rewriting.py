"""Rewriting of jaxprs: products become this library's, with fused epilogues.

Equations that no pass changes remain the same objects. An equation with an inner jaxpr, such as the
body of a scan, gets the rewritten inner jaxpr; its other parameters do not change.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core.primitives import dot_general_p

from jax_tcgemm.epilogues.group import Group, Limits
from jax_tcgemm.epilogues.group_function import group_function
from jax_tcgemm.epilogues.groups import find_groups
from jax_tcgemm.epilogues.membership import is_call_of_elements
from jax_tcgemm.passes.concatenations import with_concatenations
from jax_tcgemm.passes.device_sums import with_all_reduces
from jax_tcgemm.passes.gate_transposition import with_transposed_gates
from jax_tcgemm.passes.gates import call_of, products_of
from jax_tcgemm.passes.losses.calls import loss_note
from jax_tcgemm.passes.losses.programs import with_losses
from jax_tcgemm.passes.other_products import OPTIONS, ragged_product, scaled_product
from jax_tcgemm.passes.programs import found_as, renamed, written_out
from jax_tcgemm.passes.symmetry import keeps_symmetry, symmetric_variables, with_grams
from jax_tcgemm.passes.transpositions import (
    is_transposition,
    transposed_operands,
    transposed_result,
    without_unused_transpositions,
)
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.epilogue_product import epilogue_product_p
from jax_tcgemm.problem.call_options import CallOptions, RoundingsRemoved
from jax_tcgemm.problem.dtypes import accumulator_dtype
from jax_tcgemm.problem.function import MOST_READS, MOST_RESULTS
from jax_tcgemm.problem.precision import is_split
from jax_tcgemm.system.jax_internals import (
    as_jaxpr,
    has_plain_context,
    ragged_dot_general_p,
    rewrapped,
    scaled_matmul_p,
    summed_axes,
    with_equations,
)

# Of each primitive that runs a program, the parameters with one to rewrite; None means all.
_INSIDE = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "scan", "while", "cond"), None),
    **dict.fromkeys(("checkpoint", "remat", "remat2", "shard_map"), None),
    # The rules of a custom_jvp are functions of JAX's, and stay as they are.
    **dict.fromkeys(
        ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), ("call_jaxpr", "fun_jaxpr")
    ),
}
_LIMITS = Limits(MOST_READS, MOST_RESULTS)
# Parameters of lax.dot_general that are known here; a later JAX may have others.
_PARAMETERS = {"dimension_numbers", "precision", "preferred_element_type", "out_sharding"}
_FLOATS = (
    np.dtype(jnp.float16),
    np.dtype(jnp.bfloat16),
    np.dtype(np.float32),
    np.dtype(np.float64),
)
_BYTES = (np.dtype(np.int8), np.dtype(np.uint8))
_MOST_EXTENT = 2**31 - 1


class Settings(NamedTuple):
    """Settings of a rewrite, which the caller of `accelerate` chooses.

    Attributes:
      wide: whether epilogues leave out their inner roundings.
      losses: whether losses are computed without logits; see `with_losses`.
    """

    wide: bool
    losses: bool | None


class Rewriter:
    """Rewrite of a jaxpr and its inner jaxprs, each once.

    Args:
      accelerate: rewrite of a function that a jaxpr holds and that is traced later.
      wide: whether epilogues leave out their inner roundings.
      losses: whether to compute losses without logits; see `with_losses`.
    """

    def __init__(
        self,
        accelerate: Callable[[Callable], Callable],
        *,
        wide: bool = False,
        losses: bool | None = None,
    ):
        self._accelerate, self._settings = accelerate, Settings(wide, losses)
        self._known: dict[int, tuple] = {}  # with the programs themselves, whose ids these are

    def __call__(self, program):
        """Rewrite a jaxpr, closed or not; return the same object if nothing changes."""
        if id(program) not in self._known:
            try:
                rewritten = self._rewritten(program)
            except Exception as error:  # of a JAX whose programs are made otherwise
                warnings.warn(
                    f"accelerate: JAX's programs must be made as this library knows them, got "
                    f"{type(error).__name__}: {error}, so that one runs as it was; call "
                    "jax_tcgemm.matmul, or report it",
                    RuntimeWarning,
                    stacklevel=2,
                )
                rewritten = program
            self._known[id(program)] = program, rewritten
        return self._known[id(program)][1]

    def _rewritten(self, program):
        jaxpr = as_jaxpr(program)
        inside = [self._with_inner(eqn) for eqn in jaxpr.eqns]
        if not any(_is_product(eqn) or summed_axes(eqn) for eqn in inside):
            if all(x is y for x, y in zip(inside, jaxpr.eqns, strict=True)):
                return program
            return with_equations(program, inside, jaxpr.outvars)
        equations, results = inside, jaxpr.outvars
        for each in PASSES:
            equations, results = each.run(equations, results, self._settings)
        return with_equations(program, equations, results)

    def _with_inner(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        """Return an equation with its inner jaxprs rewritten."""
        name = eqn.primitive.name
        if name not in _INSIDE or _decides_by_primitives(eqn):
            return eqn
        changed = {}
        for key, value in eqn.params.items():
            if _INSIDE[name] is not None and key not in _INSIDE[name]:
                continue
            if as_jaxpr(value) is not None:
                new = self(value)
            elif isinstance(value, tuple) and value and all(as_jaxpr(x) is not None for x in value):
                new = tuple(map(self, value))
                new = value if all(x is y for x, y in zip(new, value, strict=True)) else new
            else:
                continue
            if new is not value:
                changed[key] = new
        if changed and "fwd_jaxpr_thunk" in eqn.params:
            changed |= self._derivatives(eqn)
        return eqn.replace(params=eqn.params | changed) if changed else eqn

    def _derivatives(self, eqn: core.JaxprEqn) -> dict:
        """Return the differentiation rules of a `jax.custom_vjp` call, rewritten."""

        def forward(thunk):
            def rewritten(*zeros):
                program, constants = thunk(*zeros)
                return self(program), constants

            return rewritten

        changes = {"fwd_jaxpr_thunk": forward, "bwd": self._accelerate}
        return {
            key: rewrapped(eqn.params[key], change)
            for key, change in changes.items()
            if key in eqn.params
        }


def notes(equations: Sequence[core.JaxprEqn], results) -> dict[int, str]:
    """Return the notes of `explain` on the products of a rewritten program, by their numbers.

    A note says why a product has no epilogue, with the equation that follows and cannot be fused;
    how many roundings an epilogue leaves out; why logits are stored for a loss; or that an equation
    computes a loss without storing its logits.
    """
    losses = {number: note for number, eqn in enumerate(equations) if (note := loss_note(eqn))}
    options = {number: x for number, eqn in enumerate(equations) if (x := options_of(eqn))}
    if not any(x.is_accelerated for x in options.values()):
        return losses

    def is_alone(eqn: core.JaxprEqn) -> bool:
        return can_have_epilogue(eqn) and eqn.params["options"].is_accelerated

    why = find_groups(equations, results, products_of(equations, is_alone), _LIMITS).why
    found = losses
    for number, reason in why.items():
        if reason.eqn is not None and reason.eqn.primitive is epilogue_product_p:
            reason = "what follows is part of another product's epilogue"
        found[number] = f"no epilogue: {reason}"
    for number, call_options in options.items():
        if call_options.diagnostics:
            said = (*map(str, call_options.diagnostics), found.get(number))
            found[number] = "; ".join(filter(None, said))
    return found


def options_of(eqn: core.JaxprEqn) -> CallOptions | None:
    """Return the options of a call of this library; None for other equations."""
    options = eqn.params.get("options")
    return options if isinstance(options, CallOptions) else None


def _decides_by_primitives(eqn: core.JaxprEqn) -> bool:
    """Return whether a policy that is still to be applied depends on the inner primitives."""
    return eqn.params.get("policy") is not None and not eqn.params.get("differentiated", False)


def _is_product(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive in _PRODUCTS


_PRODUCTS = (dot_general_p, ragged_dot_general_p, scaled_matmul_p, plain.dot_general_p)


def can_have_epilogue(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a product of this library that can have an epilogue."""
    if eqn.primitive is not plain.dot_general_p or not has_plain_context(eqn):
        return False
    params, (out,), (lhs, rhs) = eqn.params, eqn.outvars, eqn.invars
    if not params["options"].is_unconstrained:
        return False
    precision = params["precision"]
    is_preset = isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)
    if is_preset and not is_split(precision):
        return False
    shape = out.aval.shape
    if not all(isinstance(extent, int) and extent > 0 for extent in shape):
        return False
    dtypes = lhs.aval.dtype, rhs.aval.dtype
    if dtypes[0] in _BYTES and dtypes[1] in _BYTES:
        return out.aval.dtype == np.int32
    is_float = dtypes[0] == dtypes[1] and dtypes[0] in _FLOATS and out.aval.dtype in _FLOATS
    is_narrower = is_float and out.aval.dtype.itemsize <= accumulator_dtype(*dtypes).itemsize
    return is_narrower and not getattr(out.aval, "weak_type", False)


# Primitives that programs apply to one array several times: each Flax module converts its input to
# its dtype, and in a shard_map each product makes its operands vary.
_REPEATED = frozenset({"convert_element_type", "pcast", "pvary", "reshape", "squeeze", "transpose"})


def _without_repetitions(equations, results) -> tuple[list[core.JaxprEqn], list]:
    """Remove repeated conversions and reshapes of one array; return equations and results."""
    known: dict = {}
    seen: dict = {}
    kept = []
    for eqn in equations:
        eqn = renamed(eqn, known)
        if eqn.primitive.name in _REPEATED and has_plain_context(eqn) and len(eqn.invars) == 1:
            params = tuple(sorted(eqn.params.items()))
            same = seen.setdefault((eqn.primitive, _atom(eqn.invars[0]), params), eqn)
            if same is not eqn:
                known[eqn.outvars[0]] = same.outvars[0]
                continue
        kept.append(eqn)
    return kept, [found_as(x, known) for x in results]


def _atom(x):
    return id(x) if isinstance(x, core.Literal) else x


# --- products -------------------------------------------------------------------------------------


def _products_as_ours(equations, results) -> list[core.JaxprEqn]:
    """Replace JAX's products by this library's, with transpositions as layouts."""
    made_by = {x: eqn for eqn in equations for x in eqn.outvars}
    # For each variable, the transposition that alone reads it, else None.
    users: dict = {}
    for eqn in equations:
        for x in eqn.invars:
            if not isinstance(x, core.Literal):
                users[x] = eqn if is_transposition(eqn) and x not in users else None
    users |= dict.fromkeys(x for x in results if not isinstance(x, core.Literal))
    found, gone = [], set()
    for eqn in equations:
        if id(eqn) in gone:
            continue
        if eqn.primitive is ragged_dot_general_p:
            found += ragged_product(eqn)
        elif eqn.primitive is scaled_matmul_p:
            found += scaled_product(eqn)
        elif _is_known_product(eqn):
            ours = transposed_result(
                transposed_operands(_ours(eqn), made_by, plain.READING), users, gone
            )
            # A transposition that is merged into this product cannot be merged into another one.
            made_by.pop(ours.outvars[0], None)
            found.append(ours)
        else:
            found.append(eqn)
    return without_unused_transpositions(found, results)


def _is_known_product(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive is plain.dot_general_p:
        return True
    if eqn.primitive is not dot_general_p or not eqn.params.keys() <= _PARAMETERS:
        return False
    extents = [extent for x in (*eqn.invars, *eqn.outvars) for extent in x.aval.shape]
    return (
        not any(isinstance(x, core.Literal) for x in eqn.invars)
        and has_plain_context(eqn)
        and all(not isinstance(x, int) or x <= _MOST_EXTENT for x in extents)
    )


def _ours(eqn: core.JaxprEqn) -> core.JaxprEqn:
    if eqn.primitive is plain.dot_general_p:
        return eqn
    numbers = tuple(
        tuple(tuple(map(int, axes)) for axes in pair) for pair in eqn.params["dimension_numbers"]
    )
    params = {
        "options": OPTIONS,
        "dimension_numbers": numbers,
        "permutation": tuple(range(eqn.outvars[0].aval.ndim)),
        "precision": eqn.params["precision"],
        "preferred_element_type": eqn.params["preferred_element_type"],
        "out_sharding": eqn.params.get("out_sharding"),
    }
    return eqn.replace(primitive=plain.dot_general_p, params=params)


# --- epilogues ------------------------------------------------------------------------------------


def _with_epilogues(equations: Sequence[core.JaxprEqn], results, *, wide: bool):
    """Return the equations with each group of a product and its epilogue as one call."""
    products = products_of(equations, can_have_epilogue)
    grouping = find_groups(equations, results, products, _LIMITS)
    gone = {number for group in grouping.groups for number in group.products} | grouping.gone
    known = symmetric_variables(equations)
    waiting = sorted(grouping.groups, key=lambda group: group.place)[::-1]
    found: list[core.JaxprEqn] = []

    def place_groups(end: tuple) -> None:
        while waiting and waiting[-1].place < end:
            group = waiting.pop()
            found.extend(_call(equations, group, known, wide=wide))
            found.extend(equations[number] for number in group.repeated)

    for number, eqn in enumerate(equations):
        place_groups((number, 0))
        if number not in gone:
            found.append(eqn)
    place_groups((math.inf,))
    return found


def _call(equations, group: Group, known, *, wide: bool) -> list[core.JaxprEqn]:
    """Return the equations of a group's call: at most one reshape of an operand, and the call.

    `known` has the `symmetric_variables` of the equations.
    """
    eqn = equations[group.products[0]]
    dtype = accumulator_dtype(*(x.aval.dtype for x in eqn.invars))
    function, left_out = group_function(equations, group, dtype, wide=wide)
    options = eqn.params["options"]
    options = options if options.is_accelerated else OPTIONS
    options = options.reporting(RoundingsRemoved(left_out)) if left_out else options
    before, factors, encoding = call_of(equations, group)
    is_alone = encoding.num_accumulators == 1
    if is_alone and keeps_symmetry(function, group.inputs, eqn.outvars[0], known):
        encoding = dataclasses.replace(encoding, symmetric=True)
    params = {"options": options, "encoding": encoding, "function": function}
    params |= {"in_place": None, "xla_dtype": None}
    call = eqn.replace(
        primitive=epilogue_product_p,
        invars=[*factors, *group.inputs],
        outvars=list(group.results),
        params=params,
    )
    return [*before, call]


# --- the passes -----------------------------------------------------------------------------------


class Pass(NamedTuple):
    """A rewrite pass.

    Attributes:
      name: description.
      run: function from equations, results and settings to equations and results that compute the
        same values, apart from roundings that the settings leave out.
    """

    name: str
    run: Callable[[Sequence[core.JaxprEqn], list, Settings], tuple[Sequence[core.JaxprEqn], list]]


def _of_equations(rewrite: Callable) -> Callable:
    """Return the `run` of a pass that does not change the results."""
    return lambda equations, results, settings: (rewrite(equations, results), results)


# In the order in which they run.
PASSES = (
    Pass(
        "inline calls of elementwise operations",
        lambda equations, results, _: written_out(equations, results, is_call_of_elements),
    ),
    Pass(
        "reuse conversions and reshapes",
        lambda equations, results, _: _without_repetitions(equations, results),
    ),
    Pass("call this library's GEMMs, with transposes as layouts", _of_equations(_products_as_ours)),
    Pass(
        "compute products of symmetric matrices by half",
        lambda equations, results, _: (with_grams(equations), results),
    ),
    Pass("replace sums of padded arrays by concatenations", _of_equations(with_concatenations)),
    Pass(
        "transpose gated GEMMs whose weights are rows of the result",
        _of_equations(with_transposed_gates),
    ),
    Pass(
        "compute losses without logits",
        lambda equations, results, settings: with_losses(
            equations, results, wide=settings.wide, losses=settings.losses
        ),
    ),
    Pass("sum small arrays over devices by one kernel", _of_equations(with_all_reduces)),
    Pass(
        "fuse epilogues",
        lambda equations, results, settings: (
            _with_epilogues(equations, results, wide=settings.wide),
            results,
        ),
    ),
)
