// Conversions and vector accesses.
#pragma once

#include <cstdint>
#include <type_traits>

#include "abi/kernels.h"
#include "device/half.cuh"

namespace normswap {

// The 16 bytes from byte `shift` (a multiple of Step, below 16) on of the 32 in (low, high).
template <int Step>
__device__ inline uint4 window(const uint4& low, const uint4& high, int shift) {
  const bool two = shift & 8, one = shift & 4;
  const unsigned a0 = two ? low.z : low.x, a1 = two ? low.w : low.y, a2 = two ? high.x : low.z;
  const unsigned a3 = two ? high.y : low.w, a4 = two ? high.z : high.x, a5 = two ? high.w : high.y;
  const unsigned b0 = one ? a1 : a0, b1 = one ? a2 : a1, b2 = one ? a3 : a2, b3 = one ? a4 : a3, b4 = one ? a5 : a4;
  if constexpr (Step % 4 == 0) return {b0, b1, b2, b3};
  const int bits = shift % 4 * 8;
  return {__funnelshift_r(b0, b1, bits), __funnelshift_r(b1, b2, bits), __funnelshift_r(b2, b3, bits),
          __funnelshift_r(b3, b4, bits)};
}

// The same from byte `rest` of word Word on; `rest`: 0, 2 or 4; unused where elements are words.
template <int Word, int Step>
__device__ inline uint4 window_at(const uint4& low, const uint4& high, int rest) {
  const unsigned w[9] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w, 0u};
  if constexpr (Step % 4 == 0) return {w[Word], w[Word + 1], w[Word + 2], w[Word + 3]};
  const unsigned bytes = rest == 0 ? 0x3210 : rest == 2 ? 0x5432 : 0x7654;
  return {__byte_perm(w[Word], w[Word + 1], bytes), __byte_perm(w[Word + 1], w[Word + 2], bytes),
          __byte_perm(w[Word + 2], w[Word + 3], bytes), __byte_perm(w[Word + 3], w[Word + 4], bytes)};
}

// Calls with(the number of whole words in `shift` bytes), a constant. By branches: for a shift that the warp has in common.
template <class With>
__device__ inline void by_words(int shift, With with) {
  if (shift & 8) {
    if (shift & 4) {
      with(std::integral_constant<int, 3>{});
    } else {
      with(std::integral_constant<int, 2>{});
    }
  } else if (shift & 4) {
    with(std::integral_constant<int, 1>{});
  } else {
    with(std::integral_constant<int, 0>{});
  }
}

// Loads 16 bytes where `there`; `words` stay as they are elsewhere. One instruction with a predicate, which the compiler
// would not make of a branch. Nothing may write there while the kernel runs. Volatile: not before
// follow_predecessor (launch.h).
__device__ inline void load_if(bool there, uint4& words, const void* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\t@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
               : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
               : "l"(p), "r"(static_cast<int>(there)));
}

// The same of 4 bytes, or of 2 and zeros.
__device__ inline void load_if(bool there, unsigned& word, const void* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t@p ld.global.nc.b32 %0, [%1];\n\t}"
               : "+r"(word)
               : "l"(p), "r"(static_cast<int>(there)));
}
__device__ inline void load_half_if(bool there, unsigned& word, const void* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t@p ld.global.nc.u16 %0, [%1];\n\t}"
               : "+r"(word)
               : "l"(p), "r"(static_cast<int>(there)));
}

// The first `count` of the elements of a vector, where there are fewer or none, and zeros; the rest is not read.
template <class T>
__device__ inline uint4 load_first(const T* vector, int count) {
  constexpr int per = 4 / static_cast<int>(sizeof(T));  // of a word
  unsigned words[4] = {}, half = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) load_if((i + 1) * per <= count, words[i], vector + i * per);
  if constexpr (per == 2) {
    load_half_if(count > 0 && count % 2 != 0, half, vector + (count - 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = count == 2 * i + 1 ? half : words[i];
  }
  return {words[0], words[1], words[2], words[3]};
}

// Tells the compiler that nothing is known of the words: it must not keep what it made of them (16-bit elements as floats
// take twice the registers) from one use to the next.
__device__ inline void forget(uint4& words) {
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

// One instruction, which an assignment is not always.
__device__ inline void store_words(void* p, const uint4& words) { __stwb(static_cast<uint4*>(p), words); }

// Stores 16 bytes where `there`. One instruction for the warp, which a branch might not be.
__device__ inline void store_if(bool there, void* p, const uint4& words) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\t@p st.global.v4.b32 [%4], {%0, %1, %2, %3};\n\t}" ::"r"(
                   words.x),
               "r"(words.y), "r"(words.z), "r"(words.w), "l"(p), "r"(static_cast<int>(there))
               : "memory");
}

// Four of the values of this lane's vector and four of the one beside it, which the lane beside it has: what the lanes of a
// warp store at once then fills whole sectors of 32 bytes, of which the L2 takes half a one no faster.
struct Halves {
  float values[2][4];
  int where[2];  // from this lane's first value on
  bool there[2];
  // `mine`: whether the lane's vector is there. All lanes of the warp must call.
  __device__ Halves(const float (&of)[8], bool mine) {
    const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float got = __shfl_xor_sync(0xffffffffu, odd ? of[j] : of[4 + j], 1);
      values[0][j] = odd ? got : of[j];
      values[1][j] = odd ? of[4 + j] : got;
    }
    const bool beside = __shfl_xor_sync(0xffffffffu, static_cast<int>(mine), 1) != 0;
    where[0] = odd ? -4 : 0, where[1] = odd ? 4 : 8;
    there[0] = odd ? beside : mine, there[1] = odd ? mine : beside;
  }
};

// Rounded to T. A bfloat16 in the upper half of a word is its own float; converted alone it would take a slow instruction.
template <class T>
__device__ inline float rounded(float v) {
  if constexpr (std::is_same_v<T, BFloat16>) return __uint_as_float(pair_bits<T>(0.f, v));
  return to_float(from_float<T>(v));
}

// The elements of 16 bytes. Words at a time: the compiler takes a bfloat16 from the upper half of a word in two steps.
template <class T, int V>
__device__ inline void floats_of(const uint4& vector, float (&out)[V]) {
  static_assert(V == 16 / sizeof(T));
  const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      out[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = floats_of_pair<T>(words[i]);
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
}

// 16 bytes of values each rounded once; 16-bit ones in pairs, which is one instruction. As words throughout: the compiler
// stores elements of their own type one by one at times.
template <class T, int V>
__device__ inline uint4 words_of(const float (&values)[V]) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2) {
      words[i] = pair_bits<T>(values[2 * i], values[2 * i + 1]);
    } else {
      words[i] = __float_as_uint(values[i]);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

template <int Bytes>
struct RawOf;
template <>
struct RawOf<2> {
  using type = unsigned short;
};
template <>
struct RawOf<4> {
  using type = unsigned int;
};
template <>
struct RawOf<8> {
  using type = uint2;
};
template <>
struct RawOf<16> {
  using type = uint4;
};

// V values that move together.
template <int V>
struct alignas(V % 4 == 0 ? 16 : V * sizeof(float)) Floats {
  float v[V];
};

// V elements that move together; addresses are multiples of the pack's size.
template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  using Raw = typename RawOf<sizeof(T) * V>::type;
  T v[V];

  // Streaming hints (ld.cs, st.cs) would cost 1 to 3% of the memory's rate on an H100.
  __device__ static Pack load(const T* p) { return of_raw(*reinterpret_cast<const Raw*>(p)); }

  __device__ static Pack of_raw(Raw raw) {
    Pack pack;
    *reinterpret_cast<Raw*>(&pack) = raw;
    return pack;
  }

  __device__ Raw raw() const { return *reinterpret_cast<const Raw*>(this); }

  // See forget, above.
  __device__ void forget() {
    if constexpr (sizeof(Raw) == 2) {
      asm volatile("" : "+h"(*reinterpret_cast<unsigned short*>(this)));
    } else {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Raw) / 4); ++i) {
        asm volatile("" : "+r"(reinterpret_cast<unsigned*>(this)[i]));
      }
    }
  }

  // Each value rounded once; 16-bit ones in pairs, which is one instruction.
  __device__ static Pack of(const float (&values)[V]) {
    Pack pack;
    if constexpr (sizeof(T) == 2 && V % 2 == 0) {
#pragma unroll
      for (int j = 0; j < V; j += 2) *reinterpret_cast<unsigned*>(&pack.v[j]) = pair_bits<T>(values[j], values[j + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) pack.v[j] = from_float<T>(values[j]);
    }
    return pack;
  }

  __device__ void store(T* p) const { *reinterpret_cast<Raw*>(p) = raw(); }
};

// Element i of a per-channel vector, whatever its dtype. For values read once a thread, not for inner loops.
__device__ inline float channel_value(const ChannelVector& vector, int64_t i, float absent) {
  if (vector.data == nullptr) return absent;
  switch (vector.dtype) {
    case DType::f32: return static_cast<const float*>(vector.data)[i];
    case DType::f16: return to_float(static_cast<const Half*>(vector.data)[i]);
    default: return to_float(static_cast<const BFloat16*>(vector.data)[i]);
  }
}

// The same by loads that no branch keeps apart, of what nothing writes while the kernel runs.
__device__ inline float loaded_parameter(const ChannelVector& vector, int64_t i, float absent) {
  const bool there = vector.data != nullptr, whole = vector.dtype == DType::f32;
  unsigned word = 0;
  load_if(there && whole, word, static_cast<const float*>(vector.data) + i);
  load_half_if(there && !whole, word, static_cast<const unsigned short*>(vector.data) + i);
  const float half = to_float(Half{static_cast<unsigned short>(word)});
  const float value = __uint_as_float(whole ? word : word << 16);
  return !there ? absent : vector.dtype == DType::f16 ? half : value;
}

// Elements i, ..., i + V - 1, or `absent` ones; the dtype is asked once, so that the loads overlap.
template <class W, int V>
__device__ inline void channel_values_of(const void* data, int64_t i, float (&out)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = to_float(static_cast<const W*>(data)[i + j]);
}

template <int V>
__device__ inline void channel_values(const ChannelVector& vector, int64_t i, bool inside, float absent, float (&out)[V]) {
  if (vector.data == nullptr || !inside) {
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = absent;
    return;
  }
  switch (vector.dtype) {
    case DType::f32: return channel_values_of<float>(vector.data, i, out);
    case DType::f16: return channel_values_of<Half>(vector.data, i, out);
    default: return channel_values_of<BFloat16>(vector.data, i, out);
  }
}

__device__ inline void set_channel_value(const ChannelVector& vector, int64_t i, float value) {
  void* data = const_cast<void*>(vector.data);
  switch (vector.dtype) {
    case DType::f32: static_cast<float*>(data)[i] = value; break;
    case DType::f16: static_cast<Half*>(data)[i] = from_float<Half>(value); break;
    default: static_cast<BFloat16*>(data)[i] = from_float<BFloat16>(value);
  }
}

// Division by one number many times, correctly rounded. Where the divisor is neither tiny nor huge a product with its
// reciprocal and one correction do it (Markstein 1990), without the branches of a division; but for dividends so small
// that the correction has no bits left. AllFast: fast() is known to hold.
struct Divisor {
  float value, reciprocal;
  __device__ static Divisor of(float value) { return {value, __frcp_rn(value)}; }
  __device__ bool fast() const { return value > 0x1p-60f && value < 0x1p60f; }
  template <bool AllFast>
  __device__ float divide(float x) const {
    if (!AllFast && !fast()) return __fdiv_rn(x, value);
    const float quotient = __fmul_rn(x, reciprocal);
    return fmaf(fmaf(-value, quotient, x), reciprocal, quotient);
  }
  // Of squares or magnitudes; an infinite sum of them stays so, where the correction of the quotient would make NaN of it.
  __device__ float mean_of(float sum) const {
    const float quotient = divide<true>(sum);
    return sum < INFINITY ? quotient : sum;
  }
};

// Whether what l1_norm and l2_norm divide by follows mean |x| or the norm, or is the minimum.
template <class T>
__device__ inline bool l1_follows(float mean, double minimum) {
  return !(to_float(from_float<T>(mean)) < to_float(from_float<T>(static_cast<float>(minimum))));
}

// What l1_norm divides by: max(mean, minimum) + eps, every step rounded to T, as the expression of PyTorch ops does.
template <class T>
__device__ inline float l1_divisor(float mean, double eps, double minimum) {
  const float least = l1_follows<T>(mean, minimum) ? mean : static_cast<float>(minimum);
  return to_float(from_float<T>(__fadd_rn(to_float(from_float<T>(least)), static_cast<float>(eps))));
}

// What l2_norm divides by: max(norm, eps), both rounded to T, as the expression does.
template <class T>
__device__ inline float l2_divisor(float norm, double eps) {
  return to_float(from_float<T>(l1_follows<T>(norm, eps) ? norm : static_cast<float>(eps)));
}

}  // namespace normswap
