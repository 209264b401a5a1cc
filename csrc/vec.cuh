// Conversions and vector accesses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels.h"

namespace normswap {

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
  return v;
}
template <>
__device__ inline __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
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

// V values in registers.
template <int V>
struct Floats {
  float v[V];
};

// V elements that move together; addresses are multiples of the pack's size.
template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  using Raw = typename RawOf<sizeof(T) * V>::type;
  T v[V];

  // Read once: keep it out of the way of what is read again.
  __device__ static Pack load(const T* p) {
    Pack pack;
    *reinterpret_cast<Raw*>(&pack) = __ldcs(reinterpret_cast<const Raw*>(p));
    return pack;
  }

  // For operands read again by other rows (weights): keep them in the caches.
  __device__ static Pack load_cached(const T* p) {
    Pack pack;
    *reinterpret_cast<Raw*>(&pack) = __ldg(reinterpret_cast<const Raw*>(p));
    return pack;
  }

  __device__ void store(T* p) const { __stcs(reinterpret_cast<Raw*>(p), *reinterpret_cast<const Raw*>(this)); }
};

// Element i of a per-channel vector, whatever its dtype. For values read once a thread, not for inner loops.
__device__ inline float channel_value(const ChannelVector& vector, int64_t i, float absent) {
  if (vector.data == nullptr) return absent;
  switch (vector.dtype) {
    case DType::f32: return static_cast<const float*>(vector.data)[i];
    case DType::f16: return __half2float(static_cast<const __half*>(vector.data)[i]);
    default: return __bfloat162float(static_cast<const __nv_bfloat16*>(vector.data)[i]);
  }
}

__device__ inline void set_channel_value(const ChannelVector& vector, int64_t i, float value) {
  void* data = const_cast<void*>(vector.data);
  switch (vector.dtype) {
    case DType::f32: static_cast<float*>(data)[i] = value; break;
    case DType::f16: static_cast<__half*>(data)[i] = __float2half_rn(value); break;
    default: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
  }
}

}  // namespace normswap
