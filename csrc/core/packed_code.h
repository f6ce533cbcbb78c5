// The meaning of the bits of a packed weight, for the host and for kernels, which are compiled for one of these.
#pragma once

namespace tcgemm {

enum class PackedCode : int {
  kInteger,  // u - zero
  kTable,    // table[u]
  kE2M1,     // a float4_e2m1fn
  kE4M3,     // a float8_e4m3fn
  kE5M2      // a float8_e5m2
};

}  // namespace tcgemm
