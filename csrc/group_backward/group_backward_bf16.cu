#include "group_backward/group_backward_lines.cuh"

cudaError_t normswap::group_backward_bf16(const GroupBackward& n, const GroupBackwardPlan& plan, bool overlap,
                                          cudaStream_t stream) {
  if (n.grad_dtype == DType::f32) return group_backward_of<BFloat16, float>(n, plan, overlap, stream);
  return group_backward_of<BFloat16, BFloat16>(n, plan, overlap, stream);
}
