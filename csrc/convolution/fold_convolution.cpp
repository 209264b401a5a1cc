// fold_convolution_or_none on CUDA tensors: a convolution's weight and bias with the BatchNorm behind it in them.
#include <tuple>

#include "abi/tensors.h"

namespace normswap {
namespace {

// Whether the weights of an output channel lie in one piece and the channels one after the other: the first dim is the
// outermost of a tensor without gaps, the others in any order.
bool has_rows(const Tensor& weight) {
  int64_t expected = 1;
  for (int64_t found = 1; found > 0;) {
    found = 0;
    for (int64_t d = 1; d < weight.dim(); ++d) {
      if (weight.size(d) > 1 && weight.stride(d) == expected) found = weight.size(d);
    }
    if (found > 0) expected *= found;
  }
  const bool dense = weight.size(0) > 0 && expected == weight.numel() / weight.size(0);
  return dense && (weight.size(0) == 1 || weight.stride(0) == expected);
}

bool is_known(const Tensor& t) {
  const auto dtype = t.scalar_type();
  return dtype == torch::headeronly::ScalarType::Float || dtype == torch::headeronly::ScalarType::Half ||
         dtype == torch::headeronly::ScalarType::BFloat16;
}

// Whether it has a value of a dtype that is known for every output channel of `weight`, if there is one.
bool fits(const OptionalTensor& t, const Tensor& weight) {
  return !t.has_value() || (t->numel() == weight.size(0) && t->is_contiguous() && t->is_cuda() && is_known(*t) &&
                            t->get_device_index() == weight.get_device_index());
}

ChannelVector vector_of(const OptionalTensor& t) {
  if (!t.has_value()) return {nullptr, DType::f32};
  return {t->const_data_ptr(), dtype_of(*t, "fold_convolution")};
}

using Folded = std::tuple<OptionalTensor, OptionalTensor>;

Folded fold_convolution_or_none(const Tensor& weight, const OptionalTensor& bias, const Tensor& running_mean,
                                const Tensor& running_var, const OptionalTensor& norm_weight,
                                const OptionalTensor& norm_bias, double eps) {
  const Folded neither{std::nullopt, std::nullopt};
  if (!weight.is_cuda() || weight.dim() < 3 || !is_known(weight) || !has_rows(weight)) return neither;
  if (reinterpret_cast<uintptr_t>(weight.const_data_ptr()) % 16 != 0) return neither;
  for (const OptionalTensor& t :
       {bias, OptionalTensor(running_mean), OptionalTensor(running_var), norm_weight, norm_bias}) {
    if (!fits(t, weight)) return neither;
  }
  const torch::stable::accelerator::DeviceGuard guard(weight.get_device_index());
  const int64_t channels = weight.size(0), stride = 1;
  const OptionalTensor out = unfilled_like(weight), out_bias = unfilled(weight, 1, &channels, &stride);
  if (!out.has_value() || !out_bias.has_value()) return neither;
  FoldLinear f{};
  f.linear_weight = weight.const_data_ptr();
  f.out_weight = out->mutable_data_ptr();
  f.out_bias = out_bias->mutable_data_ptr();
  f.channels = channels;
  f.in_features = weight.numel() / f.channels;
  f.linear_bias = vector_of(bias);
  f.scale = {nullptr, DType::f32};
  f.weight = vector_of(norm_weight);
  f.bias = vector_of(norm_bias);
  f.running_mean = vector_of(running_mean);
  f.running_var = vector_of(running_var);
  f.eps = eps;
  f.dtype = dtype_of(weight, "fold_convolution");
  check_launch(fold_linear(f, stream_of(weight)));
  return {out, out_bias};
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("fold_convolution_or_none", TORCH_BOX(&normswap::fold_convolution_or_none));
}
