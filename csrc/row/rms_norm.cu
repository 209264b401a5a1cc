#include "row/row_norm.cuh"

cudaError_t normswap::rms_norm(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<RMSNormPolicy>(n, plan, stream);
}
