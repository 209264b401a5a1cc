#include "row/row_norm.cuh"

cudaError_t normswap::rms_norm_f32(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<RMSNormPolicy, float>(n, plan, stream);
}
