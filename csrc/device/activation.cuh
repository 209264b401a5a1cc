// Activations that follow a norm: of the norm's output as rounded to its dtype, by PyTorch's formulas
// (aten/src/ATen/native/cuda/Activation*Kernel.cu), rounded once more; and their derivatives.
#pragma once

#include "device/vec.cuh"

namespace normswap {
namespace {

// 1 / (1 + e^-x). Where the result is rounded to 16 bits, approximations of 2^x and 1 / x are as good, and so are zeros for
// what they do not represent.
template <class T>
__device__ inline float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) return 1.f / (1.f + expf(-x));
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504088896340736f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return inverse;
}

template <class T>
__device__ inline float silu(float x) {
  if constexpr (sizeof(T) == 4) return x / (1.f + expf(-x));
  return x * sigmoid<T>(x);
}

constexpr float kRootHalf = 0.70710678118654752440f;
constexpr float kGeluBeta = 1.41421356237309504880f * 1.12837916709551257390f * 0.5f, kGeluKappa = 0.044715f;

__device__ inline float gelu(float x) { return x * 0.5f * (1.f + erff(x * kRootHalf)); }

__device__ inline float gelu_tanh(float x) {
  const float cube = x * x * x;
  return 0.5f * x * (1.f + tanhf(kGeluBeta * (x + kGeluKappa * cube)));
}

__device__ inline float clamp(float x, float low, float high) { return isnan(x) ? x : fminf(fmaxf(x, low), high); }

__device__ inline float hardswish(float x) { return x * clamp(x + 3.f, 0.f, 6.f) * (1.f / 6.f); }

template <class T, int V, class Of>
__device__ inline Pack<T, V> each_rounded(const Pack<T, V>& pack, Of of) {
  float out[V];
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = of(to_float(pack.v[j]));
  return Pack<T, V>::of(out);
}

// NaN stays. Words at a time.
template <class T>
__device__ inline unsigned relu_word(unsigned word) {
  if constexpr (std::is_same_v<T, Half>) {
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(word) : "r"(0u));
  } else if constexpr (sizeof(T) == 2) {
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(word) : "r"(0u));
  } else {
    asm("max.NaN.f32 %0, %0, %1;" : "+r"(word) : "r"(0u));
  }
  return word;
}

template <class T, int V>
__device__ inline Pack<T, V> relu(const Pack<T, V>& pack) {
  Pack<T, V> out;
  if constexpr (sizeof(pack) % 4 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack) / 4); ++i) {
      reinterpret_cast<unsigned*>(&out)[i] = relu_word<T>(reinterpret_cast<const unsigned*>(&pack)[i]);
    }
  } else {
    const unsigned word = relu_word<T>(reinterpret_cast<const unsigned short&>(pack));
    reinterpret_cast<unsigned short&>(out) = static_cast<unsigned short>(word);
  }
  return out;
}

// Not inlined: the formulas are long and used in many places, where they would cost registers too.
template <class T, int V>
__device__ __noinline__ Pack<T, V> activated_vector(Pack<T, V> pack, ActivationArgs a) {
  switch (a.code) {
    case Activation::relu: return relu(pack);
    case Activation::silu: return each_rounded(pack, silu<T>);
    case Activation::gelu: return each_rounded(pack, gelu);
    case Activation::gelu_tanh: return each_rounded(pack, gelu_tanh);
    case Activation::leaky_relu: return each_rounded(pack, [&](float x) { return x > 0.f ? x : x * a.low; });
    case Activation::clamp: return each_rounded(pack, [&](float x) { return clamp(x, a.low, a.high); });
    case Activation::hardswish: return each_rounded(pack, hardswish);
    case Activation::sigmoid: return each_rounded(pack, sigmoid<T>);
    case Activation::tanh: return each_rounded(pack, [](float x) { return tanhf(x); });
    default: return pack;
  }
}

// Of these only ReLU, and SiLU in 16 bits, are short enough to be inlined.
template <class T, int V>
__device__ inline Pack<T, V> activated(const Pack<T, V>& pack, const ActivationArgs& activation) {
  if (activation.code == Activation::none) return pack;
  if (activation.code == Activation::relu) return relu(pack);
  if (sizeof(T) == 2 && activation.code == Activation::silu) return each_rounded(pack, silu<T>);
  return activated_vector(pack, activation);
}

// --- derivatives -------------------------------------------------------------------------------------------------
// Where one has a corner its value there is PyTorch's.

__device__ inline float gelu_slope(float x) {
  return fmaf(x, 0.5f * kRootHalf * 1.12837916709551257390f * expf(-0.5f * x * x), 0.5f * (1.f + erff(x * kRootHalf)));
}

__device__ inline float gelu_tanh_slope(float x) {
  const float square = x * x, t = tanhf(kGeluBeta * fmaf(kGeluKappa * square, x, x));
  const float inner = kGeluBeta * fmaf(3.f * kGeluKappa, square, 1.f);
  return fmaf(0.5f * x * (1.f - t * t), inner, 0.5f * (1.f + t));
}

template <class T>
__device__ inline float silu_slope(float x) {
  const float s = sigmoid<T>(x);
  return s * fmaf(x, 1.f - s, 1.f);
}

__device__ inline float hardswish_slope(float x) { return x <= -3.f ? 0.f : x < 3.f ? x / 3.f + 0.5f : 1.f; }

template <class T>
__device__ inline float sigmoid_slope(float x) {
  const float s = sigmoid<T>(x);
  return s * (1.f - s);
}

__device__ inline float tanh_slope(float x) {
  const float t = tanhf(x);
  return fmaf(-t, t, 1.f);
}

template <int V, class Of>
__device__ inline Floats<V> each(const Floats<V>& x, Of of) {
  Floats<V> out;
#pragma unroll
  for (int j = 0; j < V; ++j) out.v[j] = of(x.v[j]);
  return out;
}

// Not inlined, as activated_vector.
template <class T, int V>
__device__ __noinline__ Floats<V> slopes(Floats<V> x, ActivationArgs a) {
  switch (a.code) {
    case Activation::gelu: return each(x, gelu_slope);
    case Activation::gelu_tanh: return each(x, gelu_tanh_slope);
    case Activation::leaky_relu: return each(x, [&](float v) { return v > 0.f ? 1.f : a.low; });
    case Activation::clamp: return each(x, [&](float v) { return v > a.low && v < a.high ? 1.f : 0.f; });
    case Activation::hardswish: return each(x, hardswish_slope);
    case Activation::sigmoid: return each(x, sigmoid_slope<T>);
    case Activation::tanh: return each(x, tanh_slope);
    default: return each(x, [](float) { return 1.f; });
  }
}

// g times the derivative at x, elementwise; T: the dtype of x before it was a float. The two most frequent are inlined.
template <class T, int V>
__device__ inline void times_slope(const ActivationArgs& a, const float (&x)[V], float (&g)[V]) {
  if (a.code == Activation::relu) {
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = x[j] <= 0.f ? 0.f : g[j];
  } else if (a.code == Activation::silu) {
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = __fmul_rn(g[j], silu_slope<T>(x[j]));
  } else {
    constexpr int some = V < 4 ? V : 4;  // as many as a call passes in registers
#pragma unroll
    for (int first = 0; first < V; first += some) {
      Floats<some> at;
#pragma unroll
      for (int j = 0; j < some; ++j) at.v[j] = x[first + j];
      const Floats<some> slope = slopes<T>(at, a);
#pragma unroll
      for (int j = 0; j < some; ++j) g[first + j] = __fmul_rn(g[first + j], slope.v[j]);
    }
  }
}

}  // namespace
}  // namespace normswap
