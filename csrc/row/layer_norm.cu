#include "row/row_norm.cuh"

cudaError_t normswap::layer_norm(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<LayerNormPolicy>(n, plan, stream);
}
