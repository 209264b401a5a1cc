// layer_norm of x as DimNorm's into y (outer, inner, n).
#pragma once

#include "abi/kernels.h"

namespace normswap {

// Bytes of shared memory of a block; 0 for what cannot be done.
int64_t layer_norm_permuted_bytes(const DimNorm&);

cudaError_t layer_norm_permuted(const DimNorm&, cudaStream_t);

}  // namespace normswap
