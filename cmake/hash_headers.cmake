# cmake -DOUT=... -DHEADERS=a|b|... -P hash_headers.cmake: writes a C++ header with the hash of other headers.
string(REPLACE "|" ";" HEADERS "${HEADERS}")
set(hashes "")
foreach(header ${HEADERS})
  file(SHA256 ${header} hash)
  string(APPEND hashes "${hash}\n")
endforeach()
string(SHA256 hash "${hashes}")
file(WRITE ${OUT} "// Written by CMake.
#pragma once

namespace tcgemm {

// A hash of the device headers that this library ships, from which programs have kernels compiled.
inline constexpr char kDeviceHeadersHash[] = \"${hash}\";

}  // namespace tcgemm
")
