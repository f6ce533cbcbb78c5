"""Description of a sum over devices, the mirror of csrc/core/all_reduce_problem.h.

D = A of device 0 + A of device 1 + ...
"""

import dataclasses
from typing import ClassVar

from jax_tcgemm.problem.dtypes import DTYPES


@dataclasses.dataclass(frozen=True)
class AllReduceProblem:
    """Sum of one array of each of several devices.

    Attributes:
      elements: number of elements of A.
      devices: number of devices.
      in_dtype: dtype of A and D.
    """

    elements: int
    devices: int
    in_dtype: str

    kind: ClassVar[str] = "all_reduce"
    compute: ClassVar[str] = "f32"

    def attributes(self) -> dict:
        """Return the problem's fields of the FFI attribute `all_reduce`."""
        return {"elements": self.elements, "devices": self.devices}

    def query(self) -> dict:
        """Return the problem as the module's all_reduce.reject() takes it."""
        return dataclasses.asdict(self)

    @property
    def flops(self) -> int:
        """Number of additions on each device."""
        return (self.devices - 1) * self.elements

    @property
    def array_bytes(self) -> int:
        """Size of A in bytes."""
        return self.elements * DTYPES[self.in_dtype].itemsize

    @property
    def bytes(self) -> int:
        """Memory traffic of each device in bytes: A and D, and A of every other device."""
        return (self.devices + 1) * self.array_bytes

    def __str__(self) -> str:
        return f"sum of {self.elements} elements over {self.devices} devices, {self.in_dtype}"
