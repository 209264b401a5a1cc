// batch_norm_eval on CUDA tensors: checks and launch.
#include "batch_norm.h"

#include "tensors.h"

namespace normswap {
namespace {

bool fits(const OptionalTensor& t, const Tensor& input) {
  return !t.has_value() || (t->numel() == input.size(1) && t->is_contiguous() && t->is_cuda() &&
                            t->get_device_index() == input.get_device_index());
}

ChannelVector vector_of(const OptionalTensor& t) {
  if (!t.has_value()) return {nullptr, DType::f32};
  return {t->const_data_ptr(), dtype_of(*t, "batch_norm_eval")};
}

bool same_layout(const Tensor& one, const Tensor& other) {
  if (one.dim() != other.dim() || one.scalar_type() != other.scalar_type()) return false;
  for (int64_t d = 0; d < one.dim(); ++d) {
    if (one.size(d) != other.size(d) || (one.size(d) > 1 && one.stride(d) != other.stride(d))) return false;
  }
  return one.get_device_index() == other.get_device_index();
}

// Elements between one of a channel and the next: of a dense (N, C, *) that is contiguous or channels last; 0 of others.
int64_t inner_of(const Tensor& t) {
  int64_t inner = 1;
  for (int64_t d = 2; d < t.dim(); ++d) inner *= t.size(d);
  if (t.is_contiguous()) return inner;
  int64_t expected = t.size(1);
  for (int64_t d = t.dim() - 1; d >= 2; --d) {
    if (t.size(d) > 1 && t.stride(d) != expected) return 0;
    expected *= t.size(d);
  }
  const bool outside = t.size(0) == 1 || t.stride(0) == expected;
  return outside && (t.size(1) == 1 || t.stride(1) == 1) ? 1 : 0;
}

OptionalTensor batch_norm_eval_or_none(const Tensor& input, const Tensor& running_mean, const Tensor& running_var,
                                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                       const OptionalTensor& residual, int64_t activation, double low, double high) {
  if (input.dim() < 2 || input.numel() == 0 || input.size(1) > kMaxBatchNormChannels) return std::nullopt;
  const int64_t channels = input.size(1), inner = inner_of(input);
  if (inner == 0 || (residual.has_value() && !same_layout(*residual, input))) return std::nullopt;
  for (const OptionalTensor& t : {OptionalTensor(running_mean), OptionalTensor(running_var), weight, bias}) {
    if (!fits(t, input)) return std::nullopt;
  }
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const OptionalTensor out = unfilled_like(input);
  if (!out.has_value()) return std::nullopt;
  BatchNormEval n{};
  n.x = input.const_data_ptr();
  n.residual = data_or_null(residual);
  n.y = out->mutable_data_ptr();
  n.running_mean = vector_of(running_mean);
  n.running_var = vector_of(running_var);
  n.weight = vector_of(weight);
  n.bias = vector_of(bias);
  n.elements = input.numel();
  n.channels = channels;
  n.inner = inner;
  n.eps = eps;
  n.activation = activation_of("batch_norm_eval", activation, low, high);
  n.dtype = dtype_of(input, "batch_norm_eval");
  check_launch(batch_norm_eval(n, gpu_of(input.get_device_index()).multiprocessors, stream_of(input)));
  return out;
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("batch_norm_eval_or_none", TORCH_BOX(&normswap::batch_norm_eval_or_none));
}
