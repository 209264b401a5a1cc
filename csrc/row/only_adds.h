// Which norms with options need no kernels of their own.
#pragma once

#include "abi/kernels.h"

namespace normswap {

// Whether the norm is one that may stand alone, but for a residual, which its kernels can add if rows begin at vectors and are
// not split: see kAddsResidual. Without weights and biases they have +0 where the norm behind the residual has -0.
inline bool only_adds(const RowNorm& n) {
  const RowOptions& o = n.options;
  const bool norm = n.kind == NormKind::rms || (n.kind == NormKind::layer && (n.weight != nullptr || n.bias != nullptr));
  return norm && o.scale == nullptr && o.activation.code == Activation::none && (n.out_dtype == n.dtype || n.dtype == DType::f32);
}

}  // namespace normswap
