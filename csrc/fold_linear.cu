// The fold of scale -> BatchNorm in eval into the Linear before it.
#include "vec.cuh"

namespace normswap {
namespace {

constexpr int kThreads = 256;

// A block a row of the Linear's weight.
template <class T, int V>
__global__ void __launch_bounds__(kThreads) fold_rows(const FoldLinear f) {
  const int64_t channel = blockIdx.x;
  const float rstd = rsqrtf(channel_value(f.running_var, channel, 1.f) + static_cast<float>(f.eps));
  const float gain = rstd * channel_value(f.weight, channel, 1.f);
  const float column = gain * channel_value(f.scale, channel, 1.f);
  if (threadIdx.x == 0) {
    const float shift = fmaf(-gain, channel_value(f.running_mean, channel, 0.f), channel_value(f.bias, channel, 0.f));
    const float bias = fmaf(column, channel_value(f.linear_bias, channel, 0.f), shift);
    static_cast<T*>(f.out_bias)[channel] = from_float<T>(bias);
  }
  const T* in = static_cast<const T*>(f.linear_weight) + channel * f.in_features;
  T* out = static_cast<T*>(f.out_weight) + channel * f.in_features;
  for (int64_t k = threadIdx.x * V; k < f.in_features; k += kThreads * V) {
    Pack<T, V> pack = Pack<T, V>::load(in + k);
#pragma unroll
    for (int j = 0; j < V; ++j) pack.v[j] = from_float<T>(column * to_float(pack.v[j]));
    // Stored for the product that follows: keep it in the L2.
    *reinterpret_cast<typename Pack<T, V>::Raw*>(out + k) = *reinterpret_cast<const typename Pack<T, V>::Raw*>(&pack);
  }
}

template <class T>
cudaError_t launch_fold(const FoldLinear& f, cudaStream_t stream) {
  constexpr int full = 16 / static_cast<int>(sizeof(T));
  if (f.in_features % full == 0) {
    fold_rows<T, full><<<dim3(static_cast<unsigned>(f.channels)), kThreads, 0, stream>>>(f);
  } else {
    fold_rows<T, 1><<<dim3(static_cast<unsigned>(f.channels)), kThreads, 0, stream>>>(f);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t fold_linear(const FoldLinear& f, cudaStream_t stream) {
  switch (f.dtype) {
    case DType::f32: return launch_fold<float>(f, stream);
    case DType::f16: return launch_fold<__half>(f, stream);
    default: return launch_fold<__nv_bfloat16>(f, stream);
  }
}

}  // namespace normswap
