// BatchNorm by the statistics of the batch, or frozen ones, with what stands behind it, forward and backward: for the
// kernels and their launcher.
#pragma once

#include "abi/kernels.h"
#include "plan/batch_norm_plan.h"

namespace normswap {

// What the elements of a channel have in common: y = activation((x - mean) gain + bias + residual), gain = weight rstd; the
// norm and the sum are rounded to x's dtype. With a scale, rstd is that of the scaled channel times the scale; when frozen
// too, mean is 0 and bias has what it would have taken away.
struct alignas(16) ChannelCoefficients {
  float mean, gain, bias, rstd;
};

// Tensors of one dense layout and dtype; all start at multiples of 16 bytes. What is null is not wanted, or not there.
struct BatchNormTrain {
  const void* x;
  const void* residual;
  void* y;
  unsigned char* signs;  // a byte a vector: bit j is whether the activation, a ReLU, let its element j through
  ChannelVector weight, bias;
  ChannelVector running_mean, running_var;  // read when frozen; else updated
  // Optional: the norm is that of (x + input_bias) scale; a bias not when frozen. A scale of one value if `one_scale`.
  ChannelVector scale, input_bias;
  bool one_scale;
  int64_t* batches;                         // num_batches_tracked, to be counted up
  ChannelCoefficients* coefficients;        // (channels): written by the forward, read by the backward
  // backward
  const void* dy;
  void* dx;
  void* dresidual;
  ChannelVector dweight, dbias, dscale, dinput_bias;

  float* workspace;  // batch_norm_workspace
  BatchNormSizes sizes;
  double eps, momentum;
  ActivationArgs activation;
  bool frozen;  // by running statistics, on which no gradient depends
  DType dtype;
};

cudaError_t batch_norm_train_forward(const BatchNormTrain&, const BatchNormPlan&, bool overlap, cudaStream_t);
cudaError_t batch_norm_train_backward(const BatchNormTrain&, const BatchNormPlan&, bool overlap, cudaStream_t);

// The same of plans whose strips are held.
cudaError_t batch_norm_held_forward(const BatchNormTrain&, const BatchNormPlan&, cudaStream_t);
cudaError_t batch_norm_held_backward(const BatchNormTrain&, const BatchNormPlan&, cudaStream_t);

// Between the passes over the tensor: a channel's coefficients from its pieces' moments, or from the running statistics;
// the gradients of weight and bias from its pieces' sums. `overlap` with the kernel before.
cudaError_t finish_batch_norm(const BatchNormTrain&, const BatchNormPlan&, bool overlap, cudaStream_t);
cudaError_t finish_batch_norm_backward(const BatchNormTrain&, const BatchNormPlan&, bool overlap, cudaStream_t);

}  // namespace normswap
