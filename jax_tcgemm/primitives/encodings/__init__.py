"""How the factors of a product are stored, for the rules of `tcgemm_encoded_dot_general`."""

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import epilogue, packed_epilogue
from jax_tcgemm.epilogues.parts import Parts
from jax_tcgemm.problem.call_options import CallOptions

# The dtype of accumulators.
ACCUMULATOR = np.dtype(np.float32)

Product = epilogue.Product | packed_epilogue.Product


class Batched(NamedTuple):
    """A mapped product as one product.

    Attributes:
      encoding: the encoding of `factors`.
      factors: the factors of the one product.
      in_accumulators: the dimension of its accumulators that is new.
    """

    encoding: "Encoding"
    factors: Sequence[jax.Array]
    in_accumulators: int


class Names(NamedTuple):
    """The names of dimensions, as `partitioning.Division` has them.

    Attributes:
      factors: names of each factor's dimensions.
      accumulator: names of an accumulator's dimensions.
      whole: names of dimensions that are not divided.
    """

    factors: tuple[tuple[str, ...], ...]
    accumulator: tuple[str, ...]
    whole: frozenset[str]


class Encoding(abc.ABC):
    """An encoding of a product's factors: a frozen dataclass that is a parameter of the primitive.

    Attributes:
      num_factors: how many arrays the factors are.
      num_batch: how many dimensions of the product are of a batch.
      gated: whether there are two accumulators, both of which the function takes.
      stores_narrow: whether accumulators may be stored in the dtype that the function rounds them
        to, where it does nothing else with them.
    """

    num_factors: int
    num_batch: int
    gated: bool
    stores_narrow: bool = False

    @property
    def num_accumulators(self) -> int:
        """The number of accumulators that the function takes."""
        return 2 if self.gated else 1

    @abc.abstractmethod
    def accumulators(
        self, factors: Sequence[jax.Array], dtype: np.dtype, options: CallOptions
    ) -> list[jax.Array]:
        """Compute the accumulators in a dtype, by primitives without an epilogue."""

    @abc.abstractmethod
    def tangents(
        self, factors: Sequence[jax.Array], moving: Sequence, options: CallOptions
    ) -> list[jax.Array] | None:
        """Return the tangents of the accumulators, or None if no factor has a tangent."""

    @abc.abstractmethod
    def batched(
        self, factors: Sequence[jax.Array], dims: Sequence, size: int, reduces: bool
    ) -> Batched | None:
        """Return one product for all entries of mapped factors, or None if there is none.

        Args:
          factors: the factors.
          dims: of each the mapped dimension, or None.
          size: extent of that.
          reduces: whether the function reduces.
        """

    def instead(
        self,
        factors: Sequence[jax.Array],
        operands: Sequence[jax.Array],
        options: CallOptions,
        function: core.ClosedJaxpr,
        bind: Callable,
    ) -> list[jax.Array] | None:
        """Return the results if another call computes them faster, or None.

        `bind(encoding, factors, operands, options, function)` calls the primitive.
        """
        del factors, operands, options, function, bind

    @abc.abstractmethod
    def shape(self, factors: Sequence) -> tuple[int, ...]:
        """Return the shape of an accumulator, from the types of the factors."""

    @abc.abstractmethod
    def product_of(
        self,
        factors: Sequence,
        operand_shapes: tuple[tuple[int, ...], ...],
        function: core.ClosedJaxpr,
        options: CallOptions,
    ) -> Product:
        """Describe a call to its planner, from the types of its factors."""

    @abc.abstractmethod
    def names(self, factors: Sequence) -> Names:
        """Name the dimensions that devices may divide, from the types of the factors."""

    @abc.abstractmethod
    def obstacle_to_division(
        self, factors: Sequence, parts: Parts, product: Product, device: selection.Device
    ) -> str:
        """Return why a divided call runs unfused, or "" if each device computes a shard of it."""

    @abc.abstractmethod
    def flops(self, factors: Sequence) -> int:
        """Count multiplications and additions of the product."""
