// The hand-written families, bottom to top.
#pragma once

#include "core/implementation.h"

namespace tcgemm {

const Implementation* simt_naive();
const Implementation* simt_tiled();
const Implementation* wmma_naive();
const Implementation* wmma_tiled();
const Implementation* mma_sync();
const Implementation* wgmma();

}  // namespace tcgemm
