// Several folds in one launch.
#pragma once

#include "abi/kernels.h"

namespace normswap {

constexpr int kMaxFolds = 4;

// One to kMaxFolds of them, all of one dtype: each as fold_linear gives it.
cudaError_t fold_linears(const FoldLinear* folds, int count, cudaStream_t stream);

}  // namespace normswap
