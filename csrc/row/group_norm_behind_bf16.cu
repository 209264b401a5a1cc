#include "row/row_norm.cuh"

cudaError_t normswap::group_norm_behind_bf16(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<GroupNormBehindPolicy, BFloat16>(n, plan, stream);
}
