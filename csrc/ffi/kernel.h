// The body of the XLA FFI handler "tcgemm_kernel": a kernel that a program carries, compiled when it was lowered.
//
//   operands  none
//   results   kernel: pred, one element that nobody reads. A call that runs the kernel has it after its operands, so
//             that the program keeps one as long as it has the other.
//   attribute kernel  the dictionary with the fields of CarriedKernel and the ABI number
//
// Before the first execution the kernel is loaded; the execution itself does nothing. Since XLA calls before every
// execution, of a kernel that is known nothing is decoded: that took 2.5 ms for those of a loss, each time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/implementation.h"
#include "ffi/attributes.h"
#include "ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

struct CarriedKernel {
  std::string_view headers;  // a hash of those it was compiled from, which must be this library's
  std::string_view name;     // the C++ expression that instantiates it
  std::string_view target;   // the architecture that it was compiled for
  std::string_view entry;    // its name in the cubin
  std::string_view cubin;    // in base64
  int64_t checksum = 0;      // of the cubin: its CRC-32
};

template <typename Visitor>
void visit_fields(CarriedKernel& x, Visitor&& visit) {
  visit("headers", x.headers);
  visit("name", x.name);
  visit("target", x.target);
  visit("entry", x.entry);
  visit("cubin", x.cubin);
  visit("checksum", x.checksum);
}

// Nothing for what is no base64 with its padding.
std::optional<std::string> decode_base64(std::string_view text);

// `load_known(name, target)` gives nothing unless the kernel is known, `load(name, target, entry, cubin)` makes it so.
// `headers` are this library's.
xla::ffi::Error initialize_kernel(const xla::ffi::Dictionary& attributes, std::string_view headers,
                                  std::optional<Status> (*load_known)(const std::string& name,
                                                                      const std::string& target),
                                  Status (*load)(const std::string& name, const std::string& target,
                                                 const std::string& entry, std::string_view cubin));

}  // namespace tcgemm
