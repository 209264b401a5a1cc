// What may follow a group norm besides its activation: a residual is added first, and y may be float32 where x is not.
#pragma once

#include "device/activation.cuh"

namespace normswap {
namespace {

// The sum as rounded to Y.
template <class Y, int N>
__device__ inline Pack<Y, N> added(const Pack<Y, N>& a, const Pack<Y, N>& b) {
  float sums[N];
#pragma unroll
  for (int j = 0; j < N; ++j) sums[j] = __fadd_rn(to_float(a.v[j]), to_float(b.v[j]));
  return Pack<Y, N>::of(sums);
}

// The first `count` of N values of the norm, as rounded to y's dtype, to `y`; `residual` may be null. Not inlined: this
// is rare, and in many places.
template <class Y, int N>
__device__ __noinline__ void store_behind(Pack<Y, N> norm, const Y* residual, Y* y, int count, ActivationArgs activation) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(residual) | reinterpret_cast<uintptr_t>(y);
  const bool whole = count >= N && addresses % sizeof(norm) == 0;
  if (residual != nullptr) {
    Pack<Y, N> other = norm;
    if (whole) {
      other = Pack<Y, N>::load(residual);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (j < count) other.v[j] = residual[j];
      }
    }
    norm = added(norm, other);
  }
  norm = activated(norm, activation);
  if (whole) {
    norm.store(y);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j < count) y[j] = norm.v[j];
    }
  }
}

// The same of V values in float32, at element `at` of the tensors, for x of dtype T.
template <class T, int V>
__device__ inline void store_behind(const GroupOptions& options, const float (&norm)[V], int64_t at, int count,
                                    const ActivationArgs& activation) {
  if (options.wide) {
    constexpr int some = V < 4 ? V : 4;
#pragma unroll
    for (int first = 0; first < V; first += some) {
      float part[some];
#pragma unroll
      for (int j = 0; j < some; ++j) part[j] = norm[first + j];
      const float* residual = static_cast<const float*>(options.residual);
      store_behind(Pack<float, some>::of(part), residual == nullptr ? nullptr : residual + at + first,
                   static_cast<float*>(options.y) + at + first, count - first, activation);
    }
  } else {
    const T* residual = static_cast<const T*>(options.residual);
    store_behind(Pack<T, V>::of(norm), residual == nullptr ? nullptr : residual + at, static_cast<T*>(options.y) + at, count,
                 activation);
  }
}

// Whether vectors may be loaded and stored as such.
__host__ __device__ inline bool on_boundary(const GroupOptions& options) {
  return (reinterpret_cast<uintptr_t>(options.residual) | reinterpret_cast<uintptr_t>(options.y)) % 16 == 0;
}

// The same of a vector that may not be there, to a float32 y; see Halves. activate(vector of the sum).
template <class Activate>
__device__ inline void store_wide(const GroupOptions& options, const float (&norm)[8], int64_t at, bool there,
                                  Activate activate) {
  const Halves halves(norm, there);
  uint4 words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    auto sum = Pack<float, 4>::of(halves.values[i]);
    if (options.residual != nullptr) {
      uint4 other = sum.raw();
      load_if(halves.there[i], other, static_cast<const float*>(options.residual) + at + halves.where[i]);
      sum = added(sum, Pack<float, 4>::of_raw(other));
    }
    words[i] = activate(sum).raw();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    store_if(halves.there[i], static_cast<float*>(options.y) + at + halves.where[i], words[i]);
  }
}

}  // namespace
}  // namespace normswap
