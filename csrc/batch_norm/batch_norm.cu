// BatchNorm by running statistics, with the residual and the activation behind it: one pass over x. Where channels lie side
// by side a thread keeps to some of them, whose mean, gain and bias it holds in registers; elsewhere a block keeps every
// channel's in shared memory and goes over vectors of x in steps of the grid.
#include "batch_norm/batch_norm.h"
#include "device/activation.cuh"

#include <algorithm>

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

__device__ inline float gain_of(const BatchNormEval& n, float var, float weight) {
  return __fmul_rn(rsqrtf(__fadd_rn(var, static_cast<float>(n.eps))), weight);
}

// Mean, gain and bias of a vector's elements: of channels side by side, from memory.
template <int V>
struct Channels {
  float mean[V], gain[V], bias[V];

  __device__ Channels(const BatchNormEval& n, int64_t first) {
    float var[V];
    channel_values(n.running_mean, first, true, 0.f, mean);
    channel_values(n.running_var, first, true, 1.f, var);
    channel_values(n.weight, first, true, 1.f, gain);
    channel_values(n.bias, first, true, 0.f, bias);
#pragma unroll
    for (int j = 0; j < V; ++j) gain[j] = gain_of(n, var[j], gain[j]);
  }
  template <class T>
  __device__ Pack<T, V> normalised(const Pack<T, V>& x, int64_t) const {
    float out[V];
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = fmaf(__fsub_rn(to_float(x.v[j]), mean[j]), gain[j], bias[j]);
    return Pack<T, V>::of(out);
  }
};

// The same wherever the elements lie, from shared memory.
template <int V>
struct AllChannels {
  const BatchNormEval& n;
  const float *mean, *gain, *bias;

  __device__ AllChannels(const BatchNormEval& n, float* values)
      : n(n), mean(values), gain(values + n.channels), bias(values + 2 * n.channels) {
    for (int64_t c = threadIdx.x; c < n.channels; c += kThreads) {
      values[c] = channel_value(n.running_mean, c, 0.f);
      values[n.channels + c] = gain_of(n, channel_value(n.running_var, c, 1.f), channel_value(n.weight, c, 1.f));
      values[2 * n.channels + c] = channel_value(n.bias, c, 0.f);
    }
    __syncthreads();
  }
  template <class T>
  __device__ Pack<T, V> normalised(const Pack<T, V>& x, int64_t first) const {
    Place at(first, n);
    float out[V];
    if (n.inner % V == 0) {  // of one channel
      const float m = mean[at.channel], g = gain[at.channel], b = bias[at.channel];
#pragma unroll
      for (int j = 0; j < V; ++j) out[j] = fmaf(__fsub_rn(to_float(x.v[j]), m), g, b);
      return Pack<T, V>::of(out);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      out[j] = fmaf(__fsub_rn(to_float(x.v[j]), mean[at.channel]), gain[at.channel], bias[at.channel]);
      if (j + 1 < V) at.next(n);
    }
    return Pack<T, V>::of(out);
  }
};

// The vectors that begin at elements `first`, `first + step`, ... before `end`.
template <class T, int V, class Values>
__device__ inline void normalise(const BatchNormEval& n, const Values& values, int64_t first, int64_t step, int64_t end) {
  const T* x = static_cast<const T*>(n.x);
  const T* residual = static_cast<const T*>(n.residual);
  for (; first < end; first += kSlots * step) {
    Pack<T, V> packs[kSlots], added[kSlots];
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      if (first + k * step >= end) continue;
      packs[k] = Pack<T, V>::load(x + first + k * step);
      if (residual != nullptr) added[k] = Pack<T, V>::load(residual + first + k * step);
    }
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const int64_t at = first + k * step;
      if (at >= end) continue;
      Pack<T, V> out = values.normalised(packs[k], at);
      if (residual != nullptr) {
        float sums[V];
#pragma unroll
        for (int j = 0; j < V; ++j) sums[j] = __fadd_rn(to_float(out.v[j]), to_float(added[k].v[j]));
        out = Pack<T, V>::of(sums);
      }
      activated(out, n.activation).store(static_cast<T*>(n.y) + at);
    }
  }
}

// A block's threads lie along a row's vectors and, where that leaves some, along rows.
template <class T, int V>
__global__ void __launch_bounds__(kThreads, 2) batch_norm_columns(const BatchNormEval n) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * V;
  if (column >= n.channels) return;
  const Channels<V> values(n, column);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t rows = static_cast<int64_t>(gridDim.x) * blockDim.y;
  normalise<T, V>(n, values, row * n.channels + column, rows * n.channels, n.elements);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) batch_norm_rows(const BatchNormEval n) {
  extern __shared__ float shared[];
  const AllChannels<V> values(n, shared);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  normalise<T, V>(n, values, thread * V, static_cast<int64_t>(gridDim.x) * kThreads * V, n.elements);
}

// As many blocks as run at once, or fewer where each thread has `kSlots` vectors at most; `side` lie beside each other.
unsigned blocks_of(int64_t vectors, int64_t threads, int64_t side, int multiprocessors) {
  const int64_t needed = (vectors + threads * side * kSlots - 1) / (threads * side * kSlots);
  const int64_t most = std::max<int64_t>(1, multiprocessors * kBlocksPerMultiprocessor * kThreads / (threads * side));
  return static_cast<unsigned>(std::min(needed, most));
}

template <class T, int V>
cudaError_t launch_vec(const BatchNormEval& n, int multiprocessors, cudaStream_t stream) {
  const int64_t vectors = n.elements / V, wide = n.channels / V;
  if (n.inner == 1 && n.channels % V == 0) {
    const int64_t side = (wide + kThreads - 1) / kThreads, lanes = (wide + side - 1) / side, rows = kThreads / lanes;
    const dim3 grid(blocks_of(vectors, lanes * rows, side, multiprocessors), static_cast<unsigned>(side));
    const dim3 block(static_cast<unsigned>(lanes), static_cast<unsigned>(rows));
    batch_norm_columns<T, V><<<grid, block, 0, stream>>>(n);
  } else {
    const size_t bytes = 3 * sizeof(float) * static_cast<size_t>(n.channels);
    batch_norm_rows<T, V><<<blocks_of(vectors, kThreads, 1, multiprocessors), kThreads, bytes, stream>>>(n);
  }
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
    case DType::f16: return launch<Half>(n, multiprocessors, stream);
    default: return launch<BFloat16>(n, multiprocessors, stream);
  }
}

}  // namespace normswap
