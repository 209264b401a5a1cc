#include "row_backward/row_backward.cuh"

cudaError_t normswap::layer_norm_backward_f16(const RowBackward& n, const BackwardPlan& plan, cudaStream_t stream) {
  if (n.dtype == DType::f32) return launch_row_backward<LayerNormBackward, float, Half>(n, plan, stream);
  if (n.grad_dtype == DType::f32) return launch_row_backward<LayerNormBackward, Half, float>(n, plan, stream);
  return launch_row_backward<LayerNormBackward, Half>(n, plan, stream);
}
