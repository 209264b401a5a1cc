// What distinguishes the backward of the row norms: a policy names what is normalised (xhat), the sums over a row that its
// gradient needs, and how an element's is made of them. g is dy times the weight, N the elements of a row.
#pragma once

#include "device/vec.cuh"
#include "row_backward/row_backward.h"

namespace normswap {
namespace {

// What a row's gradient is made of, once its sums are known.
struct Coefficients {
  float of_g, of_x, constant;
};

// Of layer_norm and rms_norm; `shift`: -mean rstd.
struct RowMoments {
  float mean, rstd, shift;
};

// y = xhat w + b: dx = rstd (g - mean(g) - xhat mean(g xhat)), dw = sum dy xhat, db = sum dy.
struct LayerNormBackward {
  using Row = RowMoments;
  static constexpr int sums = 2;
  static constexpr bool has_weight = true, has_bias = true;
  template <class X>
  __device__ static Row row(float mean, float rstd, const RowBackward&) {
    return {mean, rstd, -__fmul_rn(mean, rstd)};
  }
  __device__ static float normalised(float x, Row row) { return fmaf(x, row.rstd, row.shift); }
  template <class X>
  __device__ static float output(float xhat, float w, float b, const RowBackward&) {
    return fmaf(xhat, w, b);
  }
  __device__ static void add(float g, float xhat, float* sum, float* other) {
    *sum = fmaf(g, xhat, *sum);
    *other = __fadd_rn(*other, g);
  }
  __device__ static Coefficients finish(float sum, float other, float by_n, Row row) {
    const float of_x = -__fmul_rn(__fmul_rn(__fmul_rn(sum, by_n), row.rstd), row.rstd);
    return {row.rstd, of_x, -fmaf(of_x, row.mean, __fmul_rn(__fmul_rn(other, by_n), row.rstd))};
  }
  __device__ static float gradient(float x, float g, Row, Coefficients c) {
    return fmaf(g, c.of_g, fmaf(x, c.of_x, c.constant));
  }
};

// y = xhat w, w the weight and its offset: dx = rstd (g - xhat mean(g xhat)), dw = sum dy xhat. A rounding of xhat before
// the weight is taken for the identity.
struct RMSNormBackward {
  using Row = RowMoments;
  static constexpr int sums = 1;
  static constexpr bool has_weight = true, has_bias = false;
  template <class X>
  __device__ static Row row(float, float rstd, const RowBackward&) {
    return {0.f, rstd, 0.f};
  }
  __device__ static float normalised(float x, Row row) { return __fmul_rn(x, row.rstd); }
  template <class X>
  __device__ static float output(float xhat, float w, float, const RowBackward& n) {
    return __fmul_rn(n.cast_before_weight ? rounded<X>(xhat) : xhat, w);
  }
  __device__ static void add(float g, float xhat, float* sum, float*) { *sum = fmaf(g, xhat, *sum); }
  __device__ static Coefficients finish(float sum, float, float by_n, Row row) {
    return {row.rstd, -__fmul_rn(__fmul_rn(__fmul_rn(sum, by_n), row.rstd), row.rstd), 0.f};
  }
  __device__ static float gradient(float x, float g, Row, Coefficients c) { return fmaf(g, c.of_g, __fmul_rn(x, c.of_x)); }
};

// y = x / d, d = max(m, minimum) + eps with m = mean |x|: dx = dy / d - sign(x) mean(dy y) / d, and dx = dy / d where m is
// below the minimum.
struct L1NormBackward {
  // Divisions are products: by a power of two that brings d near 1 where its reciprocal is none, then by that.
  struct Row {
    float scale, reciprocal;
    bool follows;
  };
  static constexpr int sums = 1;
  static constexpr bool has_weight = false, has_bias = false;
  template <class X>
  __device__ static Row row(float mean, float, const RowBackward& n) {
    const float d = l1_divisor<X>(mean, n.eps, n.minimum);
    const float scale = d < 0x1p-60f ? 0x1p64f : d > 0x1p60f ? 0x1p-64f : 1.f;
    return {scale, __frcp_rn(__fmul_rn(d, scale)), l1_follows<X>(mean, n.minimum)};
  }
  __device__ static float normalised(float x, const Row& row) { return __fmul_rn(__fmul_rn(x, row.scale), row.reciprocal); }
  __device__ static void add(float g, float xhat, float* sum, float*) { *sum = fmaf(g, xhat, *sum); }
  __device__ static Coefficients finish(float sum, float, float by_n, const Row& row) {
    return {0.f, row.follows ? normalised(__fmul_rn(sum, by_n), row) : 0.f, 0.f};
  }
  __device__ static float gradient(float x, float g, const Row& row, Coefficients c) {
    const float sign = x == 0.f ? 0.f : copysignf(1.f, x);  // whose product with NaN is NaN
    return __fsub_rn(normalised(g, row), sign * c.of_x);
  }
};

}  // namespace
}  // namespace normswap
