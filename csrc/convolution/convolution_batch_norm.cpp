// convolution_batch_norm_eval on CUDA tensors: a 2d convolution with a BatchNorm behind it, by our kernel.
#include "abi/views.h"

namespace normswap {
namespace {

constexpr const char* kOp = "convolution_batch_norm_eval";

OptionalTensor convolution_batch_norm_eval_or_none(
    const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias, int64_t stride_0, int64_t stride_1,
    int64_t padding_0, int64_t padding_1, int64_t dilation_0, int64_t dilation_1, int64_t groups,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, const OptionalTensor& residual, int64_t activation, double low, double high) {
  const ActivationArgs acts = activation_of(kOp, activation, low, high);
  const OptionalTensor own(conv_weight);
  if (aoti_torch_grad_mode_is_enabled()) return std::nullopt;
  if (!all_beside(input, {&own, &residual, &conv_bias, &running_mean, &running_var, &weight, &bias})) return std::nullopt;
  const ConvolutionCall call{
      view_of(input), view_of(own), view_of(residual),
      {view_of(running_var), view_of(running_mean), view_of(weight), view_of(bias), view_of(conv_bias)},
      eps, {stride_0, stride_1}, {padding_0, padding_1}, {dilation_0, dilation_1}, groups,
      static_cast<int32_t>(acts.code), acts.low, acts.high, false};
  TensorMemory memory(input);
  return is_launched(normswap_convolve, call, input, memory) ? memory.parts[Memory::kOut] : std::nullopt;
}

// Under autocast a convolution casts what it is given.
OptionalTensor none_under_autocast(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, int64_t, int64_t, int64_t,
                                   int64_t, int64_t, int64_t, const OptionalTensor&, const OptionalTensor&,
                                   const OptionalTensor&, const OptionalTensor&, double, const OptionalTensor&, int64_t,
                                   double, double) {
  return std::nullopt;
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("convolution_batch_norm_eval_or_none", TORCH_BOX(&normswap::convolution_batch_norm_eval_or_none));
}

// No gradient is recorded, and the dispatcher's own way past this key costs more than the call.
STABLE_TORCH_LIBRARY_IMPL(normswap, AutogradCUDA, m) {
  m.impl("convolution_batch_norm_eval_or_none", TORCH_BOX(&normswap::convolution_batch_norm_eval_or_none));
}

STABLE_TORCH_LIBRARY_IMPL(normswap, AutocastCUDA, m) {
  m.impl("convolution_batch_norm_eval_or_none", TORCH_BOX(&normswap::none_under_autocast));
}
