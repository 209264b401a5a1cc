// The calls of autograd's nodes, forward and backward, launched past the dispatcher.
#pragma once

#include "recorded.h"

namespace {

// Whether the kernels may read these there: on their device, with no mode that wants to be told.
template <class... Others>
bool can_launch(const Tensor& input, const Others&... others) {
  return input.device().type() == launchers().device && !any_dispatch_mode() && all_readable(input, others...);
}

int32_t activation_of(const Numbers& n) { return static_cast<int32_t>(n[kActivation]); }
float low_of(const Numbers& n) { return static_cast<float>(n[kLow]); }
float high_of(const Numbers& n) { return static_cast<float>(n[kHigh]); }

// What the op's twin would make of what the op is given, outputs first; nothing where the kernels' library declines.
std::vector<IValue> forward_launched(const Norm& norm, c10::ArrayRef<IValue> given, const Numbers& n) {
  const auto at = [&](int place) { return place < 0 ? Tensor() : tensor(given[place]); };
  const auto in = [&](Slot slot) { return at(norm.tensors[slot]); };
  const Tensor input = in(kInput), weight = in(kWeight), bias = in(kBias), residual = in(kResidual);
  const Tensor scale = in(kScale), shift = in(kShift), input_bias = in(kInputBias);
  const Tensor mean = in(kMean), var = in(kVar), batches = at(norm.batches);
  if (!can_launch(input, weight, bias, residual, scale, shift, input_bias, mean, var, batches)) return {};
  const View x = view_of(input), w = view_of(weight), b = view_of(bias), r = view_of(residual);
  const auto size = static_cast<int64_t>(n[kSize]);
  TensorMemory memory(input);
  const auto made = [&](Memory::Part part) { return optional(memory.parts[part]); };
  if (norm.kind == kBatchNorm) {
    if (batches.defined() && (batches.scalar_type() != at::kLong || batches.numel() != 1)) return {};
    int64_t* const counted = batches.defined() ? batches.mutable_data_ptr<int64_t>() : nullptr;
    const double momentum = number_of(given[norm.momentum]);
    const normswap::BatchNormTrainCall call{x, view_of(mean), view_of(var), w, b, r, view_of(scale), view_of(input_bias),
                                            counted, momentum, n[kEps], n[kTraining] != 0, activation_of(n), low_of(n),
                                            high_of(n), true};
    if (!launched_in_op("normswap::batch_norm", launchers().batch_norm_train, call, memory)) return {};
    return {made(Memory::kOut), made(Memory::kStatistics), made(Memory::kSigns)};
  }
  if (norm.kind == kGroupNorm) {
    const int32_t dtype = given[norm.wide].toBool() ? code_of(at::kFloat) : x.dtype;
    const normswap::GroupNormCall call{x, w, b, r, size, n[kEps], activation_of(n), low_of(n), high_of(n), dtype, true};
    if (!launched_in_op("normswap::group_norm", launchers().group_norm, call, memory)) return {};
    return {made(Memory::kOut), made(Memory::kStatistics)};
  }
  const bool other = norm.dtype >= 0 && !given[norm.dtype].isNone();
  const int32_t dtype = other ? code_of(given[norm.dtype].toScalarType()) : x.dtype;
  const normswap::RowNormCall call{x, w, b, r, view_of(scale), view_of(shift), size, n[kEps], n[kOffset],
                                   norm.kind == kRmsNorm, n[kCast] != 0, activation_of(n), low_of(n), high_of(n), dtype, true};
  const char* name = norm.kind == kRmsNorm ? "normswap::rms_norm" : "normswap::layer_norm";
  if (!launched_in_op(name, launchers().row_norm, call, memory)) return {};
  return {made(Memory::kOut), made(Memory::kSum), made(Memory::kStatistics)};
}

// The gradients that are wanted, or nothing.
Tensors backward_launched(Kind kind, const Tensor& grad, const Tensor& sum_grad, const Tensors& saved, const Numbers& n,
                          const Wanted& wanted) {
  const Tensor &input = saved[kInput], &weight = saved[kWeight], &bias = saved[kBias], &residual = saved[kResidual];
  const Tensor &scale = saved[kScale], &input_bias = saved[kInputBias], &signs = saved[kSigns], &kept = saved[kKept];
  const Tensor &mean = saved[kMean], &var = saved[kVar];
  if (!can_launch(input, grad, sum_grad, weight, bias, residual, scale, input_bias, mean, var, kept, signs)) return {};
  TensorMemory memory(input);
  const auto& made = memory.parts;
  const Tensor &of_input = made[Memory::kOut], &of_sum = made[Memory::kSum];
  const Tensor &of_weight = made[Memory::kWeight], &of_bias = made[Memory::kBias];
  const View x = view_of(input), dy = view_of(grad), w = view_of(weight), b = view_of(bias), statistics = view_of(kept);
  if (kind == kBatchNorm) {
    const normswap::BatchNormBackwardCall call{
        dy, x, statistics, view_of(residual), w, keeps_bias(saved, n) ? b : w, view_of(scale), view_of(input_bias),
        view_of(mean), view_of(var), view_of(signs).data, n[kEps], n[kTraining] != 0, activation_of(n),
        low_of(n), high_of(n), wanted[kInput], wanted[kWeight], wanted[kBias], wanted[kResidual], wanted[kScale],
        wanted[kInputBias]};
    if (!launched("normswap::batch_norm_backward", launchers().batch_norm_backward, call, memory)) return {};
    Tensor of_scale = made[Memory::kScale];
    if (of_scale.defined()) of_scale = summed_as(of_scale, scale);
    return {of_input, of_weight, of_bias, of_sum, of_scale, Tensor(), made[Memory::kInputBias]};
  }
  if (kind == kGroupNorm) {
    const normswap::GroupBackwardCall call{dy, x, w, keeps_bias(saved, n) ? b : w, view_of(residual), statistics,
                                           static_cast<int64_t>(n[kSize]), activation_of(n), low_of(n), high_of(n), wanted[kInput],
                                           wanted[kWeight], wanted[kBias], wanted[kResidual]};
    if (!launched("normswap::group_norm_backward", launchers().group_backward, call, memory)) return {};
    return {of_input, of_weight, of_bias, of_sum, Tensor(), Tensor(), Tensor()};
  }
  const bool of_summands = wanted[kInput] || wanted[kResidual];
  const normswap::RowBackwardCall call{dy, x, w, b, statistics, view_of(sum_grad), columns_of(input, n), n[kOffset],
                                       kind == kRmsNorm, n[kCast] != 0, activation_of(n), low_of(n), high_of(n), of_summands,
                                       wanted[kWeight], wanted[kBias], wanted[kResidual] ? static_cast<int32_t>(n[kApart]) : 0};
  const char* name = kind == kRmsNorm ? "normswap::rms_norm_backward" : "normswap::layer_norm_backward";
  if (!launched(name, launchers().row_backward, call, memory)) return {};
  return {of_input, of_weight, of_bias, of_sum.defined() ? of_sum : of_input, Tensor(), Tensor(), Tensor()};
}

}  // namespace
