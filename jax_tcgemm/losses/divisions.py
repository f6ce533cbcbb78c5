"""Losses over explicit mesh axes: each device's tokens and its part of the vocabulary."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tcgemm.sharding.layout import canonical_spec


@dataclasses.dataclass(frozen=True)
class Division:
    """How explicit mesh axes divide a loss. Features are whole on each device.

    Attributes:
      mesh: the mesh of the operands.
      tokens: of each dimension of the labels, the axes that divide it.
      vocabulary: the axes that divide the vocabulary; none that divides the tokens.
      axis: the dimension of w that is the vocabulary.
    """

    mesh: AbstractMesh
    tokens: tuple[tuple[str, ...], ...]
    vocabulary: tuple[str, ...]
    axis: int

    @property
    def token_axes(self) -> tuple[str, ...]:
        """All axes that divide tokens."""
        return tuple(name for axes in self.tokens for name in axes)

    def moved(self, x, w, bias, *rest) -> list:
        """The operands, bias may be None and the rest is of tokens, where they are needed."""
        operands = x, w, bias, *rest
        return [
            None if a is None else jax.sharding.reshard(a, NamedSharding(self.mesh, spec))
            for a, spec in zip(operands, self._specs(len(rest)), strict=True)
        ]

    def run(self, own: Callable, operands: Sequence, *, is_sum: bool):
        """What a function makes of operands as of `moved`, each device of its own part.

        Args:
          own: a function of these, with collectives over the axes.
          operands: the arrays.
          is_sum: whether the result is a scalar, the same on all devices, or one of tokens.
        """
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return jax.shard_map(
            own,
            mesh=self.mesh,
            in_specs=tuple(self._specs(len(operands) - 3)),
            out_specs=P() if is_sum else P(*self.tokens),
            axis_names={name for name, kind in types if kind == AxisType.Explicit},
        )(*self.moved(*operands))

    def _specs(self, num_rest: int) -> list[P]:
        weights = (self.vocabulary, None) if self.axis == 0 else (None, self.vocabulary)
        tokens = [P(*self.tokens)] * num_rest
        return [P(*self.tokens, None), P(*weights), P(self.vocabulary), *tokens]


def division_of(op: str, x, w, labels, bias, axis: int, named: tuple[str, ...]) -> Division | None:
    """The division of a loss by the types of its operands; None where no explicit axis divides one.

    Raises:
      ValueError: when one does where axes of a shard_map are named, too.
    """
    given = {"x": x, "w": w, "labels": labels, "bias": bias}
    specs = {name: _spec(a) for name, a in given.items() if a is not None}
    divided = [name for name, spec in specs.items() if any(spec)]
    if not divided:
        return None
    if named:
        name = divided[0]
        raise ValueError(
            f"{op}: {name} must not be divided over explicit mesh axes where others are named, got "
            f"{name} of type {jax.typeof(given[name])} and axes {', '.join(named)}; have "
            "jax.shard_map divide over all of them"
        )
    tokens = specs["x"][:-1]
    tokens = tokens if any(tokens) else specs["labels"]
    taken = {name for axes in tokens for name in axes}
    vocabulary = tuple(name for name in specs["w"][axis] if name not in taken)
    return Division(jax.typeof(given[divided[0]]).sharding.mesh, tokens, vocabulary, axis)


def check_undivided(op: str, **operands) -> None:
    """Raises ValueError for an operand that is sharded over explicit mesh axes."""
    for name, a in operands.items():
        if a is not None and any(_spec(a)):
            raise ValueError(
                f"{op}: {name} must not be divided over explicit mesh axes, got {name} of type "
                f"{jax.typeof(a)}; use jax.shard_map"
            )


def _spec(x) -> tuple[tuple[str, ...], ...]:
    sharding = jax.typeof(x).sharding
    return ((),) * x.ndim if sharding.mesh.empty else canonical_spec(sharding.spec, x.ndim)
