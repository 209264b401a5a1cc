// The fold of scale -> BatchNorm in eval into the Linear, or the convolution, before it.
#include "abi/kernels.h"
#include "device/vec.cuh"

namespace normswap {
namespace {

constexpr int kFoldThreads = 256;  // of a block, at most
constexpr int kSlots = 4;      // vectors a thread has in flight

// What the channels have, in the order in which lanes fetch them.
struct Of {
  enum Value { variance, weight, scale, mean, bias, linear_bias, count };
};

struct FoldArgs {
  FoldLinear f;
  ChannelVector values[Of::count];
};

// Threads of the same y fold one row of a weight.
template <class T, int V>
__global__ void __launch_bounds__(kFoldThreads) fold_rows(const FoldArgs args) {
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
  const float mine = lane < Of::count ? channel_value(args.values[lane], channel, lane < Of::mean ? 1.f : 0.f) : 0.f;
  const auto value = [&](Of::Value which) { return __shfl_sync(0xffffffffu, mine, which); };
  const float gain = rsqrtf(value(Of::variance) + static_cast<float>(f.eps)) * value(Of::weight);
  const float column = gain * value(Of::scale);
  const float shift = fmaf(-gain, value(Of::mean), value(Of::bias)), bias = fmaf(column, value(Of::linear_bias), shift);
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

template <class T, int V>
cudaError_t launch_rows(const FoldLinear& f, cudaStream_t stream) {
  const int64_t at_once = static_cast<int64_t>(V) * kSlots * 32, needed = (f.in_features + at_once - 1) / at_once;
  const int64_t warps = needed > 0 ? needed : 1;
  const int across = warps * 32 < kFoldThreads ? static_cast<int>(warps) * 32 : kFoldThreads, rows = kFoldThreads / 2 / across;
  const dim3 threads(across, rows > 1 ? rows : 1);
  const int64_t blocks = (f.channels + threads.y - 1) / threads.y;
  const FoldArgs args{f, {f.running_var, f.weight, f.scale, f.running_mean, f.bias, f.linear_bias}};
  fold_rows<T, V><<<dim3(static_cast<unsigned>(blocks)), threads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_fold(const FoldLinear& f, cudaStream_t stream) {
  constexpr int full = 16 / static_cast<int>(sizeof(T));
  return f.in_features % full == 0 ? launch_rows<T, full>(f, stream) : launch_rows<T, 1>(f, stream);
}

}  // namespace

cudaError_t fold_linear(const FoldLinear& f, cudaStream_t stream) {
  switch (f.dtype) {
    case DType::f32: return launch_fold<float>(f, stream);
    case DType::f16: return launch_fold<Half>(f, stream);
    default: return launch_fold<BFloat16>(f, stream);
  }
}

}  // namespace normswap
