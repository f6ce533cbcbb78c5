"""The device-local contraction over the tokens of each group, of scaled operands of 8 bits.

Their tokens are last, as a GPU's tensor cores want what is summed over.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import selection
from jax_tcgemm.device import grouped
from jax_tcgemm.device.call import call
from jax_tcgemm.device.fusion.fused import Plan
from jax_tcgemm.device.fusion.grouped_epilogue import Folded, GroupedProduct
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.operands.block_scales import BlockScales

# A row of an operand begins on 16 bytes.
_TOKENS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Product(GroupedProduct):
    """One scaled contraction, as its planner takes it (primitives/encodings/ragged_contraction.py).

    Attributes:
      product: the product itself, of form contraction, in the dtype of the result.
      scales: of lhs (*batch, m, k), and of rhs (*batch, n, k).
    """

    product: grouped.Product
    scales: tuple[BlockScales, BlockScales]

    def runs_by_xla(self, device: selection.Device) -> bool:
        """Return False: `folded` and `refuse_to_fuse` say what a CPU does."""
        del device
        return False

    def folded(self, device: selection.Device) -> Folded | str:
        """Return the problem with the scales, or why there is none."""
        if device.platform == "cpu":
            return "the CPU multiplies what is dequantized"
        return _folded(self, device)

    def refuse_to_fuse(self, device: selection.Device, why: str) -> selection.Choice:
        """Return the choice of a contraction that cannot be fused, as a plain product's."""
        choice = selection.select(self.options, None, device, kind=self.kind, obstacle=why)
        return dataclasses.replace(choice, why=f"unfused: {why}")

    def copies(self, plan: Plan) -> tuple[str, ...]:
        """Return those of the product, and operands that are padded."""
        names = ("lhs", "rhs") if plan.problem.k != self.product.k else ()
        padded = (f"{name} padded to {plan.problem.k} tokens" for name in names)
        return (*super().copies(plan), *padded)

    def run(self, plan: Plan, *arguments: jax.Array) -> list[jax.Array]:
        """Return the result, from lhs, rhs, group_sizes, group_offset and scales of lhs and rhs."""
        (*operands, group_sizes, group_offset), scales = arguments[:4], arguments[4:]
        problem, product = plan.problem, self.product
        if more := problem.k - product.k:
            operands = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) for x in operands]
        given = grouped.prepared(self.bare(plan), *operands, group_sizes, group_offset)
        given += [x.folded(own) for x, own in zip(self.scales, scales, strict=True)]
        shape = (*product.batch_shape, product.groups, product.m, product.n)
        result = jax.ShapeDtypeStruct(shape, np.dtype(DTYPES[problem.out_dtype]))
        return call(problem, plan.choice, given, [result])


@functools.lru_cache(maxsize=1024)
def _folded(product: Product, device: selection.Device) -> Folded | str:
    """The contraction as one problem, or what stands against it."""
    own = product.product
    numerics = grouped.numerics_of(own, device)
    if isinstance(numerics, str):
        return numerics
    if numerics.out_dtype != own.result_dtype:
        return f"no implementation gives {own.result_dtype}"
    k = -(-own.k // _TOKENS_AT_ONCE) * _TOKENS_AT_ONCE
    problem = grouped.problem_of(dataclasses.replace(own, k=k), numerics, device.platform)
    scales = tuple(dataclasses.replace(x.scale_strides(1), inner_stride=0) for x in product.scales)
    return Folded(dataclasses.replace(problem, tokens_last=True, scales=scales), numerics)
