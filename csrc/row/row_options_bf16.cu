#include "row/row_norm.cuh"

cudaError_t normswap::norm_with_options_bf16(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch_with_options<BFloat16>(n, plan, stream, layer_norm_bf16, rms_norm_bf16);
}
