#include "group_backward/group_backward_lines.cuh"

cudaError_t normswap::group_backward_f32(const GroupBackward& n, const GroupBackwardPlan& plan, bool overlap,
                                         cudaStream_t stream) {
  return group_backward_of<float, float>(n, plan, overlap, stream);
}
