// The boundary of the backward of group_norm between device code and the torch side; kernels.h has the forward's.
#pragma once

#include "abi/kernels.h"
#include "plan/group_backward_plan.h"

namespace normswap {

// The backward of group_norm, of contiguous tensors or (batch, spatial, channels) memory (channels last); all start at
// multiples of 16 bytes. dy, residual and dresidual have one dtype, x's or float32. What is null is not wanted.
struct GroupBackward {
  const void* x;
  const void* dy;
  const void* residual;  // what was added behind the norm, needed where an activation follows; before a ReLU y is
  void* dx;
  void* dresidual;
  ChannelVector weight, bias, dweight, dbias;
  const float* mean;  // (batch, num_groups)
  const float* rstd;
  void* workspace;
  GroupSizes sizes;
  ActivationArgs activation;
  DType dtype, grad_dtype;
};

// Contiguous tensors whose dtype is float32, float16, bfloat16.
cudaError_t group_backward_f32(const GroupBackward&, const GroupBackwardPlan&, bool overlap, cudaStream_t);
cudaError_t group_backward_f16(const GroupBackward&, const GroupBackwardPlan&, bool overlap, cudaStream_t);
cudaError_t group_backward_bf16(const GroupBackward&, const GroupBackwardPlan&, bool overlap, cudaStream_t);
cudaError_t group_columns_f32(const GroupBackward&, const GroupColumnsPlan&, bool overlap, cudaStream_t);
cudaError_t group_columns_f16(const GroupBackward&, const GroupColumnsPlan&, bool overlap, cudaStream_t);
cudaError_t group_columns_bf16(const GroupBackward&, const GroupColumnsPlan&, bool overlap, cudaStream_t);

}  // namespace normswap
