#include "group_backward/group_backward_columns_held.cuh"

cudaError_t normswap::group_columns_f32(const GroupBackward& n, const GroupColumnsPlan& plan, bool overlap,
                                         cudaStream_t stream) {
  return group_columns_of<float, float>(n, plan, overlap, stream);
}
