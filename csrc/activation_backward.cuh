// Derivatives of the activations that follow a norm, at the norm's output z as rounded to its dtype, by PyTorch's formulas
// (aten/src/ATen/native/cuda/Activation*Kernel.cu): nothing is stored for them.
#pragma once

#include "vec.cuh"

namespace normswap {
namespace {

__device__ inline float gelu_derivative(float z) {
  const float cdf = 0.5f * (1.f + erff(z * 0.70710678118654752440f));
  return cdf + z * expf(-0.5f * z * z) * 0.39894228040143267794f;
}

__device__ inline float gelu_tanh_derivative(float z) {
  constexpr float beta = 0.79788456080286535588f, kappa = 0.044715f;
  const float tanh = tanhf(beta * (z + kappa * z * z * z));
  return 0.5f * (1.f + tanh) + 0.5f * z * (1.f - tanh * tanh) * beta * (1.f + 3.f * kappa * z * z);
}

__device__ inline float sigmoid(float z) { return 1.f / (1.f + expf(-z)); }

// dy times the derivative at z.
template <int V, class Of>
__device__ inline void each_derived(Floats<V>& dy, const Floats<V>& z, Of of) {
#pragma unroll
  for (int j = 0; j < V; ++j) dy.v[j] = of(dy.v[j], z.v[j]);
}

// Not inlined: the formulas are long, and would cost the kernel registers where there is no activation.
template <int V>
__device__ __noinline__ Floats<V> through_activation(Floats<V> dy, Floats<V> z, ActivationArgs a) {
  switch (a.code) {
    case Activation::none: break;
    case Activation::relu: each_derived(dy, z, [](float g, float x) { return x <= 0.f ? 0.f : g; }); break;
    case Activation::silu:
      each_derived(dy, z, [](float g, float x) {
        const float s = sigmoid(x);
        return g * s * (1.f + x * (1.f - s));
      });
      break;
    case Activation::gelu: each_derived(dy, z, [](float g, float x) { return g * gelu_derivative(x); }); break;
    case Activation::gelu_tanh: each_derived(dy, z, [](float g, float x) { return g * gelu_tanh_derivative(x); }); break;
    case Activation::leaky_relu: each_derived(dy, z, [a](float g, float x) { return x > 0.f ? g : g * a.low; }); break;
    case Activation::clamp:
      each_derived(dy, z, [a](float g, float x) { return x >= a.low && x <= a.high ? g : 0.f; });
      break;
    case Activation::hardswish:
      each_derived(dy, z, [](float g, float x) { return x < -3.f ? 0.f : x <= 3.f ? g * (x / 3.f + 0.5f) : g; });
      break;
    case Activation::sigmoid:
      each_derived(dy, z, [](float g, float x) {
        const float s = sigmoid(x);
        return g * s * (1.f - s);
      });
      break;
    case Activation::tanh:
      each_derived(dy, z, [](float g, float x) {
        const float t = tanhf(x);
        return g * (1.f - t * t);
      });
      break;
  }
  return dy;
}

}  // namespace
}  // namespace normswap
