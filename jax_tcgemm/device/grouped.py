"""The device-local grouped product: fold the batch dimensions, choose, call.

As in dense/plan.py, `make_plan` decides everything from shapes and dtypes, and `ragged_dot` carries
a plan out. `explain` prints plans.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device import split_precision, xla_dot
from jax_tcgemm.device.call import call
from jax_tcgemm.device.dense.product import of_device
from jax_tcgemm.device.plan import BasePlan
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES, DTYPES
from jax_tcgemm.problem.precision import Numerics, for_xla, resolve
from jax_tcgemm.problem.ragged import RaggedProblem

_CONTRACTION = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
)


@dataclasses.dataclass(frozen=True)
class Product:
    """One call of `tcgemm_ragged_dot`, as its planner takes it.

    Attributes:
      options: options of the call.
      form: "rows" or "contraction".
      batches: the batch dimensions of lhs, of rhs, of the group sizes, offset and gather;
        1 where one is broadcast.
      m, n, k: extents of each product, as in RaggedProblem.
      groups: groups of rhs or of the result.
      num_sizes: length of group_sizes.
      rhs_transposed: rhs lies as (groups, n, k).
      gathered_rows: rows of lhs where it is gathered, else None.
      lhs_dtype, rhs_dtype, result_dtype: dtypes.
      precision: as `precision.canonical_precision` returns it.
      gated: there are two matrices for each group, and an epilogue of both products.
    """

    options: CallOptions
    form: str
    batches: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    m: int
    n: int
    k: int
    groups: int
    num_sizes: int
    rhs_transposed: bool
    gathered_rows: int | None
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    result_dtype: np.dtype
    precision: object
    gated: bool = False

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The batch dimensions of the result."""
        return np.broadcast_shapes(*self.batches)

    def is_batched(self, batch_shape: tuple[int, ...]) -> bool:
        """Whether an operand of these batch dimensions has an entry for each batch index."""
        return math.prod(batch_shape) != 1 or math.prod(self.batch_shape) == 1


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """How a grouped product runs on one device.

    `problem` and `numerics` are None where XLA's ragged_dot is all there is; `choice.why` says why.
    `platform` is the device's; "" where a kernel is known to run it.
    """

    product: Product
    numerics: Numerics | None
    problem: RaggedProblem | None
    choice: selection.Choice
    platform: str = ""

    @property
    def flips_rhs(self) -> bool:
        """Whether transposed matrices are transposed back, for batch-invariant results.

        With transposed matrices, `host` adds up a group of one row in another order.
        """
        own = self.product
        is_host = self.choice.implementation == "host"
        return own.options.invariant_rows > 0 and is_host and own.rhs_transposed

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array XLA must rewrite for the call."""
        if self.runs_by_xla:
            return ()
        product, numerics = self.product, self.numerics
        found = []
        for name, dtype, read, batch in (
            ("lhs", product.lhs_dtype, numerics.lhs_dtype, product.batches[0]),
            ("rhs", product.rhs_dtype, numerics.rhs_dtype, product.batches[1]),
        ):
            if numerics.terms is not None:
                by = _split_of(product, numerics, name == "rhs")
                found.append(f"{name} split into terms of {read} by {by}")
            elif dtype != read:
                found.append(f"{name} converted to {read}")
            if product.is_batched(batch) and batch != product.batch_shape:
                found.append(f"{name} repeated along batch dimensions {batch}")
        if self.problem.b_transposed != product.rhs_transposed:
            found.append(f"rhs transposed to (groups, {'2, ' * product.gated}n, k)")
        if product.result_dtype != numerics.out_dtype:
            found.append(f"result converted to {product.result_dtype}")
        return tuple(found)


def make_plan(product: Product, device: selection.Device, obstacle: str = "") -> Plan:
    """Chooses what runs a grouped product.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why only XLA's own ragged_dot can be used; "" when not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run the product.
    """
    product = of_device(product, device)
    numerics = obstacle or numerics_of(product, device)
    if isinstance(numerics, str):
        choice = selection.select(
            product.options,
            None,
            device,
            kind="ragged",
            obstacle=numerics,
        )
        return Plan(product, None, None, choice, device.platform)
    problem = problem_of(product, numerics, device.platform)
    options = product.options
    nominal = of_nominal_rows(problem, options)
    choice = selection.select(options, problem, device, nominal=nominal)
    is_forced = options.implementation is not None
    is_gathered = product.gathered_rows is not None
    if choice.implementation == selection.XLA and is_gathered and not is_forced:
        why = f"as bare grouped products with steps of XLA's around them; {choice.why}"
        choice = dataclasses.replace(choice, why=why)
    if choice.implementation == selection.XLA and numerics.terms is not None:
        numerics = split_precision.split_by_xla(numerics)
    return Plan(product, numerics, problem, choice, device.platform)


def of_nominal_rows(problem: RaggedProblem, options: CallOptions) -> RaggedProblem | None:
    """Return the problem that selects a batch-invariant kernel; None if that is not asked for."""
    rows = options.invariant_rows
    return problem.with_rows(rows) if rows else None


def numerics_of(product: Product, device: selection.Device) -> Numerics | str:
    """Return the numerics of the product, or the reason why no implementation supports it."""
    dtypes = product.lhs_dtype, product.rhs_dtype, product.result_dtype
    numerics = resolve(*dtypes, product.precision, device.platform)
    if not isinstance(numerics, str) and numerics.terms is not None and numerics.terms.is_complex:
        numerics = resolve(*dtypes, for_xla(product.precision), device.platform)
    if isinstance(numerics, str):
        return numerics
    if numerics.lhs_dtype != numerics.rhs_dtype:
        return f"no implementation multiplies groups of {dtypes[0]} by {dtypes[1]}"
    return split_precision.split_on(device, numerics)


def problem_of(product: Product, numerics: Numerics, platform: str) -> RaggedProblem:
    """Return the problem that implementations take.

    On a GPU, 8-bit matrices must have the contracted dimension last, so that rhs is transposed.
    """
    is_transposed = (
        platform == "cuda" and numerics.lhs_dtype.itemsize == 1 and product.form == "rows"
    )
    lhs_batched, rhs_batched, sizes_batched = map(product.is_batched, product.batches)
    number = 1 if numerics.terms is None else numerics.terms.number
    is_contraction = product.form == "contraction"
    return RaggedProblem(
        form=product.form,
        batch=math.prod(product.batch_shape),
        m=product.m,
        n=product.n,
        k=number * product.k,
        groups=product.groups,
        num_sizes=product.num_sizes,
        b_transposed=product.rhs_transposed or is_transposed,
        a_batched=lhs_batched,
        b_batched=rhs_batched,
        sizes_batched=sizes_batched,
        in_dtype=DTYPE_NAMES[numerics.lhs_dtype],
        out_dtype=DTYPE_NAMES[numerics.out_dtype],
        compute=numerics.compute,
        gated=product.gated,
        gathered=product.gathered_rows is not None,
        a_rows=(number if is_contraction else 1) * (product.gathered_rows or 0),
    )


def ragged_dot(lhs, rhs, group_sizes, group_offset, gather=None, *, plan: Plan) -> jax.Array:
    """Carries out a plan. Where it is XLA's own product, without gather."""
    product, numerics = plan.product, plan.numerics
    if plan.runs_by_xla:
        if numerics is not None and numerics.terms is not None:
            lhs, rhs, group_sizes, _ = _split_operands(product, numerics, lhs, rhs, group_sizes)
        return _xla(lhs, rhs, group_sizes, group_offset, plan)
    operands = prepared(plan, lhs, rhs, group_sizes, group_offset, gather)
    return lax.convert_element_type(_call(plan, operands), product.result_dtype)


def prepared(plan: Plan, lhs, rhs, group_sizes, group_offset, gather=None) -> list[jax.Array]:
    """Return the operands of the custom call: split or converted, transposed and broadcast."""
    product, numerics = plan.product, plan.numerics
    lhs_batch, rhs_batch, sizes_batch = product.batches
    if numerics.terms is not None:
        lhs, rhs, group_sizes, gather = _split_operands(
            product, numerics, lhs, rhs, group_sizes, gather
        )
    if plan.problem.b_transposed != product.rhs_transposed:
        rhs = jnp.moveaxis(rhs, -3, -1) if product.gated else jnp.swapaxes(rhs, -1, -2)
    operands = [
        _repeat(lax.convert_element_type(lhs, numerics.lhs_dtype), lhs_batch, product),
        _repeat(lax.convert_element_type(rhs, numerics.rhs_dtype), rhs_batch, product),
        _repeat(group_sizes, sizes_batch, product),
        _repeat(group_offset, sizes_batch, product),
    ]
    return operands if gather is None else [*operands, _repeat(gather, sizes_batch, product)]


def _split_operands(product: Product, numerics: Numerics, lhs, rhs, group_sizes, gather=None):
    """Split operands into low-precision terms along the contracted dimension, which grows by them.

    In the form contraction that dimension is the tokens: the terms of a token are adjacent, and
    group sizes and indices are multiplied by the number of terms.
    """
    number = numerics.terms.number
    if product.form == "contraction":
        group_sizes = number * jnp.clip(group_sizes, 0, product.k)
        if gather is not None:
            tokens = product.gathered_rows
            gather = number * jnp.clip(gather, -1, tokens)[..., None] + jnp.arange(number)
            gather = _merged(gather.astype(jnp.int32), gather.ndim - 2)
    lhs, rhs = (_split(x, product, numerics, is_rhs) for x, is_rhs in ((lhs, False), (rhs, True)))
    return lhs, rhs, group_sizes, gather


def _split(x: jax.Array, product: Product, numerics: Numerics, is_rhs: bool) -> jax.Array:
    """Split an operand into terms, and merge the terms with the contracted dimension."""
    how = _split_of(product, numerics, is_rhs)
    # In a contraction, the tokens come before their terms.
    (axis,), is_contraction = how.contract, product.form == "contraction"
    return _merged(split_precision.split(x, how), axis - is_contraction)


def _split_of(product: Product, numerics: Numerics, is_rhs: bool) -> split_precision.Split:
    """Return how an operand is split, for `explain` and `_split`.

    Nothing is padded: the matrices of groups are contiguous.
    """
    shape, from_end = _shape(product, is_rhs), 1
    if product.form == "rows" and is_rhs and not product.rhs_transposed:
        from_end = 3 if product.gated else 2
    axis = len(shape) - from_end
    stored = (*shape[:axis], numerics.terms.number, *shape[axis:])
    return split_precision.Split(product.options, numerics, is_rhs, shape, (axis,), (), stored)


def _shape(product: Product, is_rhs: bool) -> tuple[int, ...]:
    """Return the shape of an operand."""
    n, k, pair = product.n, product.k, (2,) * product.gated
    is_contraction = product.form == "contraction"
    tokens, columns = (k, product.m) if is_contraction else (product.m, k)
    if not is_rhs:
        rows = tokens if product.gathered_rows is None else product.gathered_rows
        entry = rows, columns
    elif is_contraction:
        entry = tokens, n
    else:
        entry = product.groups, *((*pair, n, k) if product.rhs_transposed else (k, *pair, n))
    return (*product.batches[is_rhs], *entry)


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """Merge a dimension with the one after it."""
    return lax.collapse(x, axis, axis + 2)


def _repeat(x, batch, product):
    """Broadcast an operand that has batch dimensions to all batch dimensions of the result.

    Kernels take an operand for each entry of the batch, or one for all.
    """
    if not product.is_batched(batch):
        return x
    return jnp.broadcast_to(x, (*product.batch_shape, *x.shape[len(batch) :]))


def _call(plan: Plan, operands) -> jax.Array:
    """The custom call."""
    problem = plan.problem
    d_shape = (problem.m, problem.n)
    if problem.form == "contraction":
        d_shape = (problem.groups, *d_shape)
    shape = (*plan.product.batch_shape, *d_shape)
    result = jax.ShapeDtypeStruct(shape, DTYPES[problem.out_dtype])
    return call(problem, plan.choice, operands, [result])[0]


def _xla(lhs, rhs, sizes, offset, plan: Plan) -> jax.Array:
    batch = plan.product.batch_shape
    f = functools.partial(_xla_entry, plan=plan)
    if not batch:
        return f(lhs, rhs, sizes, offset)
    # As one dimension: lax.ragged_dot cannot be mapped over two.
    flat, num_batch = math.prod(batch), len(batch)

    def flattened(x):
        entry = x.shape[num_batch:]
        return jnp.reshape(jnp.broadcast_to(x, (*batch, *entry)), (flat, *entry))

    out = jax.vmap(f)(*map(flattened, (lhs, rhs, sizes, offset)))
    return jnp.reshape(out, (*batch, *out.shape[1:]))


def _xla_entry(lhs, rhs, sizes, offset, *, plan: Plan) -> jax.Array:
    """One batch entry by XLA's own ragged_dot, which has no group_offset: rolled into place."""
    product = plan.product
    num_sizes, tokens = product.num_sizes, lhs.shape[0]
    sizes = jnp.clip(sizes, 0, tokens)
    first = jnp.clip(offset[0], 0, num_sizes)
    before = jnp.sum(jnp.where(jnp.arange(num_sizes) < first, sizes, 0))
    before = jnp.minimum(before, tokens)
    sizes = lax.dynamic_slice(jnp.pad(sizes, (0, product.groups)), (first,), (product.groups,))
    # What rolls from the front to the end must not be taken for the last groups' tokens.
    ends = jnp.minimum(jnp.cumsum(sizes), tokens - before)
    sizes = jnp.diff(ends, prepend=0)
    lhs = jnp.roll(lhs, -before, 0)
    kwargs = {
        "precision": for_xla(product.precision),
        "preferred_element_type": product.result_dtype,
    }
    if product.form == "contraction":
        rhs = jnp.roll(rhs, -before, 0)
        return lax.ragged_dot_general(lhs, rhs, sizes, _CONTRACTION, **kwargs)
    if plan.platform == "cpu" and product.groups != 0:
        out = _one_after_another(lhs, rhs, sizes, product.rhs_transposed, **kwargs)
    else:
        rhs = jnp.swapaxes(rhs, 1, 2) if product.rhs_transposed else rhs
        out = lax.ragged_dot(lhs, rhs, sizes, **kwargs)
    return jnp.roll(out, before, 0)


def _one_after_another(lhs, rhs, sizes, rhs_transposed: bool, **kwargs) -> jax.Array:
    """A grouped product of form rows, by a product for each group that has rows.

    XLA's own ragged_dot of a CPU sums over all groups at once, with zeros for rows of others: a NaN
    in one group's matrix reaches every row. It also reads the matrices of groups without rows.
    """

    def product(lhs, matrix):
        numbers = ((1,), (int(rhs_transposed),)), ((), ())
        return xla_dot.dot_general(lhs, matrix, numbers, platform="cpu", **kwargs)

    def with_group(out, own):
        matrix, begin, end = own

        def with_rows_of_group(out):
            row = lax.broadcasted_iota(end.dtype, out.shape, 0)
            return jnp.where((begin <= row) & (row < end), product(lhs, matrix), out)

        return lax.cond(begin < end, with_rows_of_group, lambda out: out, out), None

    ends = jnp.cumsum(sizes)
    # A product without k: zeros of the result's shape and dtype.
    zeros = product(lhs[:, :0], lax.slice_in_dim(rhs[0], 0, 0, axis=int(rhs_transposed)))
    return lax.scan(with_group, zeros, (rhs, ends - sizes, ends))[0]
