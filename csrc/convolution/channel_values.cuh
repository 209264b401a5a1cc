// What an output channel of a convolution has beside its weights, and what the norm makes of a sum.
#pragma once

#include "convolution/convolve.h"
#include "device/vec.cuh"

namespace normswap {
namespace {

// In the order of Convolve::of_channels.
enum Value { kVariance, kMean, kWeight, kBias, kConvBias, kValues };

__device__ inline float value_of(const Convolve& c, int which, int channel) {
  return channel_value(c.of_channels[which], channel, which == kWeight ? 1.f : 0.f);
}

// Factor and summand of a channel's sums; value(which) gives what the channel has.
template <class Of>
__device__ inline float2 scale_and_shift(const Of& value, double eps) {
  const float scale = rsqrtf(value(kVariance) + static_cast<float>(eps)) * value(kWeight);
  return {scale, fmaf(scale, value(kConvBias) - value(kMean), value(kBias))};
}

}  // namespace
}  // namespace normswap
