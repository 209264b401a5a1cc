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

// Sums over the Lanes (8 or 32) lanes of a chunk, of several rows at once; every lane holds them. All 32 lanes of the
// warp must call.
template <int Lanes, int Rows>
__device__ inline void lanes_sum(float (&v)[Rows]) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) v[r] = __fadd_rn(v[r], __shfl_xor_sync(0xffffffffu, v[r], mask));
  }
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

// Binary tree over parts[first, first + Count), those from `end` on being absent.
template <int Count, class Stat>
__device__ inline Stat subtree(const Stat* parts, int first, int end) {
  if constexpr (Count == 1) {
    return first < end ? parts[first] : Stat{};
  } else {
    return merge(subtree<Count / 2>(parts, first, end), subtree<Count / 2>(parts, first + Count / 2, end));
  }
}

// Binary tree over parts[0, count), count <= 512, by index; every lane of the calling warp holds the result.
template <class Stat>
__device__ inline Stat tree_of(const Stat* parts, int count) {
  const int lane = threadIdx.x % 32;
  if (count <= 32) return warp_tree(subtree<1>(parts, lane, count));
  if (count <= 128) return warp_tree(subtree<4>(parts, 4 * lane, count));
  return warp_tree(subtree<16>(parts, 16 * lane, count));
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

// Waits until all `blocks` blocks of a team have called for the `round`-th time (from 1). `count` starts at 0. What a
// block wrote before is then visible to all of the team. The blocks must all be running: cooperative launch.
__device__ inline void team_barrier(unsigned* count, unsigned blocks, unsigned round) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(count, 1u);
    while (*static_cast<volatile unsigned*>(count) < blocks * round) {
    }
    __threadfence();
  }
  __syncthreads();
}

}  // namespace normswap
