// All kernels that add up the partial products of split K.
#include "instances/named.h"
#include "kernels/common/split_reduction_kernel.cuh"

static const bool added[] = {
    EMULATED_KERNEL(tcgemm::split_reduction::reduce<float, tcgemm::split_reduction::Floats, 8, 4>),
    EMULATED_KERNEL(tcgemm::split_reduction::reduce<float, tcgemm::split_reduction::Floats, 1, 8>),
    EMULATED_KERNEL(tcgemm::split_reduction::reduce<float, tcgemm::split_reduction::Floats, 1, 4>),
    EMULATED_KERNEL(tcgemm::split_reduction::reduce<int32_t, tcgemm::split_reduction::Integers, 8, 4>),
    EMULATED_KERNEL(tcgemm::split_reduction::reduce<int32_t, tcgemm::split_reduction::Integers, 1, 8>),
    EMULATED_KERNEL(tcgemm::split_reduction::reduce<int32_t, tcgemm::split_reduction::Integers, 1, 4>),
};
