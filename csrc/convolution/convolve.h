// A 2d convolution whose sums are scaled and shifted, a channel's alike, with a residual and an activation behind it.
#pragma once

#include "abi/kernels.h"
#include "plan/plan.h"

namespace normswap {

// Memory of (batch, height, width, channels), of a weight (out_channels, kernel, kernel, channels / groups); 16 bits;
// everything starts at a multiple of 16 bytes and both numbers of channels are multiples of eight. The scale is weight *
// rsqrt(running_var + eps); the shift makes of the convolution with its bias what the norm makes of it.
struct Convolve {
  const void* input;
  const void* conv_weight;
  const void* residual;  // laid out as the output; null: none
  void* out;
  ChannelVector of_channels[5];  // running_var, running_mean, weight, bias, the convolution's bias
  double eps;
  int batch, height, width, channels, out_height, out_width, out_channels, groups;
  int kernel[2], stride[2], padding[2], dilation[2];
  ActivationArgs activation;
  DType dtype;
};

// Both numbers of channels of a group are multiples of eight.
cudaError_t convolve_f16(const Convolve&, const Gpu&, cudaStream_t);
cudaError_t convolve_bf16(const Convolve&, const Gpu&, cudaStream_t);

// A group a channel, kernels of 3 or 5 that step by 1 or 2.
bool is_depthwise(const Convolve&);
cudaError_t convolve_depthwise(const Convolve&, const Gpu&, cudaStream_t);

}  // namespace normswap
