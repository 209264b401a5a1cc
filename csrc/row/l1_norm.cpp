// l1_norm on CUDA tensors: checks, memory, launch.
#include <tuple>

#include "row/row_launch.h"

namespace normswap {
namespace {

constexpr RowLaunches kL1Norm{l1_norm_f32, l1_norm_f16, l1_norm_bf16};

void l1_norm_cuda(const Tensor& input, int64_t cols, double eps, double minimum, Tensor out, OptionalTensor mean_abs,
                  int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  STD_TORCH_CHECK(eps >= 0.0 && minimum >= 0.0, "l1_norm: eps and minimum must not be negative, got ", eps, " and ",
                  minimum);
  STD_TORCH_CHECK(input.is_contiguous() && out.is_contiguous(), "l1_norm: input and out must be contiguous");
  RowNorm n = row_norm_of("l1_norm", input, out, cols, eps);
  n.minimum = minimum;
  n.mean = floats_or_null("l1_norm", mean_abs, input, n.rows);
  run("l1_norm", kL1Norm, 0, n, input, out, regime);
}

// Output and statistics; neither where it declines, as the calls of row_norm.cpp do.
using Recorded = std::tuple<OptionalTensor, OptionalTensor>;

Recorded l1_norm_of(const Tensor& input, double eps, double minimum, bool statistics) {
  if (!input.is_contiguous() || !is_plain(input, input.dim() - 1, 1, std::nullopt, std::nullopt)) return {};
  const int64_t cols = input.size(-1);
  const OptionalTensor out = unfilled_like(input);
  const OptionalTensor kept = statistics ? unfilled_floats(input, input.numel() / cols) : std::nullopt;
  if (!out.has_value() || kept.has_value() != statistics) return {};
  l1_norm_cuda(input, cols, eps, minimum, *out, kept, 0);
  return {out, kept};
}

OptionalTensor l1_norm_or_none(const Tensor& input, double eps, double minimum) {
  return std::get<0>(l1_norm_of(input, eps, minimum, false));
}

Recorded l1_norm_recorded(const Tensor& input, double eps, double minimum) { return l1_norm_of(input, eps, minimum, true); }

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("l1_norm", TORCH_BOX(&normswap::l1_norm_cuda));
  m.impl("l1_norm_or_none", TORCH_BOX(&normswap::l1_norm_or_none));
  m.impl("l1_norm_recorded", TORCH_BOX(&normswap::l1_norm_recorded));
}
