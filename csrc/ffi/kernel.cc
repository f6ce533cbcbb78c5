#include "ffi/kernel.h"

#include <array>
#include <cstring>

namespace tcgemm {
namespace {

// As of zlib and PNG.
uint32_t crc32(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> all{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t x = i;
      for (int bit = 0; bit < 8; ++bit) x = x & 1 ? 0xEDB88320u ^ (x >> 1) : x >> 1;
      all[i] = x;
    }
    return all;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (unsigned char byte : bytes) crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

}  // namespace

std::optional<std::string> decode_base64(std::string_view text) {
  static const std::array<int8_t, 256> values = [] {
    constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::array<int8_t, 256> all;
    all.fill(-1);
    for (size_t i = 0; i < kDigits.size(); ++i) all[static_cast<unsigned char>(kDigits[i])] = static_cast<int8_t>(i);
    return all;
  }();
  if (text.size() % 4 != 0) return std::nullopt;
  size_t padding = 0;
  while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;
  text.remove_suffix(padding);
  std::string bytes;
  bytes.reserve((text.size() + padding) / 4 * 3);
  uint32_t bits = 0;
  int num_bits = 0;
  for (unsigned char digit : text) {
    if (values[digit] < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(values[digit]);
    num_bits += 6;
    if (num_bits < 8) continue;
    num_bits -= 8;
    bytes.push_back(static_cast<char>(bits >> num_bits & 0xFF));
  }
  return bytes;
}

xla::ffi::Error initialize_kernel(const xla::ffi::Dictionary& attributes, std::string_view headers,
                                  std::optional<Status> (*load_known)(const std::string& name,
                                                                      const std::string& target),
                                  Status (*load)(const std::string& name, const std::string& target,
                                                 const std::string& entry, std::string_view cubin)) {
  CarriedKernel kernel;
  std::string error = read_attributes(attributes, [&](auto&& visit) { visit_fields(kernel, visit); });
  if (!error.empty()) return invalid("kernel: " + error);
  if (kernel.headers != headers) {
    return invalid("the program carries a kernel for another version of this library; lower it again");
  }
  if (kernel.target.empty()) return invalid("kernel: target must name an architecture");
  const std::string name(kernel.name), target(kernel.target);
  if (std::optional<Status> found = load_known(name, target)) return to_ffi_error("kernel", *std::move(found));
  const std::optional<std::string> cubin = decode_base64(kernel.cubin);
  if (!cubin) return invalid("kernel: cubin must be base64");
  // The driver takes what a cubin says of its own sizes for granted.
  if (kernel.checksum != int64_t{crc32(*cubin)} || cubin->compare(0, 4,
                                                                  "\x7f"
                                                                  "ELF") != 0) {
    return invalid("kernel: the cubin is damaged");
  }
  return to_ffi_error("kernel", load(name, target, std::string(kernel.entry), *cubin));
}

}  // namespace tcgemm
