#include "tensor_map.h"

#include <algorithm>
#include <cstring>

#include "instructions.h"

namespace emulator {
namespace {

// What lies in a CUtensorMap.
struct Map {
  static constexpr uint64_t kMark = 0x74656e736f72206d;
  uint64_t mark;
  uint8_t* address;
  uint64_t extents[5], strides[4];
  uint16_t box[5];
  uint8_t rank, element_bytes;
  bool rounds_to_tf32;
  uint8_t swizzle_bytes;  // 16: none

  uint32_t box_bytes() const {
    uint32_t bytes = element_bytes;
    for (int i = 0; i < rank; ++i) bytes *= box[i];
    return bytes;
  }
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap), "a map must fit in the driver's");

int element_bytes(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: return 4;
    default: return 0;
  }
}

Map read_map(const CUtensorMap* map) {
  check_address(map);
  Map copy;
  std::memcpy(&copy, map, sizeof(copy));
  if (copy.mark != Map::kMark) fail("uses a tensor map that was never encoded");
  return copy;
}

// Calls visit(byte offset of the element run in the box, its address, valid elements of the run) for runs of
// 16 bytes; the address is null where the run lies outside.
template <typename Visit>
void visit_box(const Map& map, const std::vector<int32_t>& coordinates, const Visit& visit) {
  const int per_run = 16 / map.element_bytes, runs = map.box[0] / per_run;
  uint32_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
  for (uint32_t row = 0; row < rows; ++row) {
    uint32_t rest = row;
    bool inside = true;
    uint8_t* address = map.address;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t coordinate = int64_t{coordinates[i]} + rest % map.box[i];
      rest /= map.box[i];
      inside &= coordinate >= 0 && coordinate < static_cast<int64_t>(map.extents[i]);
      address += coordinate * static_cast<int64_t>(map.strides[i - 1]);
    }
    for (int run = 0; run < runs; ++run) {
      const int64_t first = int64_t{coordinates[0]} + run * per_run;
      int64_t skipped = std::clamp<int64_t>(-first, 0, per_run);
      int64_t end = std::clamp<int64_t>(static_cast<int64_t>(map.extents[0]) - first, 0, per_run);
      if (!inside) skipped = end = 0;
      visit((row * runs + run) * 16u, address + first * map.element_bytes, static_cast<int>(skipped),
            static_cast<int>(std::max(skipped, end)));
    }
  }
}

uint32_t swizzle(const Map& map, uint32_t offset) {
  return offset ^ ((offset >> 7 & (map.swizzle_bytes / 16 - 1)) << 4);
}

uint32_t box_place(const Map& map, uint32_t address) {
  const uint32_t offset = resolve(address, map.box_bytes(), 128).offset;
  const Thread& thread = current();
  if (Machine::get().launch.starts_early && !thread.waited_for_previous) {
    fail("copies by TMA before griddepcontrol.wait");
  }
  return offset;
}

}  // namespace

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  Map encoded{};
  encoded.mark = Map::kMark;
  encoded.address = static_cast<uint8_t*>(address);
  encoded.rank = static_cast<uint8_t>(rank);
  encoded.element_bytes = static_cast<uint8_t>(element_bytes(type));
  encoded.rounds_to_tf32 = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  encoded.swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                          : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                          : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                                 : 16;
  const uint64_t row_bytes = box[0] * static_cast<uint64_t>(encoded.element_bytes);
  bool is_valid = rank >= 1 && rank <= 5 && encoded.element_bytes > 0 && address != nullptr &&
                  reinterpret_cast<uintptr_t>(address) % 16 == 0 && reinterpret_cast<uintptr_t>(map) % 64 == 0 &&
                  row_bytes % 16 == 0 && (encoded.swizzle_bytes == 16 || row_bytes <= encoded.swizzle_bytes) &&
                  interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  for (cuuint32_t i = 0; i < rank && is_valid; ++i) {
    encoded.extents[i] = extents[i];
    encoded.box[i] = static_cast<uint16_t>(box[i]);
    is_valid &= extents[i] >= 1 && extents[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256;
    is_valid &= element_strides[i] == 1;
    if (i == 0) continue;
    encoded.strides[i - 1] = strides[i - 1];
    is_valid &= strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t{1} << 40;
  }
  if (!is_valid) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &encoded, sizeof(encoded));
  return CUDA_SUCCESS;
}

void check_address(const CUtensorMap* map) {
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) fail("a tensor map is not aligned to 64 bytes");
}

void tma_load(uint32_t destination, const CUtensorMap* tensor_map, uint32_t barrier, uint32_t cta_mask,
              const std::vector<int32_t>& coordinates) {
  const Map map = read_map(tensor_map);
  if (coordinates.size() != map.rank) fail("a TMA load has another rank than its tensor map");
  const uint32_t offset = box_place(map, destination), barrier_offset = resolve(barrier, 8, 8).offset;
  for (uint32_t rank = 0; cta_mask >> rank != 0; ++rank) {
    if ((cta_mask >> rank & 1) == 0) continue;
    Block* block = resolve(map_to_block(offset, rank), 16, 16).block;
    ++block->loads_under_way;
    Machine::get().issue_alone([=] {
      visit_box(map, coordinates, [&](uint32_t position, const uint8_t* source, int skipped, int end) {
        uint32_t words[4] = {};
        const int bytes = map.element_bytes;
        std::memcpy(reinterpret_cast<uint8_t*>(words) + skipped * bytes, source + skipped * bytes,
                    static_cast<size_t>(end - skipped) * bytes);
        if (map.rounds_to_tf32) {
          for (uint32_t& word : words) word = round_to_tf32(word);
        }
        const uint32_t target = swizzle(map, offset + position);
        std::memcpy(block->memory + target, words, 16);
        block->unfenced_writers[target / kFencedUnit] = 0;
      });
      --block->loads_under_way;
      mbarrier_complete(*block, barrier_offset, map.box_bytes());
    });
  }
  Machine::get().may_switch();
}

void tma_store(const CUtensorMap* tensor_map, uint32_t source, const std::vector<int32_t>& coordinates) {
  const Map map = read_map(tensor_map);
  if (coordinates.size() != map.rank) fail("a TMA store has another rank than its tensor map");
  const uint32_t offset = box_place(map, source);
  Thread& thread = current();
  if (!thread.barrier_was_fenced && !thread.has_fenced_async) {
    fail("stores by TMA what threads wrote without fence.proxy.async before their last barrier");
  }
  thread.bulk_stores.queue.issue([=, block = thread.block] {
    visit_box(map, coordinates, [&](uint32_t position, uint8_t* target, int skipped, int end) {
      const int bytes = map.element_bytes;
      std::memcpy(target + skipped * bytes, block->memory + swizzle(map, offset + position) + skipped * bytes,
                  static_cast<size_t>(end - skipped) * bytes);
    });
  });
}

}  // namespace emulator
