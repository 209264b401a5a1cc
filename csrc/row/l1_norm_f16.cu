#include "row/row_norm.cuh"

cudaError_t normswap::l1_norm_f16(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<L1NormPolicy, Half>(n, plan, stream);
}
