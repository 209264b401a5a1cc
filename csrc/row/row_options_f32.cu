#include "row/row_norm.cuh"

cudaError_t normswap::norm_with_options_f32(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch_with_options<float>(n, plan, stream, layer_norm_f32, rms_norm_f32);
}
