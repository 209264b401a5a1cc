#include "batch_norm/batch_norm_backward.cuh"
#include "batch_norm/batch_norm_forward.cuh"

cudaError_t normswap::batch_norm_train_forward(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap,
                                               cudaStream_t stream) {
  if (plan.held > 0) return batch_norm_held_forward(n, plan, stream);
  switch (n.dtype) {
    case DType::f32: return batch_norm_forward_of<float>(n, plan, overlap, stream);
    case DType::f16: return batch_norm_forward_of<Half>(n, plan, overlap, stream);
    default: return batch_norm_forward_of<BFloat16>(n, plan, overlap, stream);
  }
}

cudaError_t normswap::batch_norm_train_backward(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap,
                                                cudaStream_t stream) {
  if (plan.held > 0) return batch_norm_held_backward(n, plan, stream);
  switch (n.dtype) {
    case DType::f32: return batch_norm_backward_of<float>(n, plan, overlap, stream);
    case DType::f16: return batch_norm_backward_of<Half>(n, plan, overlap, stream);
    default: return batch_norm_backward_of<BFloat16>(n, plan, overlap, stream);
  }
}
