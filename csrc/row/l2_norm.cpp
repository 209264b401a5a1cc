// l2_norm of rows on CUDA tensors: checks and launch.
#include "row/row_launch.h"

namespace normswap {
namespace {

// The input's memory as rows of `cols` elements, whatever its dims.
void l2_norm_cuda(const Tensor& input, int64_t cols, double eps, Tensor out, OptionalTensor norm, int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  STD_TORCH_CHECK(eps >= 0.0, "l2_norm: eps must not be negative, got ", eps);
  RowNorm n = row_norm_of("l2_norm", input, out, cols, eps);
  n.kind = NormKind::l2;
  n.mean = floats_or_null("l2_norm", norm, input, n.rows);
  run("l2_norm", kNormWithOptions, 0, n, input, out, regime, true);
}

}  // namespace

void l2_norm_rows(const Tensor& input, int64_t cols, double eps, const Tensor& out) {
  l2_norm_cuda(input, cols, eps, out, std::nullopt, 0);
}

namespace {

OptionalTensor frobenius_norm_or_none(const Tensor& input) {
  if (!input.is_contiguous() || !has_served_dtype(input) || input.numel() == 0) return std::nullopt;
  const OptionalTensor out = unfilled_like(input);
  if (out.has_value()) l2_norm_cuda(input, input.numel(), 0.0, *out, std::nullopt, 0);
  return out;
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("l2_norm", TORCH_BOX(&normswap::l2_norm_cuda));
  m.impl("frobenius_norm_or_none", TORCH_BOX(&normswap::frobenius_norm_or_none));
}
