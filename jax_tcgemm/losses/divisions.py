"""Losses with tokens or the vocabulary sharded over explicit mesh axes."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tcgemm.sharding.layout import canonical_spec


@dataclasses.dataclass(frozen=True)
class Division:
    """Sharding of a loss over explicit mesh axes. Features are not sharded.

    Attributes:
      mesh: the mesh of the operands.
      tokens: for each dimension of the labels, the axes that shard it.
      vocabulary: the axes that shard the vocabulary, disjoint from the axes that shard tokens.
      axis: the vocabulary dimension of w.
    """

    mesh: AbstractMesh
    tokens: tuple[tuple[str, ...], ...]
    vocabulary: tuple[str, ...]
    axis: int

    @property
    def token_axes(self) -> tuple[str, ...]:
        """All axes that shard tokens."""
        return tuple(name for axes in self.tokens for name in axes)

    def moved(self, x, w, bias, *rest) -> list:
        """Reshard the operands for the loss. bias may be None; the rest has the shape of labels."""
        operands = x, w, bias, *rest
        return [
            None if a is None else jax.sharding.reshard(a, NamedSharding(self.mesh, spec))
            for a, spec in zip(operands, self._specs(len(rest)), strict=True)
        ]

    def run(self, function: Callable, operands: Sequence, *, is_sum: bool):
        """Run a function on each device's shards of the operands, after `moved`.

        Args:
          function: a function of one device's operands, with collectives over the axes.
          operands: the arrays.
          is_sum: whether the result is a scalar, equal on all devices, instead of one per token.
        """
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return jax.shard_map(
            function,
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
    """Sharding of a loss from the types of its operands; None if no explicit axis shards any.

    Raises:
      ValueError: if an explicit axis shards an operand, and manual axes are named as well.
    """
    given = {"x": x, "w": w, "labels": labels, "bias": bias}
    specs = {name: _spec(a) for name, a in given.items() if a is not None}
    divided = [name for name, spec in specs.items() if any(spec)]
    if not divided:
        return None
    if named:
        name = divided[0]
        raise ValueError(
            f"{op}: {name} must not be sharded over explicit mesh axes where others are named, got "
            f"{name} of type {jax.typeof(given[name])} and axes {', '.join(named)}; have "
            "jax.shard_map divide over all of them"
        )
    tokens = specs["x"][:-1]
    tokens = tokens if any(tokens) else specs["labels"]
    taken = {name for axes in tokens for name in axes}
    vocabulary = tuple(name for name in specs["w"][axis] if name not in taken)
    return Division(jax.typeof(given[divided[0]]).sharding.mesh, tokens, vocabulary, axis)


def check_undivided(op: str, **operands) -> None:
    """Raise ValueError for an operand that is sharded over explicit mesh axes."""
    for name, a in operands.items():
        if a is not None and any(_spec(a)):
            raise ValueError(
                f"{op}: {name} must not be sharded over explicit mesh axes, got {name} of type "
                f"{jax.typeof(a)}; use jax.shard_map"
            )


def _spec(x) -> tuple[tuple[str, ...], ...]:
    sharding = jax.typeof(x).sharding
    return ((),) * x.ndim if sharding.mesh.empty else canonical_spec(sharding.spec, x.ndim)
