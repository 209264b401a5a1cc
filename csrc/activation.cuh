// Activations that follow a norm: of the norm's output as rounded to its dtype, by PyTorch's formulas
// (aten/src/ATen/native/cuda/Activation*Kernel.cu), rounded once more.
#pragma once

#include "vec.cuh"

namespace normswap {
namespace {

// x / (1 + e^-x). Where the result is rounded to 16 bits, approximations of 2^x and 1 / x are as good, and so are zeros for
// what they do not represent.
template <class T>
__device__ inline float silu(float x) {
  if constexpr (sizeof(T) == 4) return x / (1.f + expf(-x));
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504088896340736f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return x * inverse;
}

__device__ inline float gelu(float x) { return x * 0.5f * (1.f + erff(x * 0.70710678118654752440f)); }

__device__ inline float gelu_tanh(float x) {
  constexpr float beta = 1.41421356237309504880f * 1.12837916709551257390f * 0.5f;
  const float cube = x * x * x;
  return 0.5f * x * (1.f + tanhf(beta * (x + 0.044715f * cube)));
}

template <class T, int V, class Of>
__device__ inline Pack<T, V> each_rounded(const Pack<T, V>& pack, Of of) {
  float out[V];
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = of(to_float(pack.v[j]));
  return Pack<T, V>::of(out);
}

// Not inlined: the formulas are long and used in many places, where they would cost registers too.
template <class T, int V>
__device__ __noinline__ Pack<T, V> activated_vector(Pack<T, V> pack, Activation activation) {
  switch (activation) {
    case Activation::relu: return each_rounded(pack, [](float x) { return x < 0.f ? 0.f : x; });  // NaN stays
    case Activation::silu: return each_rounded(pack, silu<T>);
    case Activation::gelu: return each_rounded(pack, gelu);
    case Activation::gelu_tanh: return each_rounded(pack, gelu_tanh);
    default: return pack;
  }
}

// Of these only SiLU in 16 bits is short enough to be inlined.
template <class T, int V>
__device__ inline Pack<T, V> activated(const Pack<T, V>& pack, Activation activation) {
  if (activation == Activation::none) return pack;
  if (sizeof(T) == 2 && activation == Activation::silu) return each_rounded(pack, silu<T>);
  return activated_vector(pack, activation);
}

template <class T, int V>
__device__ inline Pack<T, V> activated(const Pack<T, V>& pack, const ActivationArgs& activation) {
  return activated(pack, activation.code);
}

}  // namespace
}  // namespace normswap
