"""Values as keys, told apart by type and bits: 0.0 == -0.0 and True == 1, and NaN is not NaN."""

import dataclasses
from collections.abc import Hashable


class Exactly:
    """A hashable value that equals another one only if both have the same types and bits.

    Told apart so are numbers, and those in tuples and in data classes that compare by fields; of
    anything else `==` decides.
    """

    __slots__ = ("_hash", "_key", "value")

    def __init__(self, value: Hashable):
        self.value, self._key = value, _key_of(value)
        self._hash = hash(self._key)

    def __eq__(self, other) -> bool:
        return isinstance(other, Exactly) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


def _key_of(value) -> Hashable:
    kind = type(value)
    if isinstance(value, float | complex):
        return kind, repr(value)  # which has all digits, and the signs of zeros
    if isinstance(value, tuple):
        return kind, tuple(map(_key_of, value))
    params = getattr(kind, "__dataclass_params__", None)
    if params is not None and params.eq and params.frozen:
        fields = (field for field in dataclasses.fields(value) if field.compare)
        return kind, tuple(_key_of(getattr(value, field.name)) for field in fields)
    return kind, value
