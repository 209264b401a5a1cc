// What a channel's pieces say together, between the passes over the tensor.
#include "batch_norm/batch_norm_passes.cuh"

namespace normswap {
namespace {

constexpr int kFinishThreads = kBatchNormThreads;

// Calls unite(first, visit) for the pieces of a channel, by as many warps as unite one and then of their results;
// done(united) by one thread. visit(with) calls with(index, of the pieces) or with the warps' results. The block calls,
// each run of warps for a channel, if there is one.
template <class One, class United, class Unite, class Done>
__device__ inline void for_channel(const BatchNormArgs& a, int64_t channel, bool there, const One* parts, United* of_warps,
                                   Unite unite, Done done) {
  const int warp = thread() / 32, lane = thread() % 32, place = warp % a.finish_warps;
  const One* of_channel = parts + (there ? channel : 0) * a.p.pieces;
  const auto pieces = [&](auto with) {
#pragma unroll 8
    for (int64_t i = place * 32 + lane; i < a.p.pieces; i += a.finish_warps * 32) with(of_channel[i]);
  };
  United united = unite(of_channel[0], pieces);
  if (a.finish_warps > 1) {
    if (lane == 0) of_warps[warp] = united;
    __syncthreads();
    united = unite(of_warps[0], [&](auto with) {
      if (lane < a.finish_warps) with(of_warps[lane]);
    });
  }
  if (there && lane == 0 && place == 0) done(united);
}

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
__device__ inline void write_coefficients(const BatchNormTrain& n, int64_t channel, const Before& before, float mean,
                                          float var) {
  const float scaled = __fmul_rn(__fmul_rn(before.scale, before.scale), var);
  const float rstd = __fmul_rn(__frcp_rn(__fsqrt_rn(__fadd_rn(scaled, static_cast<float>(n.eps)))), before.scale);
  n.coefficients[channel] = {mean, __fmul_rn(rstd, before.weight), before.bias, rstd};
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
__device__ inline void take_running(const BatchNormTrain& n, int64_t channel) {
  const Before before = Before::of(n, channel);
  if (n.scale.data == nullptr) return write_coefficients(n, channel, before, before.mean, before.var);
  const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(before.var, static_cast<float>(n.eps))));
  const float gain = __fmul_rn(rstd, before.weight), scaled = __fmul_rn(rstd, before.scale);
  n.coefficients[channel] = {0.f, __fmul_rn(scaled, before.weight), fmaf(-before.mean, gain, before.bias), scaled};
}

// Coefficients and running statistics of a channel.
__device__ inline void finish_channel(const BatchNormArgs& a, int64_t channel, const Before& before, const Moments& m) {
  const BatchNormTrain& n = a.n;
  write_coefficients(n, channel, before, m.mean, __fdiv_rn(m.m2, a.elements));
  average(n, n.running_mean, channel, before.mean, __fmul_rn(before.scale, __fadd_rn(m.mean, before.input_bias)));
  const float unbiased = __fdiv_rn(m.m2, static_cast<float>(a.unbiased));
  average(n, n.running_var, channel, before.var, __fmul_rn(__fmul_rn(before.scale, before.scale), unbiased));
}

template <class Parts>
__device__ inline Moments unite_pieces(const Moments& first, Parts parts) {
  return unite_moments(32, first.mean, [&](auto with) { parts([&](const Moments& m) { with(m.n, float2{m.mean, m.m2}); }); });
}

// The gradients of a channel's parameters, and what its elements' are made of, to `finished`.
__device__ inline void finish_channel(const BatchNormArgs& a, int64_t channel, float2 sums, float2* finished) {
  const BatchNormTrain& n = a.n;
  const ChannelCoefficients of = n.coefficients[channel];
  float product = __fmul_rn(sums.y, of.rstd);
  if (n.frozen && n.scale.data != nullptr) {  // of x itself, not of what it differs from the mean by
    const Before before = Before::of(n, channel);
    const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(before.var, static_cast<float>(n.eps))));
    product = __fmul_rn(rstd, fmaf(before.scale, sums.y, -__fmul_rn(before.mean, sums.x)));
    if (n.dscale.data != nullptr) set_channel_value(n.dscale, channel, __fmul_rn(__fmul_rn(rstd, before.weight), sums.y));
  } else if (n.dscale.data != nullptr) {
    set_channel_value(n.dscale, channel, scale_gradient(n, channel, sums.y, of.rstd));
  }
  if (n.dbias.data != nullptr) set_channel_value(n.dbias, channel, sums.x);
  if (n.dweight.data != nullptr) set_channel_value(n.dweight, channel, product);
  if (n.dinput_bias.data != nullptr) {  // the sum of dx, of which nothing is left but what is no number
    set_channel_value(n.dinput_bias, channel, __fmul_rn(0.f, __fmul_rn(of.gain, __fadd_rn(sums.x, product))));
  }
  const float by_gradient = __fdiv_rn(sums.x, a.elements), by_x = __fmul_rn(__fdiv_rn(product, a.elements), of.rstd);
  finished[channel] = {__fmul_rn(by_gradient, of.gain), __fmul_rn(by_x, of.gain)};
}

template <class Parts>
__device__ inline float2 unite_pieces(const float2&, Parts parts) {
  return unite_pairs(32, [&](auto with) { parts([&](float2 pair) { with(1.f, pair); }); });
}

// That the calling warp works on, if there is one.
__device__ inline int64_t channel_of(const BatchNormArgs& a) {
  return static_cast<int64_t>(blockIdx.x) * (kFinishThreads / 32 / a.finish_warps) + thread() / 32 / a.finish_warps;
}

__global__ void __launch_bounds__(kFinishThreads) finish_moments(const BatchNormArgs args) {
  __shared__ Moments of_warps[kFinishThreads / 32];
  const BatchNormTrain& n = args.n;
  const int64_t channel = channel_of(args);
  const Before before = Before::of(n, min(channel, n.sizes.channels - 1));
  follow_predecessor();
  let_successor_start();
  if (n.batches != nullptr && blockIdx.x == 0 && thread() == 0) ++*n.batches;
  for_channel(args, channel, channel < n.sizes.channels, args.moments(), of_warps,
              [](const Moments& first, auto parts) { return unite_pieces(first, parts); },
              [&](const Moments& m) { finish_channel(args, channel, before, m); });
}

__global__ void __launch_bounds__(kFinishThreads) take_running_ones(const BatchNormArgs args) {
  follow_predecessor();
  let_successor_start();
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kFinishThreads + thread();
  if (channel < args.n.sizes.channels) take_running(args.n, channel);
}

__global__ void __launch_bounds__(kFinishThreads) finish_sums(const BatchNormArgs args) {
  __shared__ float2 of_warps[kFinishThreads / 32];
  follow_predecessor();
  let_successor_start();
  const int64_t channel = channel_of(args);
  float2* const finished = args.sums() + args.n.sizes.channels * args.p.pieces;
  for_channel(args, channel, channel < args.n.sizes.channels, args.sums(), of_warps,
              [](const float2& first, auto parts) { return unite_pieces(first, parts); },
              [&](float2 sums) { finish_channel(args, channel, sums, finished); });
}

dim3 grid_of_channels(const BatchNormArgs& a) {
  return grid_of(ceil_div(a.n.sizes.channels * a.finish_warps * 32, kFinishThreads));
}

}  // namespace

cudaError_t finish_batch_norm(const BatchNormTrain& n, const BatchNormPlan& p, bool overlap, cudaStream_t stream) {
  const BatchNormArgs args(n, p);
  if (n.frozen) {
    const LaunchShape shape{grid_of(ceil_div(n.sizes.channels, kFinishThreads)), kFinishThreads, 0, 1, overlap};
    return launch_block<take_running_ones>(args, shape, stream);
  }
  return launch_block<finish_moments>(args, {grid_of_channels(args), kFinishThreads, 0, 1, overlap}, stream);
}

cudaError_t finish_batch_norm_backward(const BatchNormTrain& n, const BatchNormPlan& p, bool overlap, cudaStream_t stream) {
  const BatchNormArgs args(n, p);
  return launch_block<finish_sums>(args, {grid_of_channels(args), kFinishThreads, 0, 1, overlap}, stream);
}

}  // namespace normswap
