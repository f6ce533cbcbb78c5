"""Encodings of the factors of a product: what of `tcgemm_encoded_dot_general` depends on them."""

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

# What accumulators are.
ACCUMULATOR = np.dtype(np.float32)

Product = epilogue.Product | packed_epilogue.Product


class Batched(NamedTuple):
    """A mapped product as one product.

    Attributes:
      encoding: that of its factors.
      factors: they.
      in_accumulators: where accumulators have the new dimension.
    """

    encoding: "Encoding"
    factors: Sequence[jax.Array]
    in_accumulators: int


class Names(NamedTuple):
    """The names of dimensions, as `partitioning.Division` has them.

    Attributes:
      factors: of each factor.
      accumulator: of an accumulator.
      whole: those that every device has whole.
    """

    factors: tuple[tuple[str, ...], ...]
    accumulator: tuple[str, ...]
    whole: frozenset[str]


class Encoding(abc.ABC):
    """How the factors of a product are stored; a frozen dataclass, a parameter of the primitive.

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
        """How many the function takes."""
        return 2 if self.gated else 1

    @abc.abstractmethod
    def accumulators(
        self, factors: Sequence[jax.Array], dtype: np.dtype, options: CallOptions
    ) -> list[jax.Array]:
        """The accumulators in some dtype, by primitives without a function."""

    @abc.abstractmethod
    def tangents(
        self, factors: Sequence[jax.Array], moving: Sequence, options: CallOptions
    ) -> list[jax.Array] | None:
        """The tangents of the accumulators; None where no factor moves."""

    @abc.abstractmethod
    def batched(
        self, factors: Sequence[jax.Array], dims: Sequence, size: int, reduces: bool
    ) -> Batched | None:
        """A product of which some factors are mapped; None where entries are not one product.

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
        """The results of what takes the place of the primitive; None where nothing does.

        `bind(encoding, factors, operands, options, function)` makes another call of the primitive.
        """
        del factors, operands, options, function, bind

    @abc.abstractmethod
    def shape(self, factors: Sequence) -> tuple[int, ...]:
        """The shape of an accumulator, from the types of the factors."""

    @abc.abstractmethod
    def product_of(
        self,
        factors: Sequence,
        operand_shapes: tuple[tuple[int, ...], ...],
        function: core.ClosedJaxpr,
        options: CallOptions,
    ) -> Product:
        """What one call says, from the types of its factors."""

    @abc.abstractmethod
    def names(self, factors: Sequence) -> Names:
        """How devices may divide a call, from the types of its factors."""

    @abc.abstractmethod
    def obstacle_to_division(
        self, factors: Sequence, parts: Parts, product: Product, device: selection.Device
    ) -> str:
        """Why a call is run unfused where devices divide it; "" where each makes a part of it."""

    @abc.abstractmethod
    def flops(self, factors: Sequence) -> int:
        """Multiplications and additions of the product."""
