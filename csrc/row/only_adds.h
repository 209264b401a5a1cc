// Which norms with options need no kernels of their own.
#pragma once

#include "abi/kernels.h"
#include "plan/row_plan.h"

namespace normswap {

// Whether the norm is one that may stand alone, but for a residual, which its kernels can add if rows begin at vectors and are
// not split: see kAddsResidual. Without weights and biases they have +0 where the norm behind the residual has -0.
inline bool only_adds(const RowNorm& n) {
  const RowOptions& o = n.options;
  const bool norm = n.kind == NormKind::rms || (n.kind == NormKind::layer && (n.weight != nullptr || n.bias != nullptr));
  return norm && o.scale == nullptr && o.activation.code == Activation::none && (n.out_dtype == n.dtype || n.dtype == DType::f32);
}

// Whether kernels that do rows so add a residual of 16 bits to float32, of rows that begin at vectors: those that have a row in
// one block.
inline bool adds_mixed(Regime regime) {
  return regime == Regime::subwarp || regime == Regime::warp || regime == Regime::block;
}

}  // namespace normswap
