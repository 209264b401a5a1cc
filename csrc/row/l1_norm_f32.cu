#include "row/row_norm.cuh"

cudaError_t normswap::l1_norm_f32(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<L1NormPolicy, float>(n, plan, stream);
}
