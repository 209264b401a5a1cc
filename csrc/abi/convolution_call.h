// One call of a convolution with a norm behind it, as our kernel takes it, in plain data: autograd's nodes, which are a
// library for one version of torch, call it past the dispatcher. See normswap/nodes/convolution.h.
#pragma once

#include <cstdint>

namespace normswap {

// A tensor; data == nullptr: absent.
struct View {
  const void* data;
  const int64_t *sizes, *strides;
  int64_t dims;
  int32_t dtype;  // DType's number; -1: another
};

struct ConvolutionCall {
  View input, weight, residual;
  View of_channels[5];  // running_var, running_mean, weight, bias, the convolution's bias
  double eps;
  int64_t stride[2], padding[2], dilation[2], groups;
  int32_t activation;  // Activation's number
  float low, high;
};

}  // namespace normswap

extern "C" {
// Whether the kernel takes these, all on one device: then the sizes of its output, which is channels_last.
int32_t normswap_convolution_sizes(const normswap::ConvolutionCall* call, int64_t* sizes);
// Launches it on the device's current stream for a call that it takes. Gives CUDA's error, 0 for none.
int32_t normswap_convolve(const normswap::ConvolutionCall* call, void* out, int32_t device);
}
