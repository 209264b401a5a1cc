#include "row/row_norm.cuh"

cudaError_t normswap::group_norm_behind_f32(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<GroupNormBehindPolicy, float>(n, plan, stream);
}
