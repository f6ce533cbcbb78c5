"""Where an element lies, as a function of where the product's result is being computed.

Elementwise code runs for one element of the result, at the indices ``at``. What it needs of another
array lies at a `Place` along each of that array's dimensions. Broadcasts, transpositions, slices
and reshapes move no data here: they map the places in their result to places in their operand.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Place:
    """An index: ``offset + sum(factor * at[dim] for dim, factor in enumerate(factors))``.

    The factor of a dimension of extent 1 is 0.
    """

    offset: int
    factors: tuple[int, ...]

    def __add__(self, other: "Place") -> "Place":
        pairs = zip(self.factors, other.factors, strict=True)
        return Place(self.offset + other.offset, tuple(x + y for x, y in pairs))

    def scaled(self, factor: int) -> "Place":
        """So many times the index."""
        return Place(self.offset * factor, tuple(x * factor for x in self.factors))

    def moved(self, offset: int) -> "Place":
        """The index that is `offset` further."""
        return dataclasses.replace(self, offset=self.offset + offset)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Dimensions of the result on which the place depends."""
        return tuple(dim for dim, factor in enumerate(self.factors) if factor)


# One for each dimension of an array.
Places = tuple[Place, ...]


class NoPlaceError(ValueError):
    """A reshape brings together what is not at equal distances."""


def everywhere(shape: tuple[int, ...]) -> Places:
    """The places in the result itself."""
    rank = len(shape)
    return tuple(
        Place(0, tuple(int(i == dim and extent > 1) for i in range(rank)))
        for dim, extent in enumerate(shape)
    )


def first(rank: int) -> Place:
    """Index 0 for all of a result of so many dimensions."""
    return Place(0, (0,) * rank)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of an array that is packed in the order of its dimensions."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def linear(places: Places, strides: tuple[int, ...], rank: int) -> Place:
    """The place in memory, in elements, of what lies at `places` in an array with `strides`."""
    found = first(rank)
    for place, stride in zip(places, strides, strict=True):
        found = found + place.scaled(stride)
    return found


def reshaped(
    places: Places, old: tuple[int, ...], new: tuple[int, ...], result: tuple[int, ...]
) -> Places:
    """The places in an array of shape `new` of what lies at `places` in it reshaped to `old`.

    Args:
      places: in the reshaped array.
      old: its shape.
      new: the shape before.
      result: the shape that `at` ranges over.

    Raises:
      NoPlaceError: a place would not be linear in `at`.
    """
    rest = linear(places, row_major(old), len(result))
    found = []
    for extent in reversed(new):
        rest, place = _divide(rest, extent, result)
        found.append(place)
    return tuple(reversed(found))


def _divide(place: Place, divisor: int, extents: tuple[int, ...]) -> tuple[Place, Place]:
    """Quotient and remainder."""
    is_whole = [factor % divisor == 0 for factor in place.factors]
    pairs = list(zip(place.factors, is_whole, strict=True))
    quotient = Place(place.offset // divisor, tuple(x // divisor if y else 0 for x, y in pairs))
    remainder = Place(place.offset % divisor, tuple(0 if y else x for x, y in pairs))
    ends = [x * (extent - 1) for x, extent in zip(remainder.factors, extents, strict=True)]
    least = remainder.offset + sum(min(x, 0) for x in ends)
    most = remainder.offset + sum(max(x, 0) for x in ends)
    if least < 0 or most >= divisor:
        raise NoPlaceError
    return quotient, remainder
