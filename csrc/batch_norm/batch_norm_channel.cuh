// What follows for a channel from the statistics of all its elements.
#pragma once

#include "batch_norm/batch_norm_passes.cuh"

namespace normswap {
namespace {

// What a channel had before.
struct Before {
  float weight, bias, mean, var, scale, input_bias;
  __device__ static Before of(const BatchNormTrain& n, int64_t channel) {
    const float scale = channel_value(n.scale, n.one_scale ? 0 : channel, 1.f);
    const float input_bias = channel_value(n.input_bias, channel, 0.f);
    return {channel_value(n.weight, channel, 1.f), channel_value(n.bias, channel, 0.f),
            channel_value(n.running_mean, channel, 0.f), channel_value(n.running_var, channel, 1.f),
            isfinite(input_bias) ? scale : __fsub_rn(input_bias, input_bias),  // NaN, as all of its column then is
            input_bias};
  }
};

// Of u = s (x + c), whose variance is s^2 times that of x, by x: c enters the mean of u alone.
__device__ inline ChannelCoefficients coefficients_by(const BatchNormTrain& n, const Before& before, float mean, float var) {
  const float scaled = __fmul_rn(__fmul_rn(before.scale, before.scale), var);
  const float rstd = __fmul_rn(__frcp_rn(__fsqrt_rn(__fadd_rn(scaled, static_cast<float>(n.eps)))), before.scale);
  return {mean, __fmul_rn(rstd, before.weight), before.bias, rstd};
}

__device__ inline void average(const BatchNormTrain& n, const ChannelVector& running, int64_t channel, float before,
                               float value) {
  if (running.data == nullptr) return;
  const float momentum = static_cast<float>(n.momentum), rest = static_cast<float>(1.0 - n.momentum);
  set_channel_value(running, channel, fmaf(momentum, value, __fmul_rn(rest, before)));
}

// That of a scale s: weight eps r^3 sum(g (x - mean)), where r, the rstd of the scaled channel, moves with s too.
__device__ inline float scale_gradient(const BatchNormTrain& n, int64_t channel, float product, float rstd) {
  const float scale = channel_value(n.scale, n.one_scale ? 0 : channel, 1.f), eps = static_cast<float>(n.eps);
  const float own = scale == 0.f && rstd == 0.f ? __frcp_rn(__fsqrt_rn(eps)) : __fdiv_rn(rstd, scale);
  const float weighted = __fmul_rn(channel_value(n.weight, channel, 1.f), __fmul_rn(own, product));
  return __fmul_rn(weighted, __fmul_rn(__fmul_rn(eps, own), own));
}

// The coefficients by running statistics.
__device__ inline ChannelCoefficients running_coefficients(const BatchNormTrain& n, int64_t channel) {
  const Before before = Before::of(n, channel);
  if (n.scale.data == nullptr) return coefficients_by(n, before, before.mean, before.var);
  const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(before.var, static_cast<float>(n.eps))));
  const float gain = __fmul_rn(rstd, before.weight), scaled = __fmul_rn(rstd, before.scale);
  return {0.f, __fmul_rn(scaled, before.weight), fmaf(-before.mean, gain, before.bias), scaled};
}

// The coefficients of a channel by its moments. `stores` them, and updates the running statistics: one of those that call.
__device__ inline ChannelCoefficients finish_channel(const BatchNormArgs& a, int64_t channel, const Before& before,
                                                     const Moments& m, bool stores) {
  const BatchNormTrain& n = a.n;
  const ChannelCoefficients of = coefficients_by(n, before, m.mean, __fdiv_rn(m.m2, a.elements));
  if (!stores) return of;
  n.coefficients[channel] = of;
  average(n, n.running_mean, channel, before.mean, __fmul_rn(before.scale, __fadd_rn(m.mean, before.input_bias)));
  const float unbiased = __fdiv_rn(m.m2, static_cast<float>(a.unbiased));
  average(n, n.running_var, channel, before.var, __fmul_rn(__fmul_rn(before.scale, before.scale), unbiased));
  return of;
}

// What a channel's elements' gradients are made of, by its sums (see ColumnGradients). `stores` those of its parameters: one
// of those that call.
__device__ inline float2 finish_channel(const BatchNormArgs& a, int64_t channel, float2 sums, bool stores) {
  const BatchNormTrain& n = a.n;
  const ChannelCoefficients of = n.coefficients[channel];
  float product = __fmul_rn(sums.y, of.rstd);
  if (n.frozen && n.scale.data != nullptr) {  // of x itself, not of what it differs from the mean by
    const Before before = Before::of(n, channel);
    const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(before.var, static_cast<float>(n.eps))));
    product = __fmul_rn(rstd, fmaf(before.scale, sums.y, -__fmul_rn(before.mean, sums.x)));
    if (stores && n.dscale.data != nullptr) {
      set_channel_value(n.dscale, channel, __fmul_rn(__fmul_rn(rstd, before.weight), sums.y));
    }
  } else if (stores && n.dscale.data != nullptr) {
    set_channel_value(n.dscale, channel, scale_gradient(n, channel, sums.y, of.rstd));
  }
  if (stores && n.dbias.data != nullptr) set_channel_value(n.dbias, channel, sums.x);
  if (stores && n.dweight.data != nullptr) set_channel_value(n.dweight, channel, product);
  if (stores && n.dinput_bias.data != nullptr) {  // the sum of dx, of which nothing is left but what is no number
    set_channel_value(n.dinput_bias, channel, __fmul_rn(0.f, __fmul_rn(of.gain, __fadd_rn(sums.x, product))));
  }
  const float by_gradient = __fdiv_rn(sums.x, a.elements), by_x = __fmul_rn(__fdiv_rn(product, a.elements), of.rstd);
  return {__fmul_rn(by_gradient, of.gain), __fmul_rn(by_x, of.gain)};
}

}  // namespace
}  // namespace normswap
