#include "row/row_norm.cuh"

cudaError_t normswap::norm_with_options(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<OptionsPolicy>(n, plan, stream);
}
