#include "batch_norm/batch_norm_backward.cuh"
#include "batch_norm/batch_norm_forward.cuh"

cudaError_t normswap::batch_norm_forward_f16(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap,
                                            cudaStream_t stream) {
  return batch_norm_forward_of<Half>(n, plan, overlap, stream);
}

cudaError_t normswap::batch_norm_backward_f16(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap,
                                             cudaStream_t stream) {
  return batch_norm_backward_of<Half>(n, plan, overlap, stream);
}
