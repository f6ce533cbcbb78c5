"""Estimated times of a product and of the function after it, where XLA runs them one by one."""

import dataclasses
import math
from collections.abc import Sequence

from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.epilogues.rounding import of_stored
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.system.jax_internals import as_jaxpr


@dataclasses.dataclass(frozen=True)
class UnfusedTimes:
    """Microseconds of bare products, by whatever is fastest and by XLA, and of XLA's loop.

    `xla_us` is of all of them as XLA's program; None where its product has no estimate.
    """

    product_us: float
    loop_us: float
    xla_us: float | None

    def __str__(self) -> str:
        product, loop = f"{self.product_us:.4g} us", f"{self.loop_us:.4g} us"
        return f"{product} for the product and {loop} for its function"


def unfused_times(
    product: dense.Product,
    function: core.ClosedJaxpr,
    num_accumulators: int,
    num_rhs: int,
    operands: Sequence[int],
    problem: Problem,
    device: selection.Device,
) -> UnfusedTimes | None:
    """Estimate the times of bare products and of the loop that XLA makes of their function.

    The loop takes a launch and the longer of its arithmetic and, at the rate of the device's
    memory, the bytes of the products, which are read again, of the operands and of the results
    other than a product itself. Where XLA's own kernel is predicted to be the fastest for the
    product, it takes a function of elements with it: no launch, and nothing of the product is
    moved.

    Args:
      product: one of the products.
      function: of the accumulators and the operands.
      num_accumulators: how many accumulators it takes.
      num_rhs: how many products there are.
      operands: the numbers of those operands that the function reads.
      problem: the product with the function as its epilogue.
      device: where it runs.

    Returns:
      The times; None where the products have no estimate.
    """
    stored, function = of_stored(function, num_accumulators)
    bare = dense.fold_product(dataclasses.replace(product, result_dtype=stored), device)
    if isinstance(bare, str) or (fastest := selection.predicted(bare[2], device)) is None:
        return None
    jaxpr = as_jaxpr(function)
    accumulators = jaxpr.invars[:num_accumulators]
    read = [*accumulators, *(jaxpr.invars[num_accumulators + number] for number in operands)]
    written = [x for x in jaxpr.outvars if x not in accumulators]
    moved = _num_bytes((*read, *written))
    epilogue = problem.epilogue.function
    is_of_elements = num_accumulators == 1 and not any(x.over for x in epilogue.results)
    is_fused = is_of_elements and fastest[0] == selection.XLA
    if is_fused:
        moved = max(moved - 2 * _num_bytes(accumulators), 0)
    loop = selection.loop_us(
        moved,
        math.prod(accumulators[0].aval.shape),
        epilogue.cost.loop,
        device.num_sms,
        selection.calibration_of(device.name),
        is_launched=not is_fused,
    )
    xla = selection.xla_us(bare[2], device)
    return UnfusedTimes(fastest[1] * num_rhs, loop, None if xla is None else xla * num_rhs + loop)


def _num_bytes(arrays) -> int:
    return sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in arrays)
