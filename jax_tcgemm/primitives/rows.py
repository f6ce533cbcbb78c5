"""The primitive `tcgemm_rows`: sums and products of rows that are taken through indices.

    sums  out[t] = sum of weights[p] * a[sources[p]] over the pairs p with targets[p] == t
          operands a (r, n), sources (p,), targets (p,) and, where weighted says so, weights (p,)
    dots  out[p] = sum over n of a[a_indices[p], n] * b[b_indices[p], n]
          operands a (r, n), b (s, n), a_indices (p,), b_indices (p,)

Indices are int32. A pair with an index outside its matrix adds nothing, and its product is 0. The
two forms are closed under differentiation: a sum's cotangents are the sum with sources and targets
exchanged and the products, and those of products are sums.

Parameters, all static: options, form, num_targets (0 for dots), weighted, and
what is known of the indices, for sources and targets or for those of a and b: an integer d
where pair p has index p // d, and d times as many pairs as rows; "unique" where no two are equal;
or None. Where a sum's targets are of the first kind its pairs are sorted; else our kernels sort
them first, by counting where they are unique.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jax_tcgemm.device import request
from jax_tcgemm.device import rows as device_rows
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES, wide_dtype
from jax_tcgemm.problem.rows import RowsProblem
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system.jax_internals import ad, batching, like, register_jet, xla, zero_tangent

rows_p = core.Primitive("tcgemm_rows")


def sums(
    a,
    sources,
    targets,
    weights=None,
    *,
    options: CallOptions,
    num_targets,
    patterns=(None, None),
):
    """Binds the form sums; `patterns` is what is known of sources and targets."""
    weights = () if weights is None else (weights,)
    return rows_p.bind(
        *same_varying(a, sources, targets, *weights),
        options=options,
        form="sums",
        num_targets=num_targets,
        weighted=bool(weights),
        patterns=tuple(patterns),
    )


def dots(a, b, a_indices, b_indices, *, options: CallOptions, patterns=(None, None)):
    """Binds the form dots; `patterns` is what is known of the indices of a and b."""
    return rows_p.bind(
        *same_varying(a, b, a_indices, b_indices),
        options=options,
        form="dots",
        num_targets=0,
        weighted=False,
        patterns=tuple(patterns),
    )


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(a, *others, form, num_targets, **params):
    del params
    column = a.sharding.spec.partitions[-1]
    if form == "sums":
        shape, spec, dtype = (num_targets, a.shape[1]), (None, column), a.dtype
    else:
        shape, spec, dtype = others[1].shape, (None,), wide_dtype(a.dtype)
    return like(a, shape, dtype, NamedSharding(a.sharding.mesh, PartitionSpec(*spec)))


rows_p.def_impl(functools.partial(xla.apply_primitive, rows_p))
rows_p.def_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, num_targets, patterns, **params):
    """One call with all entries' rows and pairs one after the other."""
    size, num_matrices = axis_data.size, 1 if params["form"] == "sums" else 2
    is_mapped = [dim is not None for dim in dims]
    if not any(is_mapped):
        return rows_p.bind(*args, num_targets=num_targets, patterns=patterns, **params), None
    args = [
        x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)
    ]
    matrices, vectors = args[:num_matrices], args[num_matrices:]
    vectors = [
        x if mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, mapped in zip(vectors, is_mapped[num_matrices:], strict=True)
    ]
    # What each index counts: rows of a matrix, which may be the same for every entry, or targets.
    counted = [(x.shape[-2], mapped) for x, mapped in zip(matrices, is_mapped, strict=False)] + [
        (num_targets, True)
    ] * (params["form"] == "sums")
    for i, (extent, is_own) in enumerate(counted):
        if is_own:
            vectors[i] = _offset(vectors[i], extent)
        else:
            patterns = (*patterns[:i], None, *patterns[i + 1 :])
    matrices = [
        jnp.reshape(x, (size * x.shape[1], x.shape[2])) if mapped else x
        for x, mapped in zip(matrices, is_mapped, strict=False)
    ]
    extent = num_targets if params["form"] == "sums" else vectors[0].shape[1]
    vectors = [jnp.reshape(x, (-1,)) for x in vectors]
    out = rows_p.bind(
        *same_varying(*matrices, *vectors),
        num_targets=size * num_targets,
        patterns=patterns,
        **params,
    )
    return jnp.reshape(out, (size, extent, *out.shape[1:])), 0


def _offset(indices, extent):
    """Return each entry's indices in the rows of all entries; indices out of range stay so."""
    size = indices.shape[0]
    first = extent * lax.broadcasted_iota(indices.dtype, indices.shape, 0)
    inside = (indices >= 0) & (indices < extent)
    return jnp.where(inside, indices + first, size * extent)


batching.fancy_primitive_batchers[rows_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _linear_operands(params) -> tuple[int, ...]:
    """The operands that the result is linear in, one at a time."""
    if params["form"] == "dots":
        return (0, 1)
    return (0, 3) if params["weighted"] else (0,)


def _jvp(primals, tangents, **params):
    out = rows_p.bind(*primals, **params)
    addends = []
    for i in _linear_operands(params):
        if type(tangents[i]) is not ad.Zero:
            operands = [*primals]
            operands[i] = tangents[i]
            addends.append(rows_p.bind(*same_varying(*operands), **params))
    if not addends:
        return out, zero_tangent(out)
    return out, functools.reduce(lax.add, addends)


def _transpose(ct, *args, form, num_targets, weighted, patterns, **params):
    del num_targets
    linear = _linear_operands({"form": form, "weighted": weighted})
    position = next(i for i in linear if ad.is_undefined_primal(args[i]))
    aval, nothing = args[position].aval, [None] * len(args)
    if type(ct) is ad.Zero:
        bar = ad.Zero(aval)
    else:
        bar = _cotangent(ct, args, position, form, patterns, aval, params)
        bar = partitioning.resharded(lax.convert_element_type(bar, aval.dtype), aval.sharding)
    return [*nothing[:position], bar, *nothing[position + 1 :]]


def _cotangent(ct, args, position, form, patterns, aval, params):
    swapped = patterns[::-1]
    if form == "dots":
        a, b, a_indices, b_indices = args
        indices = (b_indices, a_indices) if position == 0 else (a_indices, b_indices)
        return sums(
            b if position == 0 else a,
            *indices,
            ct,
            num_targets=aval.shape[0],
            patterns=swapped if position == 0 else patterns,
            **params,
        )
    a, sources, targets, *weights = args
    if position == 0:
        return sums(
            ct,
            targets,
            sources,
            *weights,
            num_targets=aval.shape[0],
            patterns=swapped,
            **params,
        )
    return dots(ct, a, targets, sources, patterns=swapped, **params)


ad.primitive_jvps[rows_p] = _jvp
ad.primitive_transposes[rows_p] = _transpose


def _series(primals, series, **params):
    """The terms of order i are the products of those of orders that add up to i."""
    linear = _linear_operands(params)
    terms = [[primals[i], *series[i]] for i in linear]

    def of(*values):
        operands = [*primals]
        for i, value in zip(linear, values, strict=True):
            operands[i] = value
        return rows_p.bind(*operands, **params)

    if len(linear) == 1:
        found = list(map(of, *terms))
    else:
        xs, ys = terms
        found = [
            functools.reduce(lax.add, [of(xs[j], ys[i - j]) for j in range(i + 1)])
            for i in range(len(xs))
        ]
    return found[0], found[1:]


register_jet(rows_p, _series)


# --- lowering -----------------------------------------------------------------------------------


def product_of(a, *others_and_params) -> request.Request:
    """Describe one call to its planner, from the types of operands and result, and params."""
    *others, _, params = others_and_params
    is_sums = params["form"] == "sums"
    options = params["options"]
    dtype = np.dtype(a.dtype)
    if dtype not in map(np.dtype, ("float16", "bfloat16", "float32", "float64")):
        return request.Request("rows", options, f"rows of {dtype} are XLA's")
    problem = RowsProblem(
        form=params["form"],
        a_rows=a.shape[0],
        b_rows=0 if is_sums else others[0].shape[0],
        targets=params["num_targets"],
        pairs=others[-1].shape[0],
        n=a.shape[1],
        weighted=params["weighted"],
        in_dtype=DTYPE_NAMES[dtype],
    )
    return request.Request("rows", options, problem)


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be sharded over devices: along its columns, and products along their pairs."""
    *_, params = avals_and_params
    if params["form"] == "sums":
        weights = (("pair",),) * params["weighted"]
        operands = (("row", "column"), ("pair",), ("pair",), *weights)
        result, whole = ("target", "column"), ("row", "pair", "target")
    else:
        operands = (("row", "column"), ("b_row", "column"), ("pair",), ("pair",))
        result, whole = ("pair",), ("row", "b_row")
        # A part of the pairs does not begin with index 0.
        params = params | {"patterns": (None, None)}
    return partitioning.Division(
        operands=operands,
        results=(result,),
        call=lambda *operands: (rows_p.bind(*operands, **params),),
        whole=whole,
    )


def _lower(ctx, *args, device, obstacle, **params):
    asked = product_of(*ctx.avals_in, *ctx.avals_out, params)
    plan = request.make_plan(asked, device, obstacle)
    # What XLA runs, it also partitions, but for explicit axes, of which gathers need to be told.
    is_ours = not plan.runs_by_xla
    is_explicit = partitioning.has_explicit_axes(*ctx.avals_in)
    if is_explicit or (is_ours and partitioning.is_divided(ctx)):
        return partitioning.lower(ctx, args, division_of(*ctx.avals_in, params))

    def on_device(*args):
        if params["form"] == "dots":
            return (device_rows.dots(*args, plan=plan),)
        targets = {"num_targets": params["num_targets"], "pattern": params["patterns"][1]}
        return (device_rows.sums(*args, plan=plan, **targets),)

    return partitioning.lower_on_device(ctx, on_device, *args)


lowering.register(rows_p, _lower)
