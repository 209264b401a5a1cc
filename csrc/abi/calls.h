// Calls of norms with fixed statistics in plain data: autograd's nodes, which are a library for one version of torch, make
// them past the dispatcher. See normswap/nodes/launches.h.
#pragma once

#include <cstdint>

namespace normswap {

// A tensor; sizes == nullptr: absent (one without elements has no data).
struct View {
  const void* data;
  const int64_t *sizes, *strides;
  int64_t dims;
  int32_t dtype;  // DType's number; -1: another
};

// activation(conv2d(input) * gain + shift + residual), a value of both a channel.
struct ConvolutionCall {
  View input, weight, residual;
  View of_channels[5];  // running_var, running_mean, weight, bias, the convolution's bias
  double eps;
  int64_t stride[2], padding[2], dilation[2], groups;
  int32_t activation;  // Activation's number
  float low, high;
};

// activation(batch_norm(input) + residual) by running statistics.
struct BatchNormCall {
  View input, residual, running_mean, running_var, weight, bias;
  double eps;
  int32_t activation;
  float low, high;
};

}  // namespace normswap

// All tensors are on one device.
extern "C" {
// Whether the kernel takes these: then the sizes of its output, which is channels_last.
int32_t normswap_convolution_sizes(const normswap::ConvolutionCall* call, int64_t* sizes);
// Launches it on the device's current stream for a call that it takes. Gives CUDA's error, 0 for none.
int32_t normswap_convolve(const normswap::ConvolutionCall* call, void* out, int32_t device);
// Whether the kernel takes these; its output is laid out as the input.
int32_t normswap_batch_norm_takes(const normswap::BatchNormCall* call);
// As normswap_convolve.
int32_t normswap_batch_norm(const normswap::BatchNormCall* call, void* out, int32_t device);
}
