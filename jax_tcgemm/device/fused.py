"""The device-local fused product: what follows a product in a layer, as a function of it.

`make_plan` decides everything from shapes and dtypes, and `fused_dot_general` carries out a plan
that is fused. A factor and a residual alone are alpha and beta of the product, which libraries and
the host have, too. What no call can say, or no implementation can run as one, is run unfused: as a
plain product, which is planned in its own right, and what XLA makes of the rest. The plan says why.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import selection
from jax_tcgemm.device import dense, epilogue
from jax_tcgemm.device.folding import Fold
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.fusion import Fusion, finish_parts, join_parts
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.precision import Numerics


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of given shapes, and what is fused to it: what a primitive call says.

    Attributes:
      product: the product itself, P.
      fusion: what happens to it.
      operands: shape and dtype of each of `fusion.operands`.
    """

    product: dense.Product
    fusion: Fusion
    operands: tuple[tuple[tuple[int, ...], np.dtype], ...] = ()

    @property
    def of_function(self) -> tuple[str, ...]:
        """The operands of what follows the product, by name."""
        return tuple(name for name in self.fusion.operands if name != "rhs_up")

    @property
    def has_two_z(self) -> bool:
        """Whether it multiplies by two matrices."""
        return self.fusion.pair is not None and not self.fusion.derivative


@dataclasses.dataclass(frozen=True)
class ScaledPlan:
    """How a product with a factor and a residual runs on one device: with alpha and beta."""

    product: Product
    numerics: Numerics
    fold: Fold
    problem: Problem
    choice: selection.Choice

    @property
    def is_fused(self) -> bool:
        """Whether one call runs it."""
        return self.choice.implementation != selection.XLA

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array that XLA must rewrite for the call."""
        return dense.copies(self.product.product, self.numerics, self.fold) if self.is_fused else ()


@dataclasses.dataclass(frozen=True)
class FunctionPlan:
    """How it runs as a product with a function.

    `sums_apart`: whether XLA makes the sums that are asked for, of the result.
    """

    product: Product
    plan: epilogue.Plan
    sums_apart: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether one call runs it."""
        return self.plan.is_fused

    @property
    def problem(self) -> Problem | None:
        """As of `epilogue.Plan`."""
        return self.plan.problem

    @property
    def choice(self) -> selection.Choice:
        """As of `epilogue.Plan`."""
        return self.plan.choice

    @property
    def code(self) -> str:
        """As of `epilogue.Plan`."""
        return self.plan.code

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array that XLA must rewrite for the call."""
        return (*self.plan.copies, _SUMMED_AGAIN) if self.sums_apart else self.plan.copies


Plan = ScaledPlan | FunctionPlan

_SUMMED_AGAIN = "result read once more for its sums, which are not those of its rows"


def make_plan(product: Product, device: selection.Device, obstacle: str = "") -> Plan:
    """Says a product with what is fused to it as a problem and chooses what runs it.

    Args:
      product: the product.
      device: the device it will run on.
      obstacle: a phrase saying why it can only be run unfused; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that rejects the problem.
    """
    bare = dense.of_device(product.product, device)
    product = dataclasses.replace(product, product=bare)
    scaled = None if obstacle else _scaled_plan(product, device)
    if scaled is not None and (
        device.platform != "cuda" or bare.options.implementation in _SCALING
    ):
        return scaled
    found = _function_plan(product, device, obstacle)
    if scaled is None or selection.is_forced(bare.options):
        return found
    times = [selection.predicted_us(x.problem, device) for x in (scaled, found) if x.is_fused]
    is_faster = None not in times and times and times[0] == min(times)
    return scaled if scaled.is_fused and (is_faster or not found.is_fused) else found


# Those that have no functions, or few.
_SCALING = ("cublaslt", "simt_naive", "simt_tiled")


def _scaled_plan(product: Product, device: selection.Device) -> ScaledPlan | None:
    """As a product with alpha and beta, if it is no more than that."""
    fusion, bare = product.fusion, product.product
    is_linear = fusion.activation == "none" and not fusion.derivative and fusion.pair is None
    has_more = fusion.aux_out or fusion.sum_axes is not None or "bias" in fusion.operands
    folded = dense.fold_product(bare, device)
    if not is_linear or has_more or isinstance(folded, str):
        return None
    if device.platform == "cpu" and bare.options.invariant_rows:
        return None  # `host` adds up a single row in another order, unless it repeats the row.
    numerics, fold, problem = folded
    if numerics.out_dtype != bare.result_dtype or fold.result_order is not None:
        return None
    if problem.out_dtype not in _FLOATS or math.prod(bare.result_shape) == 0:
        return None
    beta = float("residual" in fusion.operands)
    problem = dataclasses.replace(problem, alpha=fusion.alpha, beta=beta)
    nominal = dense.of_nominal_rows(problem, fold, bare.options)
    choice = selection.select(bare.options, problem, device, nominal=nominal)
    return ScaledPlan(product, numerics, fold, problem, choice)


_FLOATS = ("f16", "bf16", "f32", "f64")


def _function_plan(product: Product, device: selection.Device, obstacle: str) -> FunctionPlan:
    """As a product with a function, which makes sums, too, where kernels can reduce so."""
    has_sums = product.fusion.sum_axes is not None
    plan = epilogue.make_plan(_with_function(product, has_sums), device, obstacle)
    if has_sums and plan.problem is None and not obstacle:
        without = epilogue.make_plan(_with_function(product, False), device)
        if without.is_fused:
            return FunctionPlan(product, without, sums_apart=True)
    return FunctionPlan(product, plan)


def _with_function(product: Product, has_sums: bool) -> epilogue.Product:
    fusion, bare = product.fusion, product.product
    fusion = fusion if has_sums else dataclasses.replace(fusion, sum_axes=None)
    names = product.of_function
    packed = product.has_two_z and "rhs_up" not in fusion.operands
    shape = bare.result_shape
    if packed:
        shape = (*shape[: fusion.pair], *shape[fusion.pair + 1 :])
    given = [x for name, x in zip(fusion.operands, product.operands, strict=True) if name in names]
    in_place = None
    if fusion.in_place:
        in_place = next((names.index(x) for x in ("residual", "aux_in") if x in names), None)
    return epilogue.Product(
        dataclasses.replace(bare, result_dtype=np.dtype(wide_dtype(bare.result_dtype))),
        _function(fusion, names, 1 + product.has_two_z, shape, bare.result_dtype, tuple(given)),
        tuple(x for x, _ in given),
        num_rhs=1 + ("rhs_up" in fusion.operands),
        pair=fusion.pair if packed else None,
        in_place=in_place,
        library=_library(product),
    )


def _library(product: Product) -> str:
    """Which epilogue of a library it is: a name of csrc/core/problem.h."""
    fusion, names = product.fusion, product.of_function
    if fusion.pair is not None or fusion.sum_axes is not None or fusion.alpha != 1.0:
        return "none"
    if fusion.derivative:
        return "dgelu" if fusion.activation == "gelu_tanh" and names == ("aux_in",) else "none"
    words = {"none": [], "relu": ["relu"], "gelu_tanh": ["gelu"]}.get(fusion.activation)
    if words is None or names not in ((), ("bias",)) or (fusion.aux_out and words != ["gelu"]):
        return "none"
    words += ["aux"] * fusion.aux_out
    if names:
        ((shape, dtype),) = product.operands
        is_of_columns = fusion.bias_axes == (len(product.product.result_shape) - 1,)
        if dtype != product.product.result_dtype or not is_of_columns or shape[0] == 1:
            return "none"
        words.append("bias")
    return "_".join(words) or "none"


@functools.lru_cache(maxsize=1024)
def _function(fusion: Fusion, names, num_products, shape, dtype, types):
    """What follows the product as a jaxpr of it, or both, and the operands."""
    wide = wide_dtype(dtype)

    def function(*arguments):
        products, operands = arguments[:num_products], arguments[num_products:]
        if fusion.alpha != 1.0:
            products = [fusion.alpha * x for x in products]
        given = dict(zip(names, operands, strict=True))
        ds, zs, sums = finish_parts(fusion, products, given, dtype)
        return [*join_parts(fusion, ds, zs, []), *sums]

    accumulators = [jax.ShapeDtypeStruct(shape, wide)] * num_products
    operands = [jax.ShapeDtypeStruct(*x) for x in types]
    return jax.make_jaxpr(function)(*accumulators, *operands)


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
    fusion = plan.product.fusion
    if isinstance(plan, ScaledPlan):
        return [_scaled(plan, lhs, rhs, given.get("residual"))]
    rights = [rhs, given["rhs_up"]] if "rhs_up" in given else [rhs]
    operands = [given[name] for name in plan.product.of_function]
    found = epilogue.product_with_epilogue(plan.plan, lhs, *rights, *operands)
    num_arrays = 1 + fusion.aux_out
    arrays, sums = found[:num_arrays], found[num_arrays:]
    if plan.sums_apart:
        return [*arrays, jnp.sum(arrays[0].astype(wide_dtype(arrays[0].dtype)), fusion.sum_axes)]
    return join_parts(fusion, arrays[:1], arrays[1:], sums)


def _scaled(plan: ScaledPlan, lhs, rhs, residual) -> jax.Array:
    """Carries out the call of a product with alpha and beta."""
    product, numerics, fold = plan.product.product, plan.numerics, plan.fold
    a = dense.prepare(lhs, product, numerics, fold)
    b = dense.prepare(rhs, product, numerics, fold, is_rhs=True)
    a, b = (b, a) if fold.swapped else (a, b)
    return dense.local_gemm(
        plan.problem,
        a,
        b,
        None if residual is None else residual.astype(numerics.out_dtype),
        in_place=plan.product.fusion.in_place,
        choice=plan.choice,
        shape=product.result_shape,
    )


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
