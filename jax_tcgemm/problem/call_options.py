"""Options of a call: which public function was called, and what it asks of selection.

Every primitive of a product has them as one static parameter, which its derivatives inherit, and
every plan passes them to selection whole.
"""

from __future__ import annotations

import dataclasses
import enum


class Provenance(enum.Enum):
    """How a call came to be, where that decides what may run it; the value is for jaxprs' text."""

    CALLED = ""
    # A product that `accelerate` found in a program.
    ACCELERATED = "accelerated"
    # A product of operands that were multiplied by their block scales.
    DEQUANTIZED_BLOCKS = "operands dequantized by block scales"
    # A product of operands that were dequantized since no kernel takes their scales.
    DEQUANTIZED = "operands dequantized"


@dataclasses.dataclass(frozen=True)
class RoundingsRemoved:
    """`accelerate(wide=True)` removed so many roundings from an epilogue."""

    count: int

    def __str__(self) -> str:
        return f"{self.count} roundings left out"


@dataclasses.dataclass(frozen=True)
class LossKeepsLogits:
    """Logits are stored, since their loss could not be computed without them."""

    reason: str

    def __str__(self) -> str:
        return f"no loss without logits: {self.reason}"


Diagnostic = RoundingsRemoved | LossKeepsLogits


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """Options of one call of a public function.

    Attributes:
      function: the public function, for messages.
      implementation: name to force, or None.
      config: config of it to force, or None.
      invariant_rows: 0, or a number of rows: then results are batch-invariant, by the kernel that
        is selected for so many rows.
      provenance: how the call came to be.
      diagnostics: what rewrite passes report of the call, for `explain`.
    """

    function: str
    implementation: str | None = None
    config: str | None = None
    invariant_rows: int = 0
    provenance: Provenance = Provenance.CALLED
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def is_accelerated(self) -> bool:
        """Whether `accelerate` found the call in a program."""
        return self.provenance is Provenance.ACCELERATED

    @property
    def is_unconstrained(self) -> bool:
        """Whether neither an implementation is forced nor batch invariance asked for."""
        return self.implementation is None and not self.invariant_rows

    def without_config(self) -> CallOptions:
        """Return the options of a derivative: the config was forced for another shape."""
        return self if self.config is None else dataclasses.replace(self, config=None)

    def selecting(self, implementation: str | None = None) -> CallOptions:
        """Return the options of another call on behalf of this one, with nothing else asked for."""
        return dataclasses.replace(
            self, implementation=implementation, config=None, invariant_rows=0
        )

    def of_step(self) -> CallOptions:
        """Return the options of a step beside the product: of what is forced, only XLA holds."""
        return self.selecting("xla" if self.implementation == "xla" else None)

    def of_dequantized_blocks(self) -> CallOptions:
        """Return the options of a product of operands dequantized by their block scales."""
        return dataclasses.replace(self.selecting(), provenance=Provenance.DEQUANTIZED_BLOCKS)

    def reporting(self, diagnostic: Diagnostic) -> CallOptions:
        """Return the options with another diagnostic."""
        return dataclasses.replace(self, diagnostics=(*self.diagnostics, diagnostic))

    def __repr__(self) -> str:
        """Return what differs from the defaults, since jaxprs print it."""
        fields = [self.function]
        fields += [name for name in (self.implementation, self.config) if name is not None]
        fields += [f"invariant_rows={self.invariant_rows}"] if self.invariant_rows else []
        fields += [self.provenance.value] if self.provenance.value else []
        return "/".join((*fields, *map(str, self.diagnostics)))
