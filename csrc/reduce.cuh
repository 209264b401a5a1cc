// Statistics and their reductions. Every operation that enters a statistic is spelled with a rounding intrinsic or fmaf,
// so that the compiler contracts it alike in every kernel and the bits of a row do not depend on the regime.
#pragma once

#include <cuda_runtime.h>

namespace normswap {

// Mean and sum of squared differences from it over n elements; n == 0: nothing.
struct Moments {
  float mean, m2, n;
};

// Chan, Golub & LeVeque 1979. `a` precedes `b`.
__device__ inline Moments merge(const Moments& a, const Moments& b) {
  if (b.n == 0.f) return a;
  const float n = __fadd_rn(a.n, b.n);
  const float share = __fdiv_rn(b.n, n);
  const float delta = __fsub_rn(b.mean, a.mean);
  const float between = __fmul_rn(__fmul_rn(delta, delta), __fmul_rn(a.n, share));
  return {fmaf(delta, share, a.mean), __fadd_rn(__fadd_rn(a.m2, b.m2), between), n};
}

// A plain sum (of squares, of magnitudes).
struct Sum {
  float sum;
};

__device__ inline Sum merge(const Sum& a, const Sum& b) { return {__fadd_rn(a.sum, b.sum)}; }

__device__ inline Moments shuffle_xor(const Moments& s, int mask) {
  return {__shfl_xor_sync(0xffffffffu, s.mean, mask), __shfl_xor_sync(0xffffffffu, s.m2, mask),
          __shfl_xor_sync(0xffffffffu, s.n, mask)};
}

__device__ inline Sum shuffle_xor(const Sum& s, int mask) { return {__shfl_xor_sync(0xffffffffu, s.sum, mask)}; }

// Sum over the Lanes (8 or 32) lanes of a chunk; every lane holds it. All 32 lanes of the warp must call.
template <int Lanes>
__device__ inline float lanes_sum(float v) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, mask));
  return v;
}

// Binary tree over the 32 lanes' statistics by lane index; every lane holds the result.
template <class Stat>
__device__ inline Stat warp_tree(Stat s) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const Stat other = shuffle_xor(s, mask);
    s = lane & mask ? merge(other, s) : merge(s, other);
  }
  return s;
}

// Binary tree over parts[0, count), count <= 128, by index; every lane of the calling warp holds the result.
template <class Stat>
__device__ inline Stat tree_of(const Stat* parts, int count) {
  const int lane = threadIdx.x % 32;
  const auto at = [&](int i) { return i < count ? parts[i] : Stat{}; };
  if (count <= 32) return warp_tree(at(lane));
  return warp_tree(merge(merge(at(4 * lane), at(4 * lane + 1)), merge(at(4 * lane + 2), at(4 * lane + 3))));
}

// The same tree in place in memory; the whole block calls, parts[0] is the result after the last barrier.
template <class Stat>
__device__ inline void tree_in_place(Stat* parts, int64_t count) {
  for (int64_t stride = 1; stride < count; stride *= 2) {
    for (int64_t i = threadIdx.x * 2 * stride; i + stride < count; i += blockDim.x * 2 * stride) {
      parts[i] = merge(parts[i], parts[i + stride]);
    }
    __syncthreads();
  }
}

}  // namespace normswap
