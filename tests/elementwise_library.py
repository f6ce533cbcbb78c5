"""Generated elementwise functions compiled for the CPU by g++, and run on whole arrays."""

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from emulated import cuda_include

from jax_tcgemm.epilogues import HEADER, EpilogueSource, Read
from jax_tcgemm.epilogues.code.expressions import STORED, computed, is_narrow

REPOSITORY = Path(__file__).resolve().parents[1]

_PROLOGUE = f"""
#include "{HEADER}"

#if defined(__x86_64__)
extern "C" void flush_subnormals(int on) {{
  const unsigned state = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(on ? state | 0x8040 : state & ~0x8040);
}}
#else
extern "C" void flush_subnormals(int) {{}}
#endif

namespace {{

struct Index {{
  int32_t indices[8];
  int32_t operator[](int dim) const {{ return indices[dim]; }}
}};

template <typename T>
T& element(void* array, int64_t place) {{
  return static_cast<T*>(array)[place];
}}

// strides: of the first element, and along each dimension.
template <typename T>
T read(void* array, const int64_t* strides, int rank, const Index& at) {{
  int64_t place = strides[0];
  for (int dim = 0; dim < rank; ++dim) place += strides[1 + dim] * at[dim];
  return element<T>(array, place);
}}

// Calls apply(at, place) for each element of a packed array.
template <typename Apply>
void for_each(int rank, const int64_t* shape, const Apply& apply) {{
  int64_t size = 1;
  for (int dim = 0; dim < rank; ++dim) size *= shape[dim];
  Index at{{}};
  for (int64_t place = 0; place < size; ++place) {{
    apply(at, place);
    for (int dim = rank - 1; dim >= 0 && ++at.indices[dim] == shape[dim]; --dim) {{
      at.indices[dim] = 0;
    }}
  }}
}}

}}  // namespace
"""


def _function(number: int, source: EpilogueSource) -> str:
    arguments = [
        f"element<const {computed(dtype)}>(accumulators[{i}], place)"
        for i, dtype in enumerate(source.accumulators)
    ]
    arguments += [
        f"read<{STORED[x.dtype]}>(reads[{i}], strides + {i} * (rank + 1), rank, at)"
        for i, x in enumerate(source.reads)
    ]
    arguments += ["at"]
    arguments += [f"y{i}" for i in range(len(source.results))]
    declared, stored = "", ""
    for i, x in enumerate(source.results):
        declared += f"    {computed(x.dtype)} y{i};\n"
        stored += (
            f"    element<Bits<{STORED[x.dtype]}>>(results[{i}], place) = "
            f"stored_bits<{STORED[x.dtype]}>(y{i});\n"
        )
    return f"""
namespace tcgemm::elementwise::number_{number} {{
{source.struct}
extern "C" void run_{number}(int rank, const int64_t* shape, void* const* accumulators,
    void* const* reads, const int64_t* strides, void* const* results) {{
  for_each(rank, shape, [&](const Index& at, int64_t place) {{
{declared}    Epilogue::apply({", ".join(arguments)});
{stored}  }});
}}
}}
"""


def program(sources: Sequence[EpilogueSource]) -> str:
    """All of it as C++."""
    return _PROLOGUE + "".join(_function(i, source) for i, source in enumerate(sources))


class Library:
    """Functions compiled together; distinct ones once.

    Args:
      directory: where to build.
      sources: the functions.
      change: what to replace in the program, and by what.
    """

    def __init__(self, directory: Path, sources: Sequence[EpilogueSource], change=("", "")):
        self._numbers = {source: i for i, source in enumerate(dict.fromkeys(sources))}
        text = program(list(self._numbers))
        assert change[0] in text
        text = text.replace(*change) if change[0] else text
        name = "elementwise_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        path = directory / f"{name}.cc"
        path.write_text(text)
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
        command += [f"-I{REPOSITORY}/tests/emulator", f"-I{REPOSITORY}/csrc"]
        command += ["-isystem", str(cuda_include()), "-include", "device_math.h"]
        command += [str(path), "-o", str(path.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[:8000])
        self._library = ctypes.CDLL(str(path.with_suffix(".so")))

    def run(
        self,
        source: EpilogueSource,
        accumulators: Sequence[np.ndarray],
        operands: Sequence[np.ndarray],
        *,
        flush: bool = False,
        reads: Sequence[Read] | None = None,
    ) -> list[np.ndarray]:
        """What the function gives for each element, before reductions.

        `flush`: subnormal numbers are 0, as in XLA's programs for the CPU. `reads`: other ones than
        the source's.
        """
        shape, rank = accumulators[0].shape, accumulators[0].ndim
        # Registers hold 16-bit numbers as floats.
        accumulators = [
            np.asarray(x, np.float32 if is_narrow(x.dtype) else x.dtype, order="C")
            for x in accumulators
        ]
        operands = [np.asarray(_as_numpy(x), order="C") for x in operands]
        results = [np.empty(shape, x.dtype) for x in source.results]
        reads = source.reads if reads is None else reads
        read_from, strides = [operands[read.operand] for read in reads], []
        for read, operand in zip(reads, read_from, strict=True):
            assert operand.dtype == read.dtype
            first, along = read.strides(operand.shape, rank)
            strides += [first, *along]
        run = getattr(self._library, f"run_{self._numbers[source]}")
        self._library.flush_subnormals(int(flush))
        try:
            run(
                rank,
                (ctypes.c_int64 * rank)(*shape),
                *map(_addresses, (accumulators, read_from)),
                (ctypes.c_int64 * len(strides))(*strides),
                _addresses(results),
            )
        finally:
            self._library.flush_subnormals(0)
        return results


def _as_numpy(operand) -> np.ndarray:
    if jax.numpy.issubdtype(operand.dtype, jax.dtypes.prng_key):
        operand = jax.random.key_data(operand)
    return np.asarray(operand)


def _addresses(arrays):
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
