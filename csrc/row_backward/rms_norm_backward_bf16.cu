#include "row_backward/row_backward.cuh"

cudaError_t normswap::rms_norm_backward_bf16(const RowBackward& n, const BackwardPlan& plan, cudaStream_t stream) {
  if (n.grad_dtype == DType::f32) return launch_row_backward<RMSNormBackward, BFloat16, float>(n, plan, stream);
  return launch_row_backward<RMSNormBackward, BFloat16>(n, plan, stream);
}
