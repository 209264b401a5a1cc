// What a channel's pieces say together, between the passes over the tensor.
#include "batch_norm/batch_norm_channel.cuh"

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

template <class Parts>
__device__ inline Moments unite_pieces(const Moments& first, Parts parts) {
  return unite_moments(32, first.mean, [&](auto with) { parts([&](const Moments& m) { with(m.n, float2{m.mean, m.m2}); }); });
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
              [&](const Moments& m) { finish_channel(args, channel, before, m, true); });
}

__global__ void __launch_bounds__(kFinishThreads) take_running_ones(const BatchNormArgs args) {
  follow_predecessor();
  let_successor_start();
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kFinishThreads + thread();
  if (channel < args.n.sizes.channels) args.n.coefficients[channel] = running_coefficients(args.n, channel);
}

__global__ void __launch_bounds__(kFinishThreads) finish_sums(const BatchNormArgs args) {
  __shared__ float2 of_warps[kFinishThreads / 32];
  follow_predecessor();
  let_successor_start();
  const int64_t channel = channel_of(args);
  float2* const finished = args.sums() + args.n.sizes.channels * args.p.pieces;
  for_channel(args, channel, channel < args.n.sizes.channels, args.sums(), of_warps,
              [](const float2& first, auto parts) { return unite_pieces(first, parts); },
              [&](float2 sums) { finished[channel] = finish_channel(args, channel, sums, true); });
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
