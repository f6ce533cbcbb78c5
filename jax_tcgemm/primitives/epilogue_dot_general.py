"""The primitive `tcgemm_epilogue_dot_general`: a product and an elementwise function of it.

    acc = transpose(dot_general(lhs, rhs, dimension_numbers), permutation)
    results = function(acc, *operands)

`acc` has the dtype that the product accumulates in (`accumulator_dtype`); the results are what the
function makes of it. `unfused` is the same in JAX, by a plain product and XLA: it types the
primitive and runs it wherever nothing takes it as one call.

Parameters, all static: those of `tcgemm_dot_general`, whose preferred_element_type is the
accumulator's here and whose out_sharding is that of `acc`, and function, a closed jaxpr without
constants, none of whose arguments are random keys.
"""

import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import dense, epilogue
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.epilogues.calls import closes_over_arrays, written_out
from jax_tcgemm.epilogues.parts import parts_of
from jax_tcgemm.epilogues.rounding import of_stored
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import jvp_of_moving, same_varying, series_by_parts
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.sharding import partitioning, shardings
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, as_jaxpr, batching, xla, zero_tangent

epilogue_dot_general_p = core.Primitive("tcgemm_epilogue_dot_general")
epilogue_dot_general_p.multiple_results = True


def accumulator_dtype(lhs_dtype, rhs_dtype) -> np.dtype:
    """What the product of such operands accumulates in: at least float32, of integers int32."""
    dtype = jnp.promote_types(lhs_dtype, rhs_dtype)
    if jnp.issubdtype(dtype, jnp.integer) and np.dtype(dtype).itemsize <= 4:
        return np.dtype(np.int32)
    return wide_dtype(dtype)


def accumulator(lhs, rhs, **params):
    """The type of `acc`, of a product with these parameters of `tcgemm_dot_general`."""
    params |= {"preferred_element_type": accumulator_dtype(lhs.dtype, rhs.dtype)}
    # What was asked for by name is found out when the primitive is lowered.
    params |= {"implementation": None, "config": None}
    with selection.unseen():
        (acc,) = jax.make_jaxpr(functools.partial(plain.dot_general, **params))(lhs, rhs).out_avals
    return acc


def epilogue_dot_general(
    lhs,
    rhs,
    *operands,
    op,
    dimension_numbers,
    function: core.ClosedJaxpr,
    permutation=None,
    precision=None,
    out_sharding=None,
    implementation=None,
    config=None,
) -> list[jax.Array]:
    """Binds the primitive; arguments are checked and canonical already.

    `function` is of `accumulator(...)` and the operands, random keys among them; arrays that it has
    closed over become operands, too.
    """
    jax_internals.register_imported()
    if permutation is None:
        permutation = tuple(range(plain.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers)))
    function, constants = hoist(function)
    function, operands = _without_keys(function, (*operands, *constants))
    return epilogue_dot_general_p.bind(
        *same_varying(lhs, rhs),
        *operands,
        op=op,
        dimension_numbers=dimension_numbers,
        permutation=tuple(permutation),
        precision=precision,
        preferred_element_type=accumulator_dtype(lhs.dtype, rhs.dtype),
        out_sharding=out_sharding,
        implementation=implementation,
        config=config,
        function=function,
    )


def hoist(function: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, Sequence[jax.Array]]:
    """A function without constants, which are its last arguments then; and these."""
    # The same function each time: what is compiled is found by it.
    return _hoisted(function) if function.consts else _hoisted_of_known(function)


def _hoisted(function: core.ClosedJaxpr):
    if any(map(closes_over_arrays, function.jaxpr.eqns)):
        function = written_out(function, closes_over_arrays)
    constants, num_arguments = function.consts, len(function.in_avals)
    if not constants:
        return function, ()

    def of_constants(*arguments):
        own, given = arguments[:num_arguments], arguments[num_arguments:]
        return core.jaxpr_as_fun(core.ClosedJaxpr(function.jaxpr, given))(*own)

    types = map(jax.typeof, constants)
    return jax.make_jaxpr(of_constants)(*function.in_avals, *types), constants


_hoisted_of_known = functools.lru_cache(maxsize=1024)(_hoisted)


def _without_keys(function: core.ClosedJaxpr, operands):
    """A function of the numbers in random keys, and these; kernels know no keys."""
    if not any(_is_key(x) for x in operands):
        return function, operands
    generators = tuple(jax.random.key_impl(x) if _is_key(x) else None for x in operands)
    operands = [jax.random.key_data(x) if _is_key(x) else x for x in operands]
    return _of_key_data(function, generators, tuple(map(jax.typeof, operands))), operands


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=1024)
def _of_key_data(function: core.ClosedJaxpr, generators: tuple[Hashable, ...], types):
    def of_data(acc, *operands):
        pairs = zip(operands, generators, strict=True)
        operands = (x if how is None else jax.random.wrap_key_data(x, impl=how) for x, how in pairs)
        return core.jaxpr_as_fun(function)(acc, *operands)

    return jax.make_jaxpr(of_data)(function.in_avals[0], *types)


def unfused(lhs, rhs, *operands, function: core.ClosedJaxpr, **params) -> list[jax.Array]:
    """The same by a plain product and what XLA makes of the function.

    The product is rounded by itself where the function does that first, so that it is stored so.
    """
    dtype, of_rounded = of_stored(function)
    acc = plain.dot_general(lhs, rhs, **params | {"preferred_element_type": dtype})
    return core.jaxpr_as_fun(of_rounded)(acc, *operands)


def bare_product(lhs, rhs, *_, function: core.ClosedJaxpr, **params) -> jax.Array:
    """The plain product of the unfused call."""
    dtype, _ = of_stored(function)
    return plain.dot_general(lhs, rhs, **params | {"preferred_element_type": dtype})


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(*avals, **params):
    # What was asked for by name is found out when the primitive is lowered.
    unnamed = params | {"implementation": None, "config": None}
    with lowering.named(params["op"]), selection.unseen():
        types = _types(avals, tuple(unnamed.items()), jax_internals.trace_context())
    lowering.expect(epilogue.make_plan, product_of, *avals, params)
    return types


@functools.lru_cache(maxsize=1024)
def _types(avals, params, context):
    del context
    jaxpr = jax.make_jaxpr(functools.partial(unfused, **dict(params)))(*avals)
    return jaxpr.out_avals, jaxpr.effects


epilogue_dot_general_p.def_impl(functools.partial(xla.apply_primitive, epilogue_dot_general_p))
epilogue_dot_general_p.def_effectful_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, function, **params):
    """As of a plain product; the function of its result is mapped over the new dimension.

    Where that is one of its other operands only, the product is the same for all, and made once.
    """
    (lhs, rhs, *operands), (lhs_dim, rhs_dim, *operand_dims) = args, dims
    if all(dim is None for dim in dims):
        out = epilogue_dot_general_p.bind(*args, function=function, **params)
        return out, [None] * len(out)
    size, mesh_axis = axis_data.size, axis_data.explicit_mesh_axis
    if lhs_dim is None and rhs_dim is None:
        acc = plain.dot_general(lhs, rhs, **params)
        mapped = jax.vmap(core.jaxpr_as_fun(function), (None, *operand_dims), axis_size=size)
        out = mapped(acc, *operands)
        return out, [0] * len(out)
    numbers, order, position = plain.batched_numbers(
        (lhs.ndim, rhs.ndim),
        (lhs_dim, rhs_dim),
        params.pop("dimension_numbers"),
        params.pop("permutation"),
    )
    if position and _reduces(function):
        # In front it is where JAX has it in between, too, and a result is a reduction of that.
        order, position = (order[position], *order[:position], *order[position + 1 :]), 0
    out_sharding = params.pop("out_sharding")
    del params["preferred_element_type"]
    params |= {
        "dimension_numbers": numbers,
        "permutation": order,
        "out_sharding": shardings.with_dimension(out_sharding, position, len(order), mesh_axis),
    }
    rank = function.in_avals[0].ndim
    out_dims = tuple(position if x.ndim == rank else 0 for x in function.out_avals)
    types = accumulator(lhs, rhs, **params), *map(jax.typeof, operands)
    batched = _mapped(function, types, (position, *operand_dims), out_dims, size)
    return epilogue_dot_general(lhs, rhs, *operands, function=batched, **params), out_dims


@functools.lru_cache(maxsize=1024)
def _mapped(function: core.ClosedJaxpr, types, in_dims, out_dims, size: int) -> core.ClosedJaxpr:
    mapped = jax.vmap(core.jaxpr_as_fun(function), in_dims, list(out_dims), axis_size=size)
    return jax.make_jaxpr(mapped)(*types)


@functools.lru_cache(maxsize=1024)
def _reduces(function: core.ClosedJaxpr) -> bool:
    try:
        source, _ = emit(function)
    except InexpressibleError:
        return False
    return any(result.reduction is not None for result in source.results)


batching.fancy_primitive_batchers[epilogue_dot_general_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, *, function, config, **params):
    """The tangents of the function, for which the accumulator is one more result where needed.

    The accumulator's own tangent is made of plain products in the dtype of the operands, so that
    reverse mode is made of such products, too. Derivatives inherit the implementation, but not the
    config.
    """
    (lhs, rhs, *operands), (dlhs, drhs, *rest) = primals, tangents
    acc_type = function.in_avals[0]
    moves = [_moves(t) for t in rest]
    dacc = _tangent_of_accumulator((lhs, rhs), (dlhs, drhs), **params)
    is_kept = _needs_accumulator(function, (dacc is not None, *moves))
    kept, number = _keeping(function) if is_kept else (function, None)
    out = epilogue_dot_general_p.bind(*primals, function=kept, config=config, **params)
    if is_kept:
        acc = out[number]
    else:
        acc = jnp.zeros(acc_type.shape, acc_type.dtype)
        acc = same_varying(partitioning.resharded(acc, acc_type.sharding), lhs, rhs)[0]
    out = out[: len(function.out_avals)]
    found = [zero_tangent(x) for x in out]
    if dacc is not None or any(moves):
        zeros = [zero_tangent(x) for x in operands]
        pairs = zip(moves, rest, zeros, strict=True)
        dacc = zero_tangent(acc) if dacc is None else dacc
        moving = [dacc, *(t if is_moving else zero for is_moving, t, zero in pairs)]
        _, found = jvp_of_moving(core.jaxpr_as_fun(function), (acc, *operands), moving)
    return out, [
        partitioning.resharded(t, jax.typeof(x).sharding) if _moves(t) else zero_tangent(x)
        for x, t in zip(out, found, strict=True)
    ]


def _moves(tangent) -> bool:
    return type(tangent) is not ad.Zero and jnp.result_type(tangent) != jax.dtypes.float0


def _tangent_of_accumulator(primals, tangents, *, preferred_element_type, **params):
    """None where nothing moves it."""
    (lhs, rhs), (dlhs, drhs) = primals, tangents
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    if np.dtype(dtype).itemsize < 2:
        dtype = preferred_element_type
    pairs = [(dlhs, rhs)] * _moves(dlhs) + [(lhs, drhs)] * _moves(drhs)
    addends = [
        plain.dot_general(*pair, preferred_element_type=dtype, config=None, **params)
        for pair in pairs
    ]
    wide = [lax.convert_element_type(x, preferred_element_type) for x in addends]
    return functools.reduce(lax.add, wide) if wide else None


@functools.lru_cache(maxsize=1024)
def _keeping(function: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, int]:
    """A function with the accumulator among its results, and where that is."""
    results, acc = function.jaxpr.outvars, function.jaxpr.invars[0]
    for number, result in enumerate(results):
        if result is acc:
            return function, number

    def keeping(acc, *operands):
        return [*core.jaxpr_as_fun(function)(acc, *operands), acc]

    return jax.make_jaxpr(keeping)(*function.in_avals), len(results)


@functools.lru_cache(maxsize=1024)
def _needs_accumulator(function: core.ClosedJaxpr, moving: tuple[bool, ...]) -> bool:
    """Whether the tangents depend on the accumulator itself, where these arguments move."""
    if not any(moving):
        return False
    types, num_primals = function.in_avals, len(moving)

    def tangents(*arguments):
        primals, given = arguments[:num_primals], iter(arguments[num_primals:])
        pairs = zip(moving, primals, strict=True)
        rest = [next(given) if is_moving else zero_tangent(x) for is_moving, x in pairs]
        _, found = jvp_of_moving(core.jaxpr_as_fun(function), primals, rest)
        return [x for x in found if _moves(x)]

    moved = [x for x, is_moving in zip(types, moving, strict=True) if is_moving]
    jaxpr = as_jaxpr(jax.make_jaxpr(tangents)(*types, *moved))
    return _needed(jaxpr, [True] * len(jaxpr.outvars))[0]


def _needed(jaxpr: core.Jaxpr, wanted: Sequence[bool]) -> list[bool]:
    """Which arguments of a jaxpr the wanted results depend on."""
    live = {x for x, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted}
    for eqn in reversed(jaxpr.eqns):
        own = [x in live for x in eqn.outvars]
        if not any(own):
            continue
        needed = [True] * len(eqn.invars)
        if eqn.primitive.name in ("jit", "pjit"):
            needed = _needed(as_jaxpr(eqn.params["jaxpr"]), own)
        live.update(
            x
            for x, is_needed in zip(eqn.invars, needed, strict=True)
            if is_needed and not isinstance(x, core.Literal)
        )
    return [x in live for x in jaxpr.invars]


def _transpose(cotangents, *operands, **params):
    """Of a call that is linear in some operands: that of the unfused one."""
    undefined = [ad.is_undefined_primal(x) for x in operands]

    def linear(*moving):
        rest = iter(moving)
        return unfused(
            *(next(rest) if u else x for u, x in zip(undefined, operands, strict=True)),
            **params | {"config": None},
        )

    avals = [x.aval for x, u in zip(operands, undefined, strict=True) if u]
    instantiated = [ad.instantiate_zeros(ct) for ct in cotangents]
    found = iter(jax.linear_transpose(linear, *avals)(instantiated))
    return [next(found) if u else None for u in undefined]


ad.primitive_jvps[epilogue_dot_general_p] = _jvp
ad.primitive_transposes[epilogue_dot_general_p] = _transpose


def _series(primals, series, **params):
    return series_by_parts(unfused, primals, series, **params | {"config": None})


jax_internals.register_jet(epilogue_dot_general_p, _series)


# --- other interpreters of JAX ------------------------------------------------------------------


def _flops(lhs, rhs, *_, function, **params) -> int:
    """Those of the product."""
    del function
    return plain.flops(lhs, rhs, **params)


jax_internals.register_roofline(epilogue_dot_general_p, _flops)


# --- lowering -----------------------------------------------------------------------------------


def product_of(lhs, rhs, *rest) -> epilogue.Product:
    """What one call of the primitive says, from the types of its operands and its params.

    The operands may be one device's parts of those that the function is of.
    """
    *operands, params = rest
    function = params["function"]
    acc = function.in_avals[0]
    shape = _product_shape(lhs, rhs, params)
    if shape != acc.shape:
        acc = jax.ShapeDtypeStruct(shape, acc.dtype)
        function = _of_part(function, acc, *operands)
    product = plain.product_of(lhs, rhs, acc, params)
    return epilogue.Product(product, function, tuple(tuple(x.shape) for x in operands))


def _product_shape(lhs, rhs, params) -> tuple[int, ...]:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    shape = [lhs.shape[axis] for axis in lhs_batch]
    for x, known in ((lhs, (*lhs_contract, *lhs_batch)), (rhs, (*rhs_contract, *rhs_batch))):
        shape += [extent for axis, extent in enumerate(x.shape) if axis not in known]
    return tuple(shape[axis] for axis in params["permutation"])


@functools.lru_cache(maxsize=1024)
def _of_part(function: core.ClosedJaxpr, *types) -> core.ClosedJaxpr:
    return jax.make_jaxpr(parts_of(function))(*types)


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be divided over devices: as the plain product, and as the function allows it.

    Where a contracted dimension is divided, the function waits for the sum.
    """
    *avals, params = avals_and_params
    lhs, rhs, function = *avals[:2], params["function"]
    params = params | {"out_sharding": None}
    shared = {key: value for key, value in params.items() if key != "function"}
    product, parts = plain.division_of(lhs, rhs, shared), parts_of(function)
    (acc_names,) = product.results

    def names_of(kind, array, dims):
        return tuple(
            f"{kind}{array}x{axis}" if dim is None else acc_names[dim]
            for axis, dim in enumerate(dims)
        )

    operands = [names_of("e", i, dims) for i, dims in enumerate(parts.operands)]
    results = [names_of("r", i, dims) for i, dims in enumerate(parts.results)]
    whole = {name for names in (*operands, *results) for name in names} - {*acc_names}
    whole |= {acc_names[dim] for dim in parts.whole}

    def call(lhs, rhs, *operands):
        acc = accumulator(lhs, rhs, **shared)
        of_part = jax.make_jaxpr(parts)(acc, *map(jax.typeof, operands))
        return tuple(epilogue_dot_general_p.bind(lhs, rhs, *operands, function=of_part, **shared))

    return partitioning.Division(
        operands=(*product.operands, *operands),
        results=tuple(results),
        call=call,
        product=lambda lhs, rhs: (plain.dot_general(lhs, rhs, **shared),),
        addends=(acc_names,),
        finish=lambda sums, *operands: tuple(parts(*sums, *operands)),
        epilogue=tuple(range(2, len(avals))),
        whole=tuple(sorted(whole)),
    )


def obstacle_to_division(operands, product: epilogue.Product, params, device) -> str:
    """Why a call is divided over devices as a product and a function of that; "" where it is one.

    A function that is of a whole dimension, such as a sum over it, would have every device compute
    all of it where the product alone is divided along it.
    """
    if not dense.is_covered(product.product, device.platform):
        return "no implementation covers the dtypes of the product"
    function, operands = params["function"], operands[:2]
    acc = function.in_avals[0]
    whole = [dim for dim in parts_of(function).whole if acc.shape[dim] != 1]
    if not whole:
        return ""
    if partitioning.has_explicit_axes(*operands):
        division = plain.division_of(*operands, params)
        layout = partitioning.explicit_layout(division, operands, [acc])
        names = {division.results[0][dim] for dim in whole}
        if not names & (layout.divided.keys() | layout.scattered.keys()):
            return ""
    return "devices may divide a dimension that the function takes whole"


def _lower(ctx, *operands, device, obstacle, **params):
    product = product_of(*ctx.avals_in, params)
    if not obstacle and partitioning.is_divided(ctx):
        obstacle = obstacle_to_division(ctx.avals_in, product, params, device)
        if not obstacle:
            return partitioning.lower(ctx, operands, division_of(*ctx.avals_in, params))
    plan = epilogue.make_plan(product, device, obstacle)
    key = lowering.key_of(epilogue_dot_general_p, params, plan.choice)
    if not plan.is_fused:
        unfused_call = functools.partial(unfused, **params)
        return partitioning.lower_on_device(ctx, unfused_call, *operands, key=key)
    on_device = functools.partial(epilogue.product_with_epilogue, plan)
    return partitioning.lower_on_device(ctx, on_device, *operands, key=key)


lowering.register(epilogue_dot_general_p, _lower)
