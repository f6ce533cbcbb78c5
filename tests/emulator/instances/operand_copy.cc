// All kernels that copy operands.
#include "instances/named.h"
#include "kernels/common/operand_copy_kernel.cuh"

static const bool added[] = {
    EMULATED_KERNEL(tcgemm::operand_copy::copy_operands<uint8_t>),
    EMULATED_KERNEL(tcgemm::operand_copy::copy_operands<uint16_t>),
    EMULATED_KERNEL(tcgemm::operand_copy::copy_operands<uint32_t>),
};
