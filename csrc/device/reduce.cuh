// Statistics and their reductions. Every operation that enters a statistic is spelled with a rounding intrinsic or fmaf,
// so that the compiler contracts it alike in every kernel and the bits of a row do not depend on the regime.
#pragma once

#include <cuda_runtime.h>

#include "device/vec.cuh"
#include "plan/plan.h"

namespace normswap {
namespace {

constexpr unsigned kWholeWarp = 0xffffffffu;

// Mean and sum of squared differences from it over n elements; n == 0: nothing.
struct Moments {
  float mean, m2, n;
};

// A plain sum (of squares, of magnitudes).
struct Sum {
  float sum;
};

// Elements of a row and its pieces: known to the host, so that statistics need not add them up.
struct RowSizes {
  Divisor row, chunk, last_chunk;
  float group, last_group;
  int groups;  // of the row
  __device__ float of_group(int index) const {
    return index < groups - 1 ? group : index == groups - 1 ? last_group : 0.f;
  }
};

// Sums over the Lanes (8, 16 or 32) lanes of a chunk, of several rows at once; every lane holds them. All 32 lanes of the
// warp must call.
template <int Lanes, int Rows>
__device__ inline void lanes_sum(float (&v)[Rows]) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) v[r] = __fadd_rn(v[r], __shfl_xor_sync(kWholeWarp, v[r], mask));
  }
}

// --- uniting statistics ------------------------------------------------------------------------------------------
// The statistics of a row's chunks are united in runs of kGroup chunks by index, those of the groups all at once. A
// sum over statistics is always a binary tree by index with 0 for what is absent, whoever takes it: lanes holding one
// or several each, or threads working in memory.

// Binary tree over Count values.
template <int Count>
__device__ inline float tree(const float (&v)[Count]) {
  if constexpr (Count == 1) {
    return v[0];
  } else {
    float half[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) half[i] = __fadd_rn(v[2 * i], v[2 * i + 1]);
    return tree(half);
  }
}

// The same over what the lanes hold: runs of `To` lanes, of which every From consecutive ones hold the same Count values.
template <int From, int To, int Count>
__device__ inline float lanes_tree(const float (&v)[Count]) {
  float sum = tree(v);
#pragma unroll
  for (int mask = From; mask < To; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kWholeWarp, sum, mask));
  return sum;
}

template <int From, int To, int Count>
__device__ inline Sum unite(const Sum (&s)[Count], float) {
  float v[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) v[i] = s[i].sum;
  return {lanes_tree<From, To>(v)};
}

// Means relative to the first one, which rounds less where they are large; then the squares about their mean. `size`:
// elements of all.
template <int From, int To, int Count>
__device__ inline Moments unite(const Moments (&s)[Count], float size) {
  const float pivot = To == 1 ? s[0].mean : __shfl_sync(kWholeWarp, s[0].mean, threadIdx.x % 32 & ~(To - 1));
  float v[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) v[i] = __fmul_rn(s[i].n, __fsub_rn(s[i].mean, pivot));
  const float from_pivot = lanes_tree<From, To>(v);
  const float mean = size > 0.f ? __fadd_rn(pivot, __fdiv_rn(from_pivot, size)) : 0.f;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const float d = __fsub_rn(s[i].mean, mean);
    v[i] = s[i].n > 0.f ? fmaf(__fmul_rn(s[i].n, d), d, s[i].m2) : 0.f;
  }
  return {mean, lanes_tree<From, To>(v), size};
}

template <int From, int To, class Stat>
__device__ inline Stat unite_one(const Stat& s, float size) {
  const Stat one[1] = {s};
  return unite<From, To>(one, size);
}

// parts[first, first + Count), those from `end` on being absent.
template <int Count, class Stat>
__device__ inline void gather(Stat (&s)[Count], const Stat* parts, int first, int end) {
#pragma unroll
  for (int i = 0; i < Count; ++i) s[i] = first + i < end ? parts[first + i] : Stat{};
}

// A row from the statistics of its `count` <= 32 * Each chunks; every lane of the calling warp holds the result.
template <int Each, class Stat>
__device__ inline Stat unite_each(const Stat* parts, int count, const RowSizes& sizes) {
  constexpr int run = kGroup / Each;
  const int first = static_cast<int>(threadIdx.x) % 32 * Each;
  Stat s[Each];
  gather(s, parts, first, count);
  return unite_one<run, 32>(unite<1, run>(s, sizes.of_group(first / kGroup)), sizes.row.value);
}

// What uniting the only group of a row with nothing gives: itself, but for what is not finite.
__device__ inline Sum with_nothing(const Sum& s) { return s; }
__device__ inline Moments with_nothing(const Moments& s) {
  const float nothing = __fsub_rn(s.mean, s.mean);
  return {__fadd_rn(s.mean, nothing), __fadd_rn(s.m2, nothing), s.n};
}

// The same for count <= kGroup, with fewer steps from lane to lane.
template <class Stat>
__device__ inline Stat unite_group(const Stat* parts, int count, const RowSizes& sizes) {
  constexpr int each = 4;
  Stat s[each];
  if (count <= each) {
    gather(s, parts, 0, count);
    return with_nothing(unite<1, 1>(s, sizes.row.value));
  }
  gather(s, parts, static_cast<int>(threadIdx.x) % (kGroup / each) * each, count);
  return with_nothing(unite<1, kGroup / each>(s, sizes.row.value));
}

// The same for count <= 512 chunks.
template <class Stat>
__device__ inline Stat unite_chunks(const Stat* parts, int count, const RowSizes& sizes) {
  if (count <= 32) return unite_each<1>(parts, count, sizes);
  if (count <= 128) return unite_each<4>(parts, count, sizes);
  return unite_each<16>(parts, count, sizes);
}

// A row from the statistics of its `count` <= 32 * Each groups; every lane of the calling warp holds the result.
template <int Each, class Stat>
__device__ inline Stat unite_groups_of(const Stat* parts, int count, const RowSizes& sizes) {
  Stat s[Each];
  gather(s, parts, static_cast<int>(threadIdx.x) % 32 * Each, count);
  return unite<1, 32>(s, sizes.row.value);
}

// The same for count <= 512.
template <class Stat>
__device__ inline Stat unite_groups(const Stat* parts, const RowSizes& sizes) {
  const int count = sizes.groups;
  if (count <= 32) return unite_groups_of<1>(parts, count, sizes);
  if (count <= 128) return unite_groups_of<4>(parts, count, sizes);
  if (count <= 256) return unite_groups_of<8>(parts, count, sizes);
  return unite_groups_of<16>(parts, count, sizes);
}

// The tree in memory, of any number of values; the whole block calls. Spoils v.
__device__ inline float tree_in_memory(float* v, int64_t count) {
  __syncthreads();
  for (int64_t stride = 1; stride < count; stride *= 2) {
    for (int64_t i = threadIdx.x * 2 * stride; i + stride < count; i += blockDim.x * 2 * stride) {
      v[i] = __fadd_rn(v[i], v[i + stride]);
    }
    __syncthreads();
  }
  const float sum = v[0];
  __syncthreads();
  return sum;
}

// A row from the statistics of any number of groups, with room for a float each; the whole block calls.
__device__ inline Sum unite_in_memory(const Sum* parts, float* room, const RowSizes& sizes) {
  for (int64_t i = threadIdx.x; i < sizes.groups; i += blockDim.x) room[i] = parts[i].sum;
  return {tree_in_memory(room, sizes.groups)};
}

__device__ inline Moments unite_in_memory(const Moments* parts, float* room, const RowSizes& sizes) {
  const float pivot = parts[0].mean;
  for (int64_t i = threadIdx.x; i < sizes.groups; i += blockDim.x) {
    room[i] = __fmul_rn(parts[i].n, __fsub_rn(parts[i].mean, pivot));
  }
  const float mean = __fadd_rn(pivot, __fdiv_rn(tree_in_memory(room, sizes.groups), sizes.row.value));
  for (int64_t i = threadIdx.x; i < sizes.groups; i += blockDim.x) {
    const float d = __fsub_rn(parts[i].mean, mean);
    room[i] = fmaf(__fmul_rn(parts[i].n, d), d, parts[i].m2);
  }
  return {mean, tree_in_memory(room, sizes.groups), sizes.row.value};
}

// --- blocks that share a row -------------------------------------------------------------------------------------
// What a block tells the others carries its own flag: each float is stored in one 8-byte word with the number of the
// round, from 1 on, and who needs it polls the word itself. That is one trip to the L2 and back; a barrier takes five,
// and waits for the stores of the round before. The words start as zeros; the blocks must all be running: cooperative
// launch.

struct alignas(16) Told {
  uint64_t words[2];
};

__device__ inline void tell(Told* to, float2 what, unsigned round) {
  const uint64_t flag = static_cast<uint64_t>(round) << 32;
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(flag | __float_as_uint(what.x)),
               "l"(flag | __float_as_uint(what.y))
               : "memory");
}

// What was told at from[i * stride], i < count; of the rest: zeros.
template <int Most>
__device__ inline void hear(float2 (&what)[Most], const Told* from, int stride, int count, unsigned round) {
  for (bool all = false; !all;) {
    all = true;
#pragma unroll
    for (int i = 0; i < Most; ++i) {
      uint64_t x = static_cast<uint64_t>(round) << 32, y = x;
      if (i < count) {
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(x), "=l"(y) : "l"(from + i * stride) : "memory");
      }
      all = all && static_cast<unsigned>(x >> 32) == round && static_cast<unsigned>(y >> 32) == round;
      what[i] = {__uint_as_float(static_cast<unsigned>(x)), __uint_as_float(static_cast<unsigned>(y))};
    }
  }
}

// A statistic but for the number of elements, which who hears of it knows.
__device__ inline float2 told(const Moments& s) { return {s.mean, s.m2}; }
__device__ inline float2 told(const Sum& s) { return {s.sum, 0.f}; }
__device__ inline void understand(float2 what, float n, Moments& s) { s = {what.x, what.y, n}; }
__device__ inline void understand(float2 what, float, Sum& s) { s = {what.x}; }

}  // namespace
}  // namespace normswap
