// Calls of kernels in plain data: autograd's nodes, which are a library for one version of torch, make them past the
// dispatcher, and so do the native ops. See normswap/nodes/launches.h.
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

constexpr int32_t kBytes = 3;  // a dtype that results alone may have

// Where a call's results and its workspace come from: its caller, who is asked once the call is one that kernels may take.
struct Memory {
  enum Part : int32_t { kOut, kSum, kStatistics, kSigns, kWeight, kBias, kScale, kInputBias, kWorkspace, kParts };

  // What is laid out so, on the call's device; null where there is none.
  void* (*allocate)(Memory* self, int32_t part, const View* like);
};

// layer_norm and rms_norm over the last `dims` dims, contiguous, as are the results; see RowNorm and RowOptions. With a
// residual there is a sum.
struct RowNormCall {
  View input, weight, bias, residual, scale, shift;
  int64_t dims;
  double eps, weight_offset;
  int32_t kind;  // NormKind's number
  int32_t cast_before_weight, activation;
  float low, high;
  int32_t dtype;       // of the output
  int32_t statistics;  // whether those are wanted that a backward needs
};

// activation(group_norm(input) + residual), laid out as the input.
struct GroupNormCall {
  View input, weight, bias, residual;
  int64_t num_groups;
  double eps;
  int32_t activation;
  float low, high;
  int32_t dtype;  // of the output and the residual: the input's or float32
  int32_t statistics;
};

// activation(conv2d(input) * gain + shift + residual), a value of both a channel; the output is channels_last.
struct ConvolutionCall {
  View input, weight, residual;
  View of_channels[5];  // running_var, running_mean, weight, bias, the convolution's bias
  double eps;
  int64_t stride[2], padding[2], dilation[2], groups;
  int32_t activation;
  float low, high;
  int32_t residual_first;  // it is what the sum is laid out after
};

// activation(batch_norm(input) + residual) by running statistics, laid out as the input.
struct BatchNormCall {
  View input, residual, running_mean, running_var, weight, bias;
  double eps;
  int32_t activation;
  float low, high;
};

// The backward of layer_norm and rms_norm: see RowBackward. All that lies over rows is contiguous. Statistics are those of
// the forward, layer_norm's means before its rstds. The gradients wanted: of the input, laid out as it, and of weight and
// bias. That of a residual of 16 bits beside an input of float32 is in the place of a sum, if the kernels make it; else it is
// the input's.
struct RowBackwardCall {
  View grad, input, weight, bias, statistics, sum_grad;
  int64_t cols;
  double weight_offset;
  int32_t kind;  // NormKind's number
  int32_t cast_before_weight, activation;
  float low, high;
  int32_t of_input, of_weight, of_bias;
  int32_t residual_dtype;  // of such a residual, if its gradient is wanted; else 0
};

// The backward of group_norm: see GroupBackward. Grad and residual, or in its place what a ReLU behind it gave, are laid out as
// the input; the gradient of the residual is a sum.
struct GroupBackwardCall {
  View grad, input, weight, bias, residual, statistics;
  int64_t num_groups;
  int32_t activation;
  float low, high;
  int32_t of_input, of_weight, of_bias, of_residual;
};

// activation(batch_norm((input + input_bias) * scale) + residual), by the statistics of the batch or, not in training, the
// running ones: see BatchNormTrain. With statistics its backward has what it needs: coefficients of the channels, which lie
// in the place of statistics, and the signs that a ReLU behind a residual let through.
struct BatchNormTrainCall {
  View input, running_mean, running_var, weight, bias, residual, scale, input_bias;
  int64_t* batches;  // one number on the device, optional
  double momentum, eps;
  int32_t training, activation;
  float low, high;
  int32_t statistics;
};

// Its backward. The running statistics are those of one not in training, with a scale. That of a scale of one value is left
// a channel's each, in float32.
struct BatchNormBackwardCall {
  View grad, input, coefficients, residual, weight, bias, scale, input_bias, running_mean, running_var;
  const void* signs;
  double eps;
  int32_t training, activation;
  float low, high;
  int32_t of_input, of_weight, of_bias, of_residual, of_scale, of_input_bias;
};

constexpr int32_t kDeclined = -1;
constexpr int32_t kTooWide = -2;  // of groups, channels_last, that no block holds: results are there, but not filled

}  // namespace normswap

// All tensors are on the device of this number, on whose current stream the kernel is launched. They give CUDA's error, 0
// for none, or kDeclined where the kernel does not take the call, or `allocate` gave no memory.
extern "C" {
int32_t normswap_row_norm(const normswap::RowNormCall* call, normswap::Memory* memory, int32_t device);
int32_t normswap_group_norm(const normswap::GroupNormCall* call, normswap::Memory* memory, int32_t device);
int32_t normswap_row_backward(const normswap::RowBackwardCall* call, normswap::Memory* memory, int32_t device);
int32_t normswap_group_backward(const normswap::GroupBackwardCall* call, normswap::Memory* memory, int32_t device);
int32_t normswap_convolve(const normswap::ConvolutionCall* call, normswap::Memory* memory, int32_t device);
int32_t normswap_batch_norm(const normswap::BatchNormCall* call, normswap::Memory* memory, int32_t device);
int32_t normswap_batch_norm_train(const normswap::BatchNormTrainCall* call, normswap::Memory* memory, int32_t device);
int32_t normswap_batch_norm_backward(const normswap::BatchNormBackwardCall* call, normswap::Memory* memory, int32_t device);
}
