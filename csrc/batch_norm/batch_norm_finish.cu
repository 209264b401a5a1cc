// What a channel's pieces say together, between the passes over the tensor.
#include "batch_norm/batch_norm_passes.cuh"

namespace normswap {
namespace {

constexpr int kFinishThreads = 256;
constexpr int kFewPieces = 128;  // which a warp unites alone

struct FinishArgs {
  BatchNormTrain n;
  int64_t pieces;
  int warps;      // a channel
  float elements;
  double unbiased;
};

// That the calling warp works on, if there is one.
__device__ inline int64_t channel_of(const FinishArgs& a) {
  return static_cast<int64_t>(blockIdx.x) * (kFinishThreads / 32 / a.warps) + thread() / 32 / a.warps;
}

// Calls unite(lanes, visit) for the pieces of the block's channels, by warps and then of their results; done(channel,
// united) by one thread a channel. visit(with) calls with(index, of the pieces) or with the warps' results.
template <class One, class United, class Unite, class Done>
__device__ inline void for_channels(const FinishArgs& a, const One* parts, United* of_warps, Unite unite, Done done) {
  const int warp = thread() / 32, lane = thread() % 32, place = warp % a.warps;
  const int64_t channel = channel_of(a);
  const bool there = channel < a.n.sizes.channels;
  const One* of_channel = parts + (there ? channel : 0) * a.pieces;
  const auto pieces = [&](auto with) {
#pragma unroll 8
    for (int64_t i = place * 32 + lane; i < a.pieces; i += a.warps * 32) with(of_channel[i]);
  };
  United united = unite(of_channel[0], pieces);
  if (a.warps > 1) {
    if (lane == 0) of_warps[warp] = united;
    __syncthreads();
    united = unite(of_warps[0], [&](auto with) {
      if (lane < a.warps) with(of_warps[lane]);
    });
  }
  if (there && lane == 0 && place == 0) done(channel, united);
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

__global__ void __launch_bounds__(kFinishThreads) finish_moments(const FinishArgs args) {
  __shared__ Moments of_warps[kFinishThreads / 32];
  const BatchNormTrain& n = args.n;
  const Before before = Before::of(n, min(channel_of(args), n.sizes.channels - 1));
  follow_predecessor();
  let_successor_start();
  if (n.batches != nullptr && blockIdx.x == 0 && thread() == 0) ++*n.batches;
  const auto unite = [&](const Moments& first, auto parts) {
    return unite_moments(32, first.mean, [&](auto with) { parts([&](const Moments& m) { with(m.n, float2{m.mean, m.m2}); }); });
  };
  for_channels(args, reinterpret_cast<const Moments*>(n.workspace), of_warps, unite, [&](int64_t channel, const Moments& m) {
    write_coefficients(n, channel, before, m.mean, __fdiv_rn(m.m2, args.elements));
    average(n, n.running_mean, channel, before.mean, __fmul_rn(before.scale, __fadd_rn(m.mean, before.input_bias)));
    const float unbiased = __fdiv_rn(m.m2, static_cast<float>(args.unbiased));
    average(n, n.running_var, channel, before.var, __fmul_rn(__fmul_rn(before.scale, before.scale), unbiased));
  });
}

__global__ void __launch_bounds__(kFinishThreads) take_running(const FinishArgs args) {
  follow_predecessor();
  let_successor_start();
  const BatchNormTrain& n = args.n;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kFinishThreads + thread();
  if (channel >= n.sizes.channels) return;
  const Before before = Before::of(n, channel);
  write_coefficients(n, channel, before, before.mean, before.var);
}

// That of a scale s: weight eps r^3 sum(g (x - mean)), where r, the rstd of the scaled channel, moves with s too.
__device__ inline float scale_gradient(const BatchNormTrain& n, int64_t channel, float product, float rstd) {
  const float scale = channel_value(n.scale, n.one_scale ? 0 : channel, 1.f), eps = static_cast<float>(n.eps);
  const float own = scale == 0.f && rstd == 0.f ? __frcp_rn(__fsqrt_rn(eps)) : __fdiv_rn(rstd, scale);
  const float weighted = __fmul_rn(channel_value(n.weight, channel, 1.f), __fmul_rn(own, product));
  return __fmul_rn(weighted, __fmul_rn(__fmul_rn(eps, own), own));
}

__global__ void __launch_bounds__(kFinishThreads) finish_sums(const FinishArgs args) {
  __shared__ float2 of_warps[kFinishThreads / 32];
  follow_predecessor();
  let_successor_start();
  const BatchNormTrain& n = args.n;
  float2* const parts = reinterpret_cast<float2*>(n.workspace);
  float2* const finished = parts + n.sizes.channels * args.pieces;
  const auto unite = [&](const float2&, auto each) {
    return unite_pairs(32, [&](auto with) { each([&](float2 pair) { with(1.f, pair); }); });
  };
  for_channels(args, parts, of_warps, unite, [&](int64_t channel, float2 sums) {
    const ChannelCoefficients of = n.coefficients[channel];
    const float product = __fmul_rn(sums.y, of.rstd);
    if (n.dbias.data != nullptr) set_channel_value(n.dbias, channel, sums.x);
    if (n.dweight.data != nullptr) set_channel_value(n.dweight, channel, product);
    if (n.dscale.data != nullptr) set_channel_value(n.dscale, channel, scale_gradient(n, channel, sums.y, of.rstd));
    if (n.dinput_bias.data != nullptr) {  // the sum of dx, of which nothing is left but what is no number
      set_channel_value(n.dinput_bias, channel, __fmul_rn(0.f, __fmul_rn(of.gain, __fadd_rn(sums.x, product))));
    }
    const float a = __fdiv_rn(sums.x, args.elements), b = __fmul_rn(__fdiv_rn(product, args.elements), of.rstd);
    finished[channel] = {__fmul_rn(a, of.gain), __fmul_rn(b, of.gain)};
  });
}

FinishArgs finish_args(const BatchNormTrain& n, const BatchNormPlan& p) {
  const double elements = static_cast<double>(n.sizes.samples) * static_cast<double>(n.sizes.inner);
  return {n, p.pieces, p.pieces > kFewPieces ? kFinishThreads / 32 : 1, static_cast<float>(elements), elements - 1};
}

}  // namespace

cudaError_t finish_batch_norm(const BatchNormTrain& n, const BatchNormPlan& p, bool overlap, cudaStream_t stream) {
  const FinishArgs args = finish_args(n, p);
  if (n.frozen) {
    const LaunchShape shape{grid_of(ceil_div(n.sizes.channels, kFinishThreads)), kFinishThreads, 0, 1, overlap};
    return launch_block<take_running>(args, shape, stream);
  }
  const int64_t blocks = ceil_div(n.sizes.channels * args.warps * 32, kFinishThreads);
  return launch_block<finish_moments>(args, {grid_of(blocks), kFinishThreads, 0, 1, overlap}, stream);
}

cudaError_t finish_batch_norm_backward(const BatchNormTrain& n, const BatchNormPlan& p, bool overlap, cudaStream_t stream) {
  const FinishArgs args = finish_args(n, p);
  const int64_t blocks = ceil_div(n.sizes.channels * args.warps * 32, kFinishThreads);
  return launch_block<finish_sums>(args, {grid_of(blocks), kFinishThreads, 0, 1, overlap}, stream);
}

}  // namespace normswap
