#include "batch_norm/batch_norm_backward.cuh"
#include "batch_norm/batch_norm_forward.cuh"

cudaError_t normswap::batch_norm_forward_bf16(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap,
                                            cudaStream_t stream) {
  return batch_norm_forward_of<BFloat16>(n, plan, overlap, stream);
}

cudaError_t normswap::batch_norm_backward_bf16(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap,
                                             cudaStream_t stream) {
  return batch_norm_backward_of<BFloat16>(n, plan, overlap, stream);
}
