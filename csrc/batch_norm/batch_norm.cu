// BatchNorm by running statistics, with the residual and the activation behind it: one pass over x. A block keeps every
// channel's mean, gain and bias in shared memory and goes over vectors of x in steps of the grid.
#include "batch_norm/batch_norm.h"
#include "device/activation.cuh"

namespace normswap {
namespace {

constexpr int kThreads = 256, kBlocksPerMultiprocessor = 6;
constexpr int kSlots = 4;  // vectors a thread has in flight

// Of the channel in which element `first` lies, and of those after it.
struct Place {
  unsigned channel, rest;  // rest: elements of the channel's run of `inner` before this one

  __device__ Place(int64_t first, const BatchNormEval& n) {
    if (n.elements <= 0xffffffffll) {
      const unsigned at = static_cast<unsigned>(first), inner = static_cast<unsigned>(n.inner);
      const unsigned run = inner == 1 ? at : at / inner;
      rest = at - run * inner;
      channel = run % static_cast<unsigned>(n.channels);
    } else {
      const int64_t run = first / n.inner;
      rest = static_cast<unsigned>(first - run * n.inner);
      channel = static_cast<unsigned>(run % n.channels);
    }
  }
  __device__ void next(const BatchNormEval& n) {
    if (++rest < n.inner) return;
    rest = 0;
    channel = channel + 1 < n.channels ? channel + 1 : 0;
  }
};

template <class T, int V>
__device__ inline Pack<T, V> normalised(const Pack<T, V>& x, int64_t first, const BatchNormEval& n, const float* mean) {
  const float *gain = mean + n.channels, *bias = gain + n.channels;
  Place at(first, n);
  float out[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    out[j] = fmaf(__fsub_rn(to_float(x.v[j]), mean[at.channel]), gain[at.channel], bias[at.channel]);
    if (j + 1 < V) at.next(n);
  }
  return Pack<T, V>::of(out);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) batch_norm_rows(const BatchNormEval n) {
  extern __shared__ float values[];
  for (int64_t c = threadIdx.x; c < n.channels; c += kThreads) {
    values[c] = channel_value(n.running_mean, c, 0.f);
    const float rstd = rsqrtf(__fadd_rn(channel_value(n.running_var, c, 1.f), static_cast<float>(n.eps)));
    values[n.channels + c] = __fmul_rn(rstd, channel_value(n.weight, c, 1.f));
    values[2 * n.channels + c] = channel_value(n.bias, c, 0.f);
  }
  __syncthreads();
  const T* x = static_cast<const T*>(n.x);
  const T* residual = static_cast<const T*>(n.residual);
  const int64_t vectors = n.elements / V, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t v = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; v < vectors; v += kSlots * step) {
    Pack<T, V> packs[kSlots], added[kSlots];
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      if (v + k * step >= vectors) continue;
      packs[k] = Pack<T, V>::load(x + (v + k * step) * V);
      if (residual != nullptr) added[k] = Pack<T, V>::load(residual + (v + k * step) * V);
    }
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const int64_t first = (v + k * step) * V;
      if (v + k * step >= vectors) continue;
      Pack<T, V> out = normalised(packs[k], first, n, values);
      if (residual != nullptr) {
        float sums[V];
#pragma unroll
        for (int j = 0; j < V; ++j) sums[j] = __fadd_rn(to_float(out.v[j]), to_float(added[k].v[j]));
        out = Pack<T, V>::of(sums);
      }
      activated(out, n.activation).store(static_cast<T*>(n.y) + first);
    }
  }
}

template <class T, int V>
cudaError_t launch_vec(const BatchNormEval& n, int multiprocessors, cudaStream_t stream) {
  const int64_t needed = (n.elements / V + kThreads * kSlots - 1) / (kThreads * kSlots);
  const int64_t most = static_cast<int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  const int64_t blocks = needed < most ? needed : most;
  const size_t bytes = 3 * sizeof(float) * static_cast<size_t>(n.channels);
  batch_norm_rows<T, V><<<dim3(static_cast<unsigned>(blocks)), kThreads, bytes, stream>>>(n);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch(const BatchNormEval& n, int multiprocessors, cudaStream_t stream) {
  constexpr int full = 16 / static_cast<int>(sizeof(T));
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(n.x) | reinterpret_cast<uintptr_t>(n.y) |
                              reinterpret_cast<uintptr_t>(n.residual);
  if (n.elements % full == 0 && addresses % 16 == 0) return launch_vec<T, full>(n, multiprocessors, stream);
  return launch_vec<T, 1>(n, multiprocessors, stream);
}

}  // namespace

cudaError_t batch_norm_eval(const BatchNormEval& n, int multiprocessors, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return launch<float>(n, multiprocessors, stream);
    case DType::f16: return launch<__half>(n, multiprocessors, stream);
    default: return launch<__nv_bfloat16>(n, multiprocessors, stream);
  }
}

}  // namespace normswap
