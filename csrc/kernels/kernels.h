// The hand-written families, bottom to top.
#pragma once

#include "core/all_reduce_problem.h"
#include "core/implementation.h"
#include "core/packed_problem.h"
#include "core/quantize_problem.h"
#include "core/ragged_problem.h"
#include "core/rows_problem.h"
#include "core/split_problem.h"

namespace tcgemm {

const Implementation* simt_naive();
const Implementation* simt_tiled();
const Implementation* simt_batched();
const Implementation* wmma_naive();
const Implementation* wmma_tiled();
const Implementation* mma_sync();
const Implementation* wgmma();

// Their grouped products.
const RaggedImplementation* mma_sync_ragged();
const RaggedImplementation* wgmma_ragged();

// Sums and products of rows.
const RowsImplementation* simt_rows();

// Products with weights of few bits.
const PackedImplementation* packed_products();

// Arrays of 8 bits and their scales.
const QuantizeImplementation* quantizer();

// Operands in parts.
const SplitImplementation* splitter();

// Sums over devices.
const AllReduceImplementation* peer_memory_all_reduce();

}  // namespace tcgemm
