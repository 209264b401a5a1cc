#include "group_backward/group_backward_columns_held.cuh"

cudaError_t normswap::group_columns_bf16(const GroupBackward& n, const GroupColumnsPlan& plan, bool overlap,
                                          cudaStream_t stream) {
  if (n.grad_dtype == DType::f32) return group_columns_of<BFloat16, float>(n, plan, overlap, stream);
  return group_columns_of<BFloat16, BFloat16>(n, plan, overlap, stream);
}
