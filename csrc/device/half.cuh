// The floats of 16 bits and their conversions, by PTX: what CUDA's own headers of them hold besides takes a third of a second
// of every source that includes them.
#pragma once

#include <type_traits>

// Of libdevice. What asm makes the compiler makes anew wherever it is asked for; this once.
extern "C" __device__ float __nv_half2float(unsigned short bits);

namespace normswap {

struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(Half v) {
  return __nv_half2float(v.bits);
}
__device__ inline float to_float(BFloat16 v) { return __uint_as_float(static_cast<unsigned>(v.bits) << 16); }

// Rounded to nearest even.
template <class T>
__device__ T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
  return v;
}
template <>
__device__ inline Half from_float<Half>(float v) {
  Half rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(v));
  return rounded;
}
template <>
__device__ inline BFloat16 from_float<BFloat16>(float v) {
  BFloat16 rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(v));
  return rounded;
}

// Two of them as a word.
template <class T>
__device__ inline unsigned pair_bits(float low, float high) {
  unsigned pair;
  if constexpr (std::is_same_v<T, Half>) {
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  }
  return pair;
}

template <class T>
__device__ inline float2 floats_of_pair(unsigned pair) {
  if constexpr (std::is_same_v<T, Half>) {
    const auto low = static_cast<unsigned short>(pair), high = static_cast<unsigned short>(pair >> 16);
    return {to_float(Half{low}), to_float(Half{high})};
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

// The sums of two pairs, rounded.
template <class T>
__device__ inline unsigned added_pairs(unsigned a, unsigned b) {
  unsigned sums;
  if constexpr (std::is_same_v<T, Half>) {
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
  } else {
#if __CUDA_ARCH__ >= 900
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %3, %2;" : "=r"(sums) : "r"(a), "r"(b), "r"(0x3f803f80u));  // a * 1 + b
#endif
  }
  return sums;
}

}  // namespace normswap
