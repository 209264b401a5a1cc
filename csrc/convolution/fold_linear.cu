// The fold of scale -> BatchNorm in eval into the Linear, or the convolution, before it.
#include "convolution/fold.h"
#include "device/vec.cuh"

namespace normswap {
namespace {

constexpr int kThreads = 256;  // of a block, at most
constexpr int kSlots = 4;      // vectors a thread has in flight

// What the channels have, in the order in which lanes fetch them.
enum Value { kVariance, kWeight, kScale, kMean, kBias, kLinearBias, kValues };

struct FoldArgs {
  FoldLinear f;
  ChannelVector values[kValues];
};

template <int N>
struct Folds {
  FoldArgs of[N];
};

// Threads of the same y fold one row of a weight, blocks of the same y all of it.
template <class T, int V, int N>
__global__ void __launch_bounds__(kThreads) fold_rows(const Folds<N> folds) {
  const FoldArgs& args = folds.of[N == 1 ? 0 : blockIdx.y];
  const FoldLinear& f = args.f;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t length = f.in_features, step = static_cast<int64_t>(blockDim.x) * V;
  const T* in = static_cast<const T*>(f.linear_weight) + channel * length;
  T* out = static_cast<T*>(f.out_weight) + channel * length;
  if (channel >= f.channels) return;
  Pack<T, V> packs[kSlots];
  const auto load_from = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (first + i * step < length) packs[i] = Pack<T, V>::load(in + first + i * step);
    }
  };
  int64_t first = threadIdx.x * V;
  load_from(first);
  // A value a lane: one latency, not six.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float mine = lane < kValues ? channel_value(args.values[lane], channel, lane < kMean ? 1.f : 0.f) : 0.f;
  const auto value = [&](Value which) { return __shfl_sync(0xffffffffu, mine, which); };
  const float gain = rsqrtf(value(kVariance) + static_cast<float>(f.eps)) * value(kWeight);
  const float column = gain * value(kScale);
  const float shift = fmaf(-gain, value(kMean), value(kBias)), bias = fmaf(column, value(kLinearBias), shift);
  if (threadIdx.x == 0) static_cast<T*>(f.out_bias)[channel] = from_float<T>(bias);
  for (;;) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      packs[i].forget();
      float product[V];
#pragma unroll
      for (int j = 0; j < V; ++j) product[j] = column * to_float(packs[i].v[j]);
      if (first + i * step < length) Pack<T, V>::of(product).store(out + first + i * step);
    }
    first += kSlots * step;
    if (first >= length) return;
    load_from(first);
  }
}

FoldArgs args_of(const FoldLinear& f) {
  return {f, {f.running_var, f.weight, f.scale, f.running_mean, f.bias, f.linear_bias}};
}

template <class T, int V>
cudaError_t launch_rows(const FoldLinear& f, cudaStream_t stream) {
  const int64_t at_once = static_cast<int64_t>(V) * kSlots * 32, needed = (f.in_features + at_once - 1) / at_once;
  const int64_t warps = needed > 0 ? needed : 1;
  const int across = warps * 32 < kThreads ? static_cast<int>(warps) * 32 : kThreads, rows = kThreads / 2 / across;
  const dim3 threads(across, rows > 1 ? rows : 1);
  const int64_t blocks = (f.channels + threads.y - 1) / threads.y;
  fold_rows<T, V, 1><<<dim3(static_cast<unsigned>(blocks)), threads, 0, stream>>>({{args_of(f)}});
  return cudaGetLastError();
}

// A warp a row.
template <class T, int V>
cudaError_t launch_several(const FoldLinear* folds, int count, cudaStream_t stream) {
  const dim3 threads(32, 4);
  Folds<kMaxFolds> all{};
  int64_t channels = 0;
  for (int i = 0; i < count; ++i) {
    all.of[i] = args_of(folds[i]);
    channels = folds[i].channels > channels ? folds[i].channels : channels;
  }
  const dim3 blocks(static_cast<unsigned>((channels + threads.y - 1) / threads.y), static_cast<unsigned>(count));
  fold_rows<T, V, kMaxFolds><<<blocks, threads, 0, stream>>>(all);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_fold(const FoldLinear* folds, int count, cudaStream_t stream) {
  constexpr int full = 16 / static_cast<int>(sizeof(T));
  bool even = true;
  for (int i = 0; i < count; ++i) even = even && folds[i].in_features % full == 0;
  if (count == 1) return even ? launch_rows<T, full>(*folds, stream) : launch_rows<T, 1>(*folds, stream);
  return even ? launch_several<T, full>(folds, count, stream) : launch_several<T, 1>(folds, count, stream);
}

}  // namespace

cudaError_t fold_linears(const FoldLinear* folds, int count, cudaStream_t stream) {
  if (count < 1 || count > kMaxFolds) return cudaErrorInvalidValue;
  switch (folds->dtype) {
    case DType::f32: return launch_fold<float>(folds, count, stream);
    case DType::f16: return launch_fold<__half>(folds, count, stream);
    default: return launch_fold<__nv_bfloat16>(folds, count, stream);
  }
}

cudaError_t fold_linear(const FoldLinear& f, cudaStream_t stream) { return fold_linears(&f, 1, stream); }

}  // namespace normswap
