// What a channel's pieces say together, in launches of their own.
#include "batch_norm/batch_norm_finish.cuh"

namespace normswap {
namespace {

constexpr int kFinishThreads = kBatchNormThreads;

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
