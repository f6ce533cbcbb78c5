#include "kernels/wmma/fragment_probe.h"

#include <array>
#include <string>

#include "kernels/common/launch_blocks.h"

namespace tcgemm::wmma {
namespace {

struct FragmentShape {
  std::string_view name;
  int m, n, k;
};
constexpr std::array kShapes{FragmentShape{"m16n16k16", 16, 16, 16}, FragmentShape{"m32n8k16", 32, 8, 16},
                             FragmentShape{"m8n32k16", 8, 32, 16}, FragmentShape{"m16n16k8", 16, 16, 8},
                             FragmentShape{"m8n8k4", 8, 8, 4}};

// The type of a matrix's elements, that of its fragment, and how many of these a lane has.
struct Fragment {
  const char *type = nullptr, *element = nullptr;
  int elements = 0;
};

Fragment accumulator_of(std::string_view shape, std::string_view dtype) {
  if (shape == "m8n8k4") return dtype == "f64" ? Fragment{"double", "double", 2} : Fragment{};
  if (dtype == "f32") return {"float", "float", 8};
  if (shape == "m16n16k8") return {};
  if (dtype == "f16") return {"__half", "__half", 8};
  return dtype == "s32" ? Fragment{"int", "int", 8} : Fragment{};
}

Fragment operand_of(std::string_view shape, std::string_view dtype, bool is_a) {
  if (shape == "m8n8k4") return dtype == "f64" ? Fragment{"double", "double", 1} : Fragment{};
  if (shape == "m16n16k8") return dtype == "tf32" ? Fragment{"float", "nvcuda::wmma::precision::tf32", 4} : Fragment{};
  const bool is_square = shape == "m16n16k16", is_longer = is_a == (shape == "m32n8k16");
  if (dtype == "f16") return {"__half", "__half", 16};
  // Of these no element is repeated.
  const int elements = is_square ? 8 : is_longer ? 16 : 4;
  if (dtype == "bf16") return {"__nv_bfloat16", "__nv_bfloat16", elements};
  if (dtype == "s8") return {"int8_t", "int8_t", elements};
  return dtype == "u8" ? Fragment{"uint8_t", "uint8_t", elements} : Fragment{};
}

// The number of elements of a lane; 0 where there is no such fragment.
int find_probe(std::string_view shape_name, std::string_view dtype, std::string_view operand, KernelSource* source) {
  for (const FragmentShape& shape : kShapes) {
    if (shape.name != shape_name) continue;
    const bool is_c = operand == "c";
    const Fragment x = is_c ? accumulator_of(shape_name, dtype) : operand_of(shape_name, dtype, operand == "a");
    if (x.elements == 0) return 0;
    std::string name = is_c ? "tcgemm::wmma::probe_accumulator<" : "tcgemm::wmma::probe_operand<";
    for (const int extent : {shape.m, shape.n, shape.k}) name += std::to_string(extent) + ", ";
    name += x.element;
    if (!is_c) name += std::string(", ") + x.type + (operand == "a" ? ", true" : ", false");
    *source = {"kernels/wmma/fragment_probe_kernel.cuh", name + ", " + std::to_string(x.elements) + ">", {}};
    return x.elements;
  }
  return 0;
}

struct Instruction {
  std::string_view shape, dtype, accumulator;
  const char *mma, *type;
  int per_register;
};
constexpr std::array kInstructions{Instruction{"m16n8k16", "f16", "f16", "kF16F16", "__half", 2},
                                   Instruction{"m16n8k16", "f16", "f32", "kF16", "__half", 2},
                                   Instruction{"m16n8k16", "bf16", "f32", "kBF16", "__nv_bfloat16", 2},
                                   Instruction{"m16n8k8", "tf32", "f32", "kTF32", "float", 1},
                                   Instruction{"m16n8k32", "s8", "s32", "kS8", "int8_t", 4},
                                   Instruction{"m16n8k32", "u8", "s32", "kU8", "uint8_t", 4}};

const Instruction* find_instruction(std::string_view shape, std::string_view dtype, std::string_view accumulator) {
  for (const Instruction& x : kInstructions) {
    if (x.shape == shape && x.dtype == dtype && x.accumulator == accumulator) return &x;
  }
  return nullptr;
}

KernelSource mma_source(const Instruction& x) {
  return {"kernels/wmma/fragment_probe_kernel.cuh",
          std::string("tcgemm::wmma::fragment_mma<tcgemm::wmma::Mma::") + x.mma + ", " + x.type + ">",
          {}};
}

}  // namespace

std::vector<KernelSource> fragment_kernels(std::string_view shape, std::string_view dtype, std::string_view operand,
                                           const Device& device) {
  KernelSource source;
  if (const Instruction* x = find_instruction(shape, dtype, operand)) {
    source = mma_source(*x);
  } else if (find_probe(shape, dtype, operand, &source) == 0) {
    return {};
  }
  return {KernelReference(source).source_for(device)};
}

Status launch_fragment_probe(std::string_view shape, std::string_view dtype, std::string_view operand,
                             bool column_major, int32_t* out, int64_t out_elements, const Device& device,
                             void* stream) {
  if (operand != "a" && operand != "b" && operand != "c") return Status::invalid("operand must be a, b or c");
  KernelSource source;
  const int elements = find_probe(shape, dtype, operand, &source);
  if (elements == 0) return Status::invalid("shape is not one of WMMA's, or has no such dtype");
  if (out_elements != 32 * elements) {
    return Status::invalid("out must hold 32 x " + std::to_string(elements) + " elements");
  }
  Kernel* kernel = nullptr;
  if (Status s = KernelReference(source).find(device, &kernel); !s.is_ok()) return s;
  return launch_blocks("fragment_probe", *kernel, 1, 32, 0, static_cast<cudaStream_t>(stream), column_major, out);
}

Status launch_fragment_mma(std::string_view shape, std::string_view dtype, std::string_view accumulator,
                           const FragmentBuffers& buffers, const Device& device, void* stream) {
  const bool is_integer = dtype == "s8" || dtype == "u8";
  if (accumulator != (is_integer ? "s32" : "f32") && !(dtype == "f16" && accumulator == "f16")) {
    return Status::invalid("accumulator must be f32, or f16 of f16, or s32 of integers");
  }
  const Instruction* x = find_instruction(shape, dtype, accumulator);
  if (x == nullptr) return Status::invalid("shape is not one of mma.sync's, or has no such dtype");
  if (buffers.a_elements != 32 * 4 * x->per_register || buffers.b_elements != 32 * 2 * x->per_register ||
      buffers.d_elements != 32 * 4) {
    return Status::invalid("a, b and d must hold 32 fragments each");
  }
  Kernel* kernel = nullptr;
  if (Status s = KernelReference(mma_source(*x)).find(device, &kernel); !s.is_ok()) return s;
  return launch_blocks("fragment_mma", *kernel, 1, 32, 0, static_cast<cudaStream_t>(stream), buffers.a, buffers.b,
                       buffers.d);
}

}  // namespace tcgemm::wmma
