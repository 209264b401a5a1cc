#include "row/row_norm.cuh"

cudaError_t normswap::norm_with_options_f16(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  return launch_with_options<Half>(n, plan, stream, layer_norm_f16, rms_norm_f16);
}
