"""The device-local fused product: fold it as dense.py does, say its epilogue, choose, call.

`make_plan` decides everything from shapes and dtypes, and `fused_dot_general` carries out a plan
that is fused. What no call can say, or no implementation can run as one, is run unfused: as a plain
product, which is planned in its own right, and what XLA makes of the rest. The plan says why.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device import dense
from jax_tcgemm.device.folding import Fold
from jax_tcgemm.problem.dtypes import DTYPE_NAMES, DTYPES, wide_dtype
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.fusion import Fusion
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.precision import Numerics


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of given shapes, and what is fused to it: what a primitive call says.

    Attributes:
      product: the product itself, P.
      fusion: what happens to it.
      bias_shape: the operand bias, () without one.
      bias_dtype: its dtype, None without one.
    """

    product: dense.Product
    fusion: Fusion
    bias_shape: tuple[int, ...] = ()
    bias_dtype: np.dtype | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a fused product runs on one device.

    `problem`, `numerics` and `fold` are None where it can only be run unfused, for the reason in
    `choice.why`. With a problem, too, `choice.implementation` may be "xla": unfused.
    `bias_axes` are the dimensions of Z along which the bias is given to the call.
    """

    product: Product
    numerics: Numerics | None
    fold: Fold | None
    problem: Problem | None
    bias_axes: tuple[int, ...]
    choice: selection.Choice

    @property
    def is_fused(self) -> bool:
        """Whether one call runs it."""
        return self.choice.implementation != selection.XLA

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array that XLA must rewrite for the call."""
        if not self.is_fused:
            return ()
        found = dense.copies(self.product.product, self.numerics, self.fold)
        if self.product.fusion.sum_axes is not None and not self.problem.epilogue.column_sums:
            found = (*found, "result read once more for its sums, which are not those of its rows")
        return found


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The dimensions of P, other than those of extent 1, that are folded into each extent of D."""

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]


def make_plan(product: Product, device: selection.Device, obstacle: str = "") -> Plan:
    """Folds a product with its epilogue and chooses what runs it.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why it can only be run unfused; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that rejects the folded problem.
    """
    bare = dense.of_device(product.product, device)

    def unfused(reason):
        choice = selection.Choice(selection.XLA, "default", f"unfused: {reason}")
        return Plan(product, None, None, None, (), choice)

    is_invariant = selection.nominal_rows(bare.implementation) > 0
    if device.platform == "cpu" and is_invariant:
        obstacle = obstacle or "on the CPU XLA does what follows, for any number of rows alike"
    folded = obstacle or dense.fold_product(bare, device.platform)
    if isinstance(folded, str):
        return unfused(folded)
    numerics, fold, problem = folded
    found = _epilogue(product, numerics, fold, problem)
    if isinstance(found, str):
        return unfused(found)
    epilogue, bias_axes = found
    packed = product.fusion.pair is not None and epilogue.up_offset
    problem = dataclasses.replace(
        problem,
        n=problem.n // 2 if packed else problem.n,
        alpha=product.fusion.alpha,
        beta=float("residual" in product.fusion.operands),
        epilogue=epilogue,
    )
    nominal = dense.of_nominal_rows(problem, fold, bare.implementation)
    asked = bare.implementation, bare.config
    choice = selection.select(bare.op, problem, device, *asked, nominal=nominal)
    if choice.implementation == selection.XLA and is_invariant:
        return unfused(choice.why)
    return Plan(product, numerics, fold, problem, bias_axes, choice)


def _epilogue(
    product: Product, numerics: Numerics, fold: Fold, problem: Problem
) -> tuple[Epilogue, tuple[int, ...]] | str:
    """The epilogue of the folded problem and the bias's dimensions, or what stands against it."""
    fusion, shape = product.fusion, product.product.result_shape
    if numerics.out_dtype != product.product.result_dtype:
        return "its result is converted after the product"
    if problem.out_dtype not in ("f16", "bf16", "f32", "f64"):
        return f"no epilogue makes {problem.out_dtype}"
    if fold.result_order is not None:
        return "its result must be permuted"
    if math.prod(shape) == 0:
        return "its result is empty"
    runs = _runs(fold, shape)
    packed = fusion.pair is not None and not fusion.derivative and "rhs_up" not in fusion.operands
    up_offset = 0
    if fusion.pair is not None:
        # Dimensions of P before and after the place of the pair, which is P's own when packed.
        before = (*runs.batch, *runs.m)
        after = [axis - packed for axis in runs.n if not (packed and axis == fusion.pair)]
        leads = all(axis < fusion.pair for axis in before) and min(after, default=fusion.pair) >= (
            fusion.pair
        )
        if fold.swapped or not leads or (packed and fusion.pair not in runs.n):
            return "gate and up are not the outermost columns of the result"
        if packed:
            up_offset = problem.n // 2 * (problem.b.ld if problem.b.transposed else 1)
    bias, bias_axes, bias_stride = "none", (), 0
    if "bias" in fusion.operands:
        found = _place_bias(product, runs, packed)
        if isinstance(found, str):
            return found
        bias, bias_axes, bias_stride = found
    column_sums = False
    if fusion.sum_axes is not None:
        summed = _axes_of_product(fusion.sum_axes, fusion)
        column_sums = set(runs.m) <= set(summed) <= {*runs.batch, *runs.m, *_units(shape)}
    bias_dtype = ""
    if bias != "none":
        own = DTYPE_NAMES.get(product.bias_dtype)
        accumulator = "f64" if problem.compute == "f64" else "f32"
        bias_dtype = own if own == problem.out_dtype else accumulator
    return (
        Epilogue(
            activation=fusion.activation,
            derivative=fusion.derivative,
            gated=fusion.pair is not None,
            up_offset=up_offset,
            bias=bias,
            bias_dtype=bias_dtype,
            bias_batch_stride=bias_stride,
            aux_out=fusion.aux_out,
            column_sums=column_sums,
        ),
        bias_axes,
    )


def _units(shape) -> list[int]:
    return [axis for axis, extent in enumerate(shape) if extent == 1]


def _runs(fold: Fold, shape: tuple[int, ...]) -> _Runs:
    axes = [axis for axis, extent in enumerate(shape) if extent != 1]

    def take(extent):
        run = []
        while math.prod(shape[axis] for axis in run) != extent:
            run.append(axes.pop(0))
        return tuple(run)

    return _Runs(take(fold.batch), take(fold.m), take(fold.n))


def _axes_of_product(axes, fusion: Fusion) -> list[int]:
    """Dimensions of D in a derivative as dimensions of P, which lacks the pair."""
    if fusion.pair is None or not fusion.derivative:
        return list(axes)
    return [axis - (axis > fusion.pair) for axis in axes if axis != fusion.pair]


def _place_bias(product: Product, runs: _Runs, packed: bool):
    """Along what the bias runs, its dimensions of Z, and the stride of its batch entries.

    It is repeated along the dimensions that it lacks of those.
    """
    fusion = product.fusion
    _, z_shape = shapes(product.product.result_shape, fusion)
    own = {
        axis
        for axis, extent in zip(fusion.bias_axes, product.bias_shape, strict=True)
        if extent != 1
    }
    batch, m, n = list(runs.batch), list(runs.m), list(runs.n)
    if fusion.pair is not None and not packed:
        batch, m, n = ([axis + (axis >= fusion.pair) for axis in run] for run in (batch, m, n))
        n.insert(0, fusion.pair)
    for along, run in (("n", n), ("m", m)):
        if along == "m" and fusion.pair is not None:
            continue
        if own <= set(run):
            return along, tuple(run), 0
        if own <= {*batch, *run}:
            return along, (*batch, *run), math.prod(z_shape[axis] for axis in run)
    return "its bias varies along rows and columns; add it as residual"


def fused_dot_general(plan: Plan, lhs, rhs, given: dict[str, jax.Array]) -> list[jax.Array]:
    """Carries out a plan that is fused.

    Args:
      plan: the plan.
      lhs: left operand.
      rhs: right operand.
      given: the optional operands by name.

    Returns:
      D and, as the fusion says, aux_out and the sums.
    """
    fusion, fold, problem = plan.product.fusion, plan.fold, plan.problem
    numerics, out_dtype = plan.numerics, plan.numerics.out_dtype
    bare = plan.product.product
    prepare_rhs = functools.partial(
        dense.prepare, product=bare, numerics=numerics, folded=fold, is_rhs=True
    )
    a, b = dense.prepare(lhs, bare, numerics, fold), prepare_rhs(rhs)
    a, b = (b, a) if fold.swapped else (a, b)
    vectors = {}
    if "rhs_up" in given:
        vectors["b_up"] = prepare_rhs(given["rhs_up"])
    if "aux_in" in given:
        vectors["aux_in"] = given["aux_in"].astype(out_dtype)
    if "bias" in given:
        vectors["bias"] = _bias(plan, given["bias"])
    residual = given.get("residual")
    d_shape, z_shape = shapes(plan.product.product.result_shape, fusion)
    found = dense.local_gemm(
        problem,
        a,
        b,
        None if residual is None else residual.astype(out_dtype),
        **vectors,
        in_place=fusion.in_place,
        choice=plan.choice,
        shape=d_shape,
        aux_shape=z_shape,
    )
    results = list(found) if isinstance(found, tuple) else [found]
    if problem.epilogue.column_sums:
        results[-1] = _sums(plan, results[-1], d_shape)
    elif fusion.sum_axes is not None:
        results.append(jnp.sum(results[0].astype(wide_dtype(out_dtype)), fusion.sum_axes))
    return results


def shapes(p_shape: tuple[int, ...], fusion: Fusion) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of D and of Z or aux_in, from that of P."""
    pair = fusion.pair
    if pair is None:
        return p_shape, p_shape
    with_pair = (*p_shape[:pair], 2, *p_shape[pair:])
    if fusion.derivative:
        return with_pair, with_pair
    if "rhs_up" in fusion.operands:
        return p_shape, with_pair
    return (*p_shape[:pair], *p_shape[pair + 1 :]), p_shape


def _bias(plan: Plan, bias):
    """The bias with every dimension that the call wants of it."""
    fusion = plan.product.fusion
    _, z_shape = shapes(plan.product.product.result_shape, fusion)
    dtype = DTYPES[plan.problem.epilogue.bias_dtype]
    kept = [
        i for i, axis in enumerate(fusion.bias_axes) if bias.shape[i] != 1 or axis in plan.bias_axes
    ]
    bias = lax.reshape(bias.astype(dtype), [bias.shape[i] for i in kept])
    places = [plan.bias_axes.index(fusion.bias_axes[i]) for i in kept]
    return lax.broadcast_in_dim(bias, [z_shape[axis] for axis in plan.bias_axes], places)


def _sums(plan: Plan, sums, d_shape):
    """The call's sums over rows, summed over the batch dimensions that are wanted, too."""
    fusion = plan.product.fusion
    rows = set(_runs(plan.fold, plan.product.product.result_shape).m)
    pair = fusion.pair if fusion.derivative else None
    in_p = [
        None if axis == pair else axis - (pair is not None and axis > pair)
        for axis in range(len(d_shape))
    ]
    sums = lax.reshape(
        sums, [1 if p in rows else extent for p, extent in zip(in_p, d_shape, strict=True)]
    )
    return sums.sum(fusion.sum_axes)
