"""How the primitives register their lowering: one rule, told the platform; and XLA's product."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator

from jax import lax
from jax.extend import core
from jax.extend.core.primitives import transpose_p
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jax_tcgemm import selection
from jax_tcgemm.device.dense.of_xla import LaxProduct
from jax_tcgemm.kernels import compiler, nvrtc, program
from jax_tcgemm.primitives.transposes import Reading, read_through
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system import errors
from jax_tcgemm.system.jax_internals import (
    ShardingTypeError,
    by_platform,
    check_nans,
    mlir,
    started_platform,
)


@contextlib.contextmanager
def named(function: str) -> Iterator[None]:
    """Name the public function in errors that JAX's own rules raise."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError, ShardingTypeError) as error:
        if not errors.is_naming(error):
            error.args = (f"{function}: {error}",)
            errors.naming(error, function)
        raise


# Primitives that have a lowering by `register`.
PRIMITIVES: set[core.Primitive] = set()


def register(
    primitive: core.Primitive,
    lower: Callable,
    reading: Reading | None = None,
    *,
    cacheable: bool = True,
) -> None:
    """Registers `lower(ctx, *operands, device=..., obstacle=..., **params)` for every platform.

    And what checkify is to make of it, which is to look at what it returns. `device` is what the
    program will run on, and `obstacle` says why only XLA can run the call, "" when not. `reading`:
    of a product that is given operands before they are transposed. `cacheable`: whether the
    lowering depends on the types of operands alone, not on which of them are one array.
    """

    def of_one(ctx, *operands, platform, **params):
        if reading is not None and reading.layout_of(params) is not None:
            ctx, operands, params = _read_through(ctx, operands, params, reading)
        with named(params["options"].function if "options" in params else params["call"].op):
            obstacle = obstacle_of(platform, *ctx.avals_in, *ctx.avals_out)
            obstacle = obstacle or partitioning.obstacle_to_automatic(ctx)
            device, before = selection.target_device(platform), program.num_carried()
            obstacle = obstacle or _missing_compiler(device)
            with selection.lowering():
                results = lower(ctx, *operands, device=device, obstacle=obstacle, **params)
            # What JAX keeps of a call's lowering it would copy for others with the kernels in it.
            if program.num_carried() > before:
                mlir.register_lowering(primitive, rule, cacheable=False)
            return results

    PRIMITIVES.add(primitive)
    rule = by_platform(of_one)
    # In a function that JAX keeps for other calls, operands are arguments, and no transposes.
    mlir.register_lowering(primitive, rule, cacheable=cacheable and reading is None)
    check_nans(primitive)


def _missing_compiler(device: selection.Device) -> str:
    """Why a program for a GPU that is not here can bring no kernels; "" where it can.

    Of one that is here each implementation says so itself.
    """
    return nvrtc.reason() if device.assumed else ""


def _read_through(ctx, operands, params, reading: Reading):
    """The context, operands and parameters of a product that reads through transposes."""

    def order_of(typed):
        value, aval = typed
        if not isinstance(value, ir.Value) or isinstance(value.owner, ir.Block):
            return None
        made = value.owner.operation
        if made.name != "stablehlo.transpose":
            return None
        order = tuple(map(int, made.attributes["permutation"]))
        inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
        source, _ = transpose_p.abstract_eval(aval, permutation=inverse)
        return (made.operands[0], source), order

    typed = list(zip(operands, ctx.avals_in, strict=True))
    ndims = [aval.ndim for aval in ctx.avals_in[:2]]
    typed, layout = read_through(typed, reading.layout_of(params), order_of, ndims)
    operands, avals = zip(*typed, strict=True)
    return ctx.replace(avals_in=list(avals)), operands, reading.with_layout(params, layout)


def key_of(primitive: core.Primitive, params, plan) -> Hashable:
    """Return a key that differs for lowered calls that differ, for operands of the same types.

    Args:
      primitive: the primitive.
      params: its parameters.
      plan: how the call runs: its problem and what is chosen for it.
    """
    choice: selection.Choice = plan.choice
    own = choice.implementation, choice.config, choice.workspace_bytes, choice.kernels
    abi = None if choice.implementation == selection.XLA else selection.abi_of(own[0])
    return primitive, tuple(params.items()), plan.problem, own, abi


def obstacle_of(platform: str, *avals) -> str:
    """Why only XLA can run a call, whatever it is; "" when others may.

    Args:
      platform: "cpu", "cuda", or the name of another one, or of several, joined by slashes.
      *avals: the types of operands and results.
    """
    if platform not in ("cpu", "cuda"):
        return f"no implementation runs on {platform}"
    if not all(isinstance(extent, int) for aval in avals for extent in aval.shape):
        return "its shapes are symbolic"
    return partitioning.obstacle_of(*avals)


def expect(make_plan: Callable, product_of: Callable, *types_and_params) -> None:
    """Begins to compile the kernels that a call will need, as soon as it is traced.

    Calls are lowered one after the other, and each would wait for its own kernels alone.

    Args:
      make_plan: from what the call says and the device to a plan, as when it is lowered.
      product_of: from the types of operands and result and the parameters to what the call says.
      *types_and_params: what `product_of` takes.
    """
    *avals, _ = types_and_params
    is_asked = started_platform() == "gpu" and not selection.is_unseen()
    if is_asked and not obstacle_of("cuda", *avals):
        _expect(make_plan, product_of(*types_and_params), selection.target_device("cuda"))


@functools.lru_cache(maxsize=4096)
def _expect(make_plan: Callable, product, device: selection.Device) -> None:
    # What is wrong with a call is said when it is lowered.
    with contextlib.suppress(Exception), selection.unseen():
        compiler.start(make_plan(product, device).choice.kernels)


def dot_general(lhs: ir.Value, rhs: ir.Value, asked: LaxProduct) -> ir.Value:
    """XLA's own product of operands of one dtype, without tracing it first.

    What `lax.dot_general` becomes, too. Most of the time that a trace would take is for what
    `_abstract_eval` and `LaxProduct` have said already.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = map(_lists, asked.dimension_numbers)
    numbers = stablehlo.DotDimensionNumbers.get(lhs_batch, rhs_batch, lhs_contract, rhs_contract)
    precision = asked.precision or (lax.Precision.DEFAULT,) * 2
    lhs_type, rhs_type = lhs.type, rhs.type
    shape = [
        *(lhs_type.shape[axis] for axis in lhs_batch),
        *(e for axis, e in enumerate(lhs_type.shape) if axis not in (*lhs_batch, *lhs_contract)),
        *(e for axis, e in enumerate(rhs_type.shape) if axis not in (*rhs_batch, *rhs_contract)),
    ]
    out = stablehlo.dot_general(
        ir.RankedTensorType.get(shape, lhs_type.element_type),
        lhs,
        rhs,
        numbers,
        precision_config=ir.ArrayAttr.get(
            [stablehlo.PrecisionAttr.get(one.name) for one in precision]
        ),
    )
    if asked.permutation == tuple(range(len(shape))):
        return out
    return stablehlo.transpose(out, ir.DenseI64ArrayAttr.get(asked.permutation))


def _lists(pair) -> tuple[list[int], list[int]]:
    return list(pair[0]), list(pair[1])
