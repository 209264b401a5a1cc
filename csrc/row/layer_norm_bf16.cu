#include "row/row_norm.cuh"

cudaError_t normswap::layer_norm_bf16(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch<LayerNormPolicy, BFloat16>(n, plan, stream);
}
