// BatchNorm by running statistics, for the kernel and its launcher.
#pragma once

#include "abi/kernels.h"

namespace normswap {

// y = activation((x - running_mean) / sqrt(running_var + eps) * weight + bias + residual), the norm and the sum rounded to
// x's dtype before what follows. The channel of element i is i / inner % channels: inner is 1 in channels_last.
struct BatchNormEval {
  const void* x;
  const void* residual;  // optional, as x
  void* y;
  ChannelVector running_mean, running_var, weight, bias;
  int64_t elements, channels, inner;
  double eps;
  ActivationArgs activation;
  DType dtype;
};

constexpr int64_t kMaxBatchNormChannels = 4096;  // whose values fit shared memory

cudaError_t batch_norm_eval(const BatchNormEval&, int multiprocessors, cudaStream_t stream);

}  // namespace normswap
