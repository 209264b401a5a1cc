#include "row/row_norm.cuh"

cudaError_t normswap::rms_norm_f16(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<RMSNormPolicy, Half>(n, plan, stream);
}
