#include "row/row_norm.cuh"

cudaError_t normswap::layer_norm_f32(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<LayerNormPolicy, float>(n, plan, stream);
}
