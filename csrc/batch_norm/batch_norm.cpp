// batch_norm_eval on CUDA tensors: checks and launch.
#include "batch_norm/batch_norm.h"

#include "batch_norm/batch_norm_tensors.h"

namespace normswap {
namespace {

constexpr const char* kOp = "batch_norm_eval";

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
  n.running_mean = channels_of(running_mean, kOp);
  n.running_var = channels_of(running_var, kOp);
  n.weight = channels_of(weight, kOp);
  n.bias = channels_of(bias, kOp);
  n.elements = input.numel();
  n.channels = channels;
  n.inner = inner;
  n.eps = eps;
  n.activation = activation_of(kOp, activation, low, high);
  n.dtype = dtype_of(input, kOp);
  check_launch(batch_norm_eval(n, gpu_of(input.get_device_index()).multiprocessors, stream_of(input)));
  return out;
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("batch_norm_eval_or_none", TORCH_BOX(&normswap::batch_norm_eval_or_none));
}

// No gradient is recorded, and the dispatcher's own way past this key costs more than the call.
STABLE_TORCH_LIBRARY_IMPL(normswap, AutogradCUDA, m) {
  m.impl("batch_norm_eval_or_none", TORCH_BOX(&normswap::batch_norm_eval_or_none));
}
