#include "row/row_norm.cuh"

cudaError_t normswap::group_norm_f16(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<GroupNormPolicy, Half>(n, plan, stream);
}
