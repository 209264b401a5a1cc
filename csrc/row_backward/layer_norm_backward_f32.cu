#include "row_backward/row_backward.cuh"

cudaError_t normswap::layer_norm_backward_f32(const RowBackward& n, const BackwardPlan& plan, cudaStream_t stream) {
  return launch_row_backward<LayerNormBackward, float>(n, plan, stream);
}
