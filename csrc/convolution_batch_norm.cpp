// convolution_batch_norm_eval_or_none on CUDA tensors: the fold of a BatchNorm into the 2d convolution before it, and the
// convolution by PyTorch, all in one call: a fold, an allocation and a convolution are less than what calling them costs.
#include <array>

#include "fold_convolution.h"

// Only libtorch_cuda.so has these: weak.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_cuda_addmm_out(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,
                                                               AtenTensorHandle, double, double);
__attribute__((weak)) AOTITorchError aoti_torch_cuda__addmm_activation(AtenTensorHandle, AtenTensorHandle,
                                                                       AtenTensorHandle, double, double, int32_t,
                                                                       AtenTensorHandle*);
}

namespace normswap {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;

using Pair = std::array<int64_t, 2>;

struct Geometry {
  Pair stride, padding, dilation;
  int64_t groups;
};

bool is_beside(const Tensor& t, const Tensor& input) {
  return t.is_cuda() && t.get_device_index() == input.get_device_index();
}

// Whether PyTorch's ops would take these together: a norm's tensors of one dtype, the convolution's or float32.
bool dtypes_fit(ScalarType dtype, const OptionalTensor& conv_bias, const Tensor& running_mean, const Tensor& running_var,
                const OptionalTensor& weight, const OptionalTensor& bias) {
  const ScalarType kept = running_mean.scalar_type();
  const auto is = [](const OptionalTensor& t, ScalarType wanted) { return !t.has_value() || t->scalar_type() == wanted; };
  return (kept == dtype || kept == ScalarType::Float) && running_var.scalar_type() == kept && is(weight, kept) &&
         is(bias, kept) && is(conv_bias, dtype);
}

// Whether `t` is like what the convolution gives.
bool is_like_output(const Tensor& t, const Tensor& input, const Tensor& weight, const Geometry& g) {
  if (t.dim() != 4 || t.scalar_type() != input.scalar_type() || !is_beside(t, input)) return false;
  if (t.size(0) != input.size(0) || t.size(1) != weight.size(0)) return false;
  for (int d = 0; d < 2; ++d) {
    if (g.stride[d] < 1) return false;
    const int64_t room = input.size(2 + d) + 2 * g.padding[d] - g.dilation[d] * (weight.size(2 + d) - 1) - 1;
    if (room < 0 || t.size(2 + d) != room / g.stride[d] + 1) return false;
  }
  return true;
}

StableIValue list_of(const Pair& pair) {
  return from(torch::headeronly::HeaderOnlyArrayRef<int64_t>(pair.data(), pair.size()));
}

// By cuDNN's convolution that adds the residual and ends in a ReLU; nothing where PyTorch raises.
OptionalTensor fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& residual,
                     const Geometry& g) {
  const bool adds = residual.has_value();
  std::array<StableIValue, 9> stack;
  size_t count = 0;
  const auto push = [&](StableIValue value) { stack[count++] = value; };
  push(from(input));
  push(from(weight));
  if (adds) push(from(*residual));
  if (adds) push(from(std::nullopt));  // times 1
  push(from(bias));
  push(list_of(g.stride));
  push(list_of(g.padding));
  push(list_of(g.dilation));
  push(from(g.groups));
  const char* op = adds ? "aten::cudnn_convolution_add_relu" : "aten::cudnn_convolution_relu";
  if (torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) return std::nullopt;
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The memory of `t` as a tensor of other sizes; nothing where PyTorch raises.
template <size_t N>
OptionalTensor seen_as(const Tensor& t, const std::array<int64_t, N>& sizes, const std::array<int64_t, N>& strides) {
  AtenTensorHandle handle = nullptr;
  const auto error = aoti_torch__reinterpret_tensor(t.get(), N, sizes.data(), strides.data(), 0, &handle);
  return error == AOTI_TORCH_SUCCESS ? OptionalTensor(Tensor(handle)) : std::nullopt;
}

// A 1 x 1 convolution of channels_last memory by one matrix product; nothing where it is none, or PyTorch raises.
OptionalTensor matmul(const Tensor& input, const Tensor& weight, const Tensor& bias, bool relu, const Geometry& g) {
  constexpr Pair ones{1, 1}, zeros{0, 0};
  const bool alone = g.stride == ones && g.padding == zeros && g.groups == 1;
  const int64_t in = input.size(1), out = weight.size(0), rows = input.numel() / in;
  if (!alone || weight.numel() != out * in || weight.stride(0) != in || !is_channels_last(input)) return std::nullopt;
  if (aoti_torch_cuda_addmm_out == nullptr || aoti_torch_cuda__addmm_activation == nullptr) return std::nullopt;
  const OptionalTensor pixels = seen_as<2>(input, {rows, in}, {in, 1}), across = seen_as<2>(weight, {in, out}, {1, in});
  if (!pixels.has_value() || !across.has_value()) return std::nullopt;
  const int64_t height = input.size(2), width = input.size(3);
  const std::array<int64_t, 4> sizes{input.size(0), out, height, width}, strides{height * width * out, 1, width * out, out};
  AtenTensorHandle handle = nullptr;
  if (relu) {
    if (aoti_torch_cuda__addmm_activation(bias.get(), pixels->get(), across->get(), 1, 1, 0, &handle) != AOTI_TORCH_SUCCESS) {
      return std::nullopt;
    }
    return seen_as<4>(Tensor(handle), sizes, strides);
  }
  const OptionalTensor made = unfilled<4>(input, sizes, strides);
  const OptionalTensor product = made.has_value() ? seen_as<2>(*made, {rows, out}, {out, 1}) : std::nullopt;
  if (!product.has_value()) return std::nullopt;
  const auto error = aoti_torch_cuda_addmm_out(product->get(), bias.get(), pixels->get(), across->get(), 1, 1);
  return error == AOTI_TORCH_SUCCESS ? made : std::nullopt;
}

OptionalTensor convolution_batch_norm_eval_or_none(
    const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias, int64_t stride_0, int64_t stride_1,
    int64_t padding_0, int64_t padding_1, int64_t dilation_0, int64_t dilation_1, int64_t groups,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, const OptionalTensor& residual, bool relu, bool as_matmul) {
  const Geometry g{{stride_0, stride_1}, {padding_0, padding_1}, {dilation_0, dilation_1}, groups};
  const ScalarType dtype = input.scalar_type();
  if (aoti_torch_grad_mode_is_enabled() || !running_mean.has_value() || !running_var.has_value()) return std::nullopt;
  if ((dtype != ScalarType::Half && dtype != ScalarType::BFloat16) || conv_weight.scalar_type() != dtype) return std::nullopt;
  if (input.dim() != 4 || conv_weight.dim() != 4 || input.numel() == 0 || !is_beside(conv_weight, input)) return std::nullopt;
  if (input.size(1) != conv_weight.size(1) * groups) return std::nullopt;
  if (!dtypes_fit(dtype, conv_bias, *running_mean, *running_var, weight, bias)) return std::nullopt;
  if (residual.has_value() && (as_matmul || !is_like_output(*residual, input, conv_weight, g))) return std::nullopt;
  if (!relu && !as_matmul) return std::nullopt;
  const auto [folded, shift] =
      fold_convolution_or_none(conv_weight, conv_bias, *running_mean, *running_var, weight, bias, eps);
  if (!folded.has_value()) return std::nullopt;
  return as_matmul ? matmul(input, *folded, *shift, relu, g) : fused(input, *folded, shift, residual, g);
}

// Under autocast the convolution casts what it is given.
OptionalTensor none_under_autocast(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, int64_t, int64_t, int64_t,
                                   int64_t, int64_t, int64_t, const OptionalTensor&, const OptionalTensor&,
                                   const OptionalTensor&, const OptionalTensor&, double, const OptionalTensor&, bool, bool) {
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
