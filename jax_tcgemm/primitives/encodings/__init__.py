"""How the operands of a product are stored, for the rules of `tcgemm_epilogue_product`."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device.fusion import epilogue, grouped_epilogue, packed
from jax_tcgemm.primitives.transposes import ProductLayout
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.sharding.layout import Layout
from jax_tcgemm.system import jax_internals

Product = epilogue.Product | packed.Product | grouped_epilogue.Product


class Batched(NamedTuple):
    """A mapped product as one product.

    Attributes:
      encoding: the encoding of `operands`.
      operands: the operands of the one product.
      in_accumulators: the dimension of its accumulators that is new.
    """

    encoding: "Encoding"
    operands: Sequence[jax.Array]
    in_accumulators: int


class Instead(NamedTuple):
    """Another call of the primitive that computes the same accumulators faster.

    Attributes:
      encoding: the encoding of `operands`.
      operands: the operands of the other call.
      options: options of the other call.
    """

    encoding: "Encoding"
    operands: Sequence[jax.Array]
    options: CallOptions


class Names(NamedTuple):
    """The names of dimensions, as `partitioning.Division` has them.

    Attributes:
      operands: names of each operand's dimensions.
      accumulator: names of an accumulator's dimensions.
      whole: names of dimensions that are not divided.
      product: names of the dimensions of a product that devices may sum, None if they do not divide
        what is contracted.
      even: names of dimensions that are divided into equal shards only.
    """

    operands: tuple[tuple[str, ...], ...]
    accumulator: tuple[str, ...]
    whole: frozenset[str]
    product: tuple[str, ...] | None = None
    even: tuple[str, ...] = ()


class Rows:
    """The rows of a product's accumulators: the epilogue takes its operands as they are."""

    def given(self, operands: Sequence) -> Sequence:
        """Return what the epilogue takes for its operands, some of which may be None."""
        return operands

    def masked(self, results: Sequence) -> Sequence:
        """Return the results of the call from those of the epilogue."""
        return results


class Encoding(abc.ABC):
    """An encoding of a product's operands: a frozen dataclass that is a parameter of the primitive.

    Attributes:
      num_operands: how many arrays the operands are.
      num_batch: how many dimensions of the product are of a batch.
      gated: whether there are two accumulators, both of which the epilogue takes.
      accumulator: dtype of accumulators.
      num_products: how many products the accumulators are, of a gated one 1 or 2.
      stores_narrow: whether accumulators may be stored in the dtype that the epilogue rounds them
        to, where it does nothing else with them.
      is_bare: whether the call is a product without an epilogue, whose function only rounds the one
        accumulator.
      masks_results: whether `Rows.masked` changes results, which are not to be reduced then.
      layout: what a product that reads through transposes of its operands changes, or None.
    """

    num_operands: int
    num_batch: int
    gated: bool
    accumulator: np.dtype = np.dtype(np.float32)
    num_products: int = 1
    stores_narrow: bool = True
    is_bare: bool = False
    masks_results: bool = False
    layout: ProductLayout | None = None

    @property
    def num_accumulators(self) -> int:
        """The number of accumulators that the epilogue takes."""
        return 2 if self.gated else 1

    def with_layout(self, layout: ProductLayout) -> "Encoding":
        """Return the encoding with another layout, if it has one."""
        raise NotImplementedError(f"{type(self).__name__} has no layout, got {layout}")

    def unsharded(self) -> "Encoding":
        """Return the encoding of one device's product."""
        return self

    def of_shards(self, layout: Layout, operands: Sequence) -> tuple["Encoding", Sequence]:
        """Return the encoding and the operands of one device's product, from shards of operands."""
        del layout
        return self, operands

    @abc.abstractmethod
    def products(
        self, operands: Sequence[jax.Array], dtype: np.dtype, options: CallOptions
    ) -> list[jax.Array]:
        """Compute the products in a dtype, by primitives without an epilogue."""

    @abc.abstractmethod
    def split_products(self, products: list[jax.Array], operands: Sequence) -> list[jax.Array]:
        """Return the accumulators in products."""

    def accumulators(
        self, operands: Sequence[jax.Array], dtype: np.dtype, options: CallOptions
    ) -> list[jax.Array]:
        """Compute the accumulators in a dtype, by primitives without an epilogue."""
        return self.split_products(self.products(operands, dtype, options), operands)

    def product_calls(self, operands: Sequence[jax.Array]) -> Sequence[tuple["Encoding", Sequence]]:
        """Return encoding and operands of each product that is a call of the primitive.

        () if `products` computes them all.
        """
        del operands
        return ()

    def types(self, operands: Sequence, options: CallOptions) -> list:
        """Return the types of the accumulators that an epilogue takes."""
        types = tuple(map(_type_of, operands))
        # What was asked for by name is found out when the primitive is lowered.
        return _types(self, types, options.selecting(), jax_internals.trace_context())

    def argument_types(
        self, operands: Sequence, epilogue_operands: Sequence, options: CallOptions
    ) -> list:
        """Return the types of an epilogue's arguments: of accumulators and of `Rows.given`."""
        return [*self.types(operands, options), *map(_type_of, epilogue_operands)]

    @abc.abstractmethod
    def tangents(
        self,
        operands: Sequence[jax.Array],
        moving: Sequence,
        options: CallOptions,
        accumulators: Callable,
    ) -> list[jax.Array | None]:
        """Return the tangent of each accumulator, None if no operand of it has a tangent.

        `accumulators(encoding, operands, dtype, options)` computes those of another product.
        """

    @abc.abstractmethod
    def batched(
        self, operands: Sequence[jax.Array], dims: Sequence, size: int, *, reduces: bool, mesh_axis
    ) -> Batched | None:
        """Return one product for all entries of mapped operands, or None if there is none.

        Args:
          operands: the operands.
          dims: of each the mapped dimension, or None.
          size: extent of that.
          reduces: whether the epilogue reduces.
          mesh_axis: the explicit mesh axis that divides the mapped dimension, or None.
        """

    def batched_product(
        self, operands: Sequence, dims: Sequence, size: int, mesh_axis, product: Callable
    ) -> jax.Array | None:
        """Return a bare product of mapped operands for which `batched` finds no encoding, or None.

        `product(encoding, operands)` computes another bare product. The mapped dimension of the
        result comes first.
        """
        del operands, dims, size, mesh_axis, product

    def batched_epilogue_operands(
        self, operands: Sequence, dims: Sequence
    ) -> tuple[Sequence, Sequence]:
        """Return the epilogue's operands beside mapped ones, and the new dimension of each."""
        return operands, dims

    def rows(self, operands: Sequence[jax.Array], options: CallOptions) -> Rows:
        """Return the rows of the accumulators, to which epilogue operands and results belong."""
        del operands, options
        return Rows()

    def types_given(self, operands: Sequence, epilogue_operands: Sequence) -> Sequence:
        """Return the types of what the epilogue takes for its operands, from their types."""
        del operands
        return epilogue_operands

    def instead(self, operands: Sequence[jax.Array], options: CallOptions) -> Instead | None:
        """Return another call that computes the same accumulators faster, or None."""
        del operands, options

    def runs_unfused(self, operands: Sequence[jax.Array], options: CallOptions) -> bool:
        """Return whether a call runs as `products`, and XLA computes the epilogue."""
        del operands, options
        return False

    @abc.abstractmethod
    def shape(self, operands: Sequence) -> tuple[int, ...]:
        """Return the shape of an accumulator, from the types of the operands."""

    @abc.abstractmethod
    def product_of(
        self,
        operands: Sequence,
        operand_shapes: tuple[tuple[int, ...], ...],
        function: core.ClosedJaxpr,
        *,
        options: CallOptions,
        in_place: int | None,
    ) -> Product:
        """Describe a call to its planner, from the types of its operands."""

    @abc.abstractmethod
    def names(self, operands: Sequence) -> Names:
        """Name the dimensions that devices may divide, from the types of the operands."""

    def names_of_epilogue_operands(
        self, operands: Sequence, epilogue_operands: Sequence, names: list
    ) -> list:
        """Name the dimensions of the epilogue's operands, given the names by what it takes."""
        del operands, epilogue_operands
        return names

    @abc.abstractmethod
    def obstacle_to_division(
        self,
        operands: Sequence,
        whole: Sequence[int],
        product: Product,
        device: selection.Device,
        options: CallOptions,
    ) -> str:
        """Return why a divided call runs unfused, or "" if each device computes a shard of it.

        `whole`: the dimensions of an accumulator that the epilogue takes whole.
        """

    @abc.abstractmethod
    def flops(self, operands: Sequence) -> int:
        """Count multiplications and additions of the product."""


def _type_of(x) -> ShapedArray:
    return x if isinstance(x, ShapedArray) else jax.typeof(x)


@functools.lru_cache(maxsize=1024)
def _types(encoding: Encoding, types: tuple, options: CallOptions, context) -> list:
    del context

    def made(*operands):
        return encoding.accumulators(operands, encoding.accumulator, options)

    with selection.unseen():
        return jax.make_jaxpr(made)(*types).out_avals
