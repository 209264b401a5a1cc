#include "row_norm.cuh"

cudaError_t normswap::rms_norm(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  if (n.cast_before_weight) return launch<RMSNormPolicy<true>, RMSNormPolicy<false>>(n, plan, stream);
  return launch<RMSNormPolicy<false>>(n, plan, stream);
}
