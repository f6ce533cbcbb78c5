"""Kernel instances to compile, and compiled kernels."""

import dataclasses
import functools
import zlib


@dataclasses.dataclass(frozen=True)
class Instance:
    """Kernel and target architecture: all that machine code depends on besides the headers.

    Attributes:
      family: family of the kernel, such as "wgmma", for messages.
      headers: headers below csrc that declare the kernel and the names in `kernel`.
      kernel: the ``__global__`` function, a C++ expression with all template arguments.
      target: the architecture, such as "sm_90a".
      definitions: C++ text after the headers, such as a generated epilogue.

    Examples:
      >>> family = "tcgemm::wgmma_family"
      >>> config = f"{family}::Config<128, 256, 2, 1, 1, false, false>"
      >>> mma = "tcgemm::tile::Mma<__nv_bfloat16, __nv_bfloat16, float>"
      >>> x = "__nv_bfloat16, tcgemm::tile::Major::kK, tcgemm::tile::Source::kShared"
      >>> operands = "tcgemm::tile::Operands<{0}, {0}>".format(f"tcgemm::tile::Operand<{x}>")
      >>> Instance(
      ...     family="wgmma",
      ...     headers=("kernels/wgmma/kernel.cuh",),
      ...     kernel=f"{family}::kernel<{config}, {mma}, {operands}, {family}::Bare>",
      ...     target="sm_90a",
      ... )  # doctest: +SKIP
    """

    family: str
    headers: tuple[str, ...]
    kernel: str
    target: str
    definitions: str = ""

    @property
    def source(self) -> str:
        """Translation unit, in which only `kernel` is instantiated."""
        includes = "".join(f'#include "{header}"\n' for header in self.headers)
        return f"{includes}\n{self.definitions}\n" if self.definitions else includes

    def __str__(self) -> str:
        return f"{self.family} kernel {self.kernel} for {self.target}"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Compiled kernel.

    Attributes:
      name: name of the only function in the cubin.
      cubin: machine code for the instance's target, as the driver loads it.
      faults: performance losses that the compiler reported, see `ptxas.find_faults`.
    """

    name: str
    cubin: bytes = dataclasses.field(repr=False)
    faults: tuple[str, ...] = ()

    @property
    def is_serialized(self) -> bool:
        """Whether each wgmma instruction waits for the one before it."""
        return any("instructions are serialized" in fault for fault in self.faults)

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of the cubin, which programs embed with it."""
        return zlib.crc32(self.cubin)
