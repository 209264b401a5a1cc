#include "row_norm.cuh"

cudaError_t normswap::group_norm(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<GroupNormPolicy>(n, plan, stream);
}
