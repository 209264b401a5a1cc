#include "row_backward/row_backward.cuh"

cudaError_t normswap::layer_norm_backward_bf16(const RowBackward& n, const BackwardPlan& plan, cudaStream_t stream) {
  if (n.dtype == DType::f32) return launch_row_backward<LayerNormBackward, float, BFloat16>(n, plan, stream);
  if (n.grad_dtype == DType::f32) return launch_row_backward<LayerNormBackward, BFloat16, float>(n, plan, stream);
  return launch_row_backward<LayerNormBackward, BFloat16>(n, plan, stream);
}
