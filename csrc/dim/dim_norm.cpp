// l1_norm, l2_norm, rms_norm and layer_norm along a dimension that is not the last, on CUDA tensors: checks, workspace, launch.
#include "dim/dim_permuted.h"
#include "row/row_launch.h"

namespace normswap {
namespace {

DimNorm dim_norm_of(const char* op, const Tensor& input, int64_t dim, const Tensor& out) {
  STD_TORCH_CHECK(dim >= 0 && dim < input.dim(), op, ": dim must be from 0 to ", input.dim() - 1, ", got ", dim);
  check_out(op, out, input);
  STD_TORCH_CHECK(input.is_contiguous() && out.is_contiguous(), op, ": input and output must be contiguous");
  DimNorm n{};
  n.x = input.const_data_ptr();
  n.y = out.mutable_data_ptr();
  n.outer = n.inner = 1;
  for (int64_t i = 0; i < dim; ++i) n.outer *= input.size(i);
  for (int64_t i = dim + 1; i < input.dim(); ++i) n.inner *= input.size(i);
  n.n = input.size(dim);
  n.dtype = dtype_of(input, op);
  return n;
}

ChannelVector parameter_of(const char* op, const DimNorm& n, const Tensor& parameter, const Tensor& input) {
  check_beside(op, "weight and bias", parameter, input);
  STD_TORCH_CHECK(parameter.numel() == n.n && parameter.is_contiguous(), op, ": weight and bias must be contiguous with ",
                  n.n, " elements, got ", parameter.numel());
  return {parameter.const_data_ptr(), dtype_of(parameter, op)};
}

void set_weight(const char* op, DimNorm& n, const OptionalTensor& weight, const Tensor& input) {
  if (weight.has_value()) n.weight = parameter_of(op, n, *weight, input);
}

void set_grad(const char* op, DimNorm& n, const Tensor& grad, const Tensor& input) {
  check_beside(op, "grad", grad, input);
  STD_TORCH_CHECK(grad.is_contiguous() && grad.scalar_type() == input.scalar_type() && grad.numel() == input.numel(),
                  op, ": grad must be contiguous, of the input's dtype and size");
  STD_TORCH_CHECK(n.n <= kMaxDimBackward, op, ": the dimension must have at most ", kMaxDimBackward, " elements, got ",
                  n.n);
  n.dy = grad.const_data_ptr();
}

void forward(DimNorm n, const Tensor& input, cudaError_t (*launch)(const DimNorm&, cudaStream_t), int values = 1) {
  const int64_t bytes = dim_workspace_bytes(n, values);
  OptionalTensor workspace;
  if (bytes > 0) workspace = torch::stable::new_empty(input, {bytes}, torch::headeronly::ScalarType::Byte);
  n.workspace = bytes > 0 ? workspace->mutable_data_ptr() : nullptr;
  check_launch(launch(n, stream_of(input)));
}

void l1_norm_dim_cuda(const Tensor& input, int64_t dim, double eps, double minimum, Tensor out,
                      OptionalTensor mean_abs) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  DimNorm n = dim_norm_of("l1_norm_dim", input, dim, out);
  STD_TORCH_CHECK(eps >= 0.0 && minimum >= 0.0, "l1_norm_dim: eps and minimum must not be negative, got ", eps,
                  " and ", minimum);
  n.eps = eps;
  n.minimum = minimum;
  n.statistic = floats_or_null("l1_norm_dim", mean_abs, input, n.outer * n.inner);
  forward(n, input, l1_norm_dim);
}

void l1_norm_dim_backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& mean_abs, int64_t dim,
                               double eps, double minimum, Tensor grad_input) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  DimNorm n = dim_norm_of("l1_norm_dim_backward", input, dim, grad_input);
  set_grad("l1_norm_dim_backward", n, grad, input);
  n.statistic = floats_of("l1_norm_dim_backward", mean_abs, input, n.outer * n.inner);
  n.eps = eps;
  n.minimum = minimum;
  check_launch(l1_norm_dim_backward(n, stream_of(input)));
}

void rms_norm_dim_cuda(const Tensor& input, const OptionalTensor& weight, int64_t dim, double eps, Tensor out,
                       OptionalTensor rstd) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  DimNorm n = dim_norm_of("rms_norm_dim", input, dim, out);
  set_weight("rms_norm_dim", n, weight, input);
  n.eps = eps;
  n.statistic = floats_or_null("rms_norm_dim", rstd, input, n.outer * n.inner);
  forward(n, input, rms_norm_dim);
}

void rms_norm_dim_backward_cuda(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                const Tensor& rstd, int64_t dim, Tensor grad_input, OptionalTensor grad_weight) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  DimNorm n = dim_norm_of("rms_norm_dim_backward", input, dim, grad_input);
  set_grad("rms_norm_dim_backward", n, grad, input);
  set_weight("rms_norm_dim_backward", n, weight, input);
  n.statistic = floats_of("rms_norm_dim_backward", rstd, input, n.outer * n.inner);
  if (!grad_weight.has_value()) {
    check_launch(rms_norm_dim_backward(n, stream_of(input)));
    return;
  }
  check_beside("rms_norm_dim_backward", "grad_weight", *grad_weight, input);
  Tensor partial = torch::stable::new_empty(input, {dim_weight_rows(n), n.n}, torch::headeronly::ScalarType::Float);
  n.workspace = partial.mutable_data_ptr();
  check_launch(rms_norm_dim_backward(n, stream_of(input)));
  torch::stable::copy_(*grad_weight, torch::stable::sum(partial, {0}));
}

void l2_norm_dim_cuda(const Tensor& input, int64_t dim, double eps, Tensor out, OptionalTensor norm) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  DimNorm n = dim_norm_of("l2_norm_dim", input, dim, out);
  STD_TORCH_CHECK(eps >= 0.0, "l2_norm_dim: eps must not be negative, got ", eps);
  n.eps = eps;
  n.statistic = floats_or_null("l2_norm_dim", norm, input, n.outer * n.inner);
  forward(n, input, l2_norm_dim);
}

void layer_norm_dim_cuda(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, int64_t dim,
                         double eps, Tensor out, OptionalTensor mean, OptionalTensor rstd) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  DimNorm n = dim_norm_of("layer_norm_dim", input, dim, out);
  set_weight("layer_norm_dim", n, weight, input);
  if (bias.has_value()) n.bias = parameter_of("layer_norm_dim", n, *bias, input);
  n.eps = eps;
  n.mean = floats_or_null("layer_norm_dim", mean, input, n.outer * n.inner);
  n.statistic = floats_or_null("layer_norm_dim", rstd, input, n.outer * n.inner);
  forward(n, input, layer_norm_dim, 2);
}

// --- calls that record no gradient: see row_norm.cpp ---------------------------------------------------------------
// What lies one after the other in memory are rows, which are the row engine's.

OptionalTensor unfilled_along(const Tensor& input, int64_t dim, const OptionalTensor& weight, const OptionalTensor& bias) {
  return input.is_contiguous() && is_plain(input, dim, 1, weight, bias) ? unfilled_like(input) : std::nullopt;
}

OptionalTensor l2_norm_or_none(const Tensor& input, int64_t dim, double eps) {
  const int64_t along = dim < 0 ? dim + input.dim() : dim;
  const OptionalTensor out = unfilled_along(input, along, std::nullopt, std::nullopt);
  if (!out.has_value()) return out;
  if (trailing_elements(input, input.dim() - 1 - along) == 1) {
    l2_norm_rows(input, input.size(along), eps, *out);
  } else {
    l2_norm_dim_cuda(input, along, eps, *out, std::nullopt);
  }
  return out;
}

OptionalTensor layer_norm_dim_or_none(const Tensor& input, int64_t dim, const OptionalTensor& weight,
                                      const OptionalTensor& bias, double eps) {
  const int64_t along = dim < 0 ? dim + input.dim() : dim;
  const OptionalTensor out = unfilled_along(input, along, weight, bias);
  if (!out.has_value() || trailing_elements(input, input.dim() - 1 - along) == 1) return std::nullopt;
  layer_norm_dim_cuda(input, weight, bias, along, eps, *out, std::nullopt, std::nullopt);
  return out;
}

// The sizes of `input` as (outer, n, inner) in memory; false where it does not lie so.
bool is_permuted(const Tensor& input, DimNorm& n) {
  const int64_t last = input.dim() - 1;
  n.n = input.size(last);
  n.inner = input.stride(last);
  if (n.inner <= 1) return false;
  n.outer = input.numel() / (n.n * n.inner);
  int64_t stride = 1;
  for (int64_t i = last - 1; i >= 0; --i) {
    if (stride == n.inner) stride *= n.n;
    if (input.size(i) != 1 && input.stride(i) != stride) return false;
    stride *= input.size(i);
  }
  return n.outer * n.n * n.inner == input.numel() && (stride == n.inner || stride == input.numel());
}

}  // namespace

OptionalTensor layer_norm_of_permuted(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                      double eps, float* statistics) {
  DimNorm n{};
  if (!is_permuted(input, n)) return std::nullopt;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  n.dtype = dtype_of(input, "layer_norm");
  const int64_t bytes = layer_norm_permuted_bytes(n);
  if (bytes == 0 || bytes > gpu_of(input.get_device_index()).shared) return std::nullopt;
  const OptionalTensor out = unfilled_dense(input);
  if (!out.has_value()) return std::nullopt;
  n.x = input.const_data_ptr();
  n.y = out->mutable_data_ptr();
  set_weight("layer_norm", n, weight, input);
  if (bias.has_value()) n.bias = parameter_of("layer_norm", n, *bias, input);
  n.eps = eps;
  n.mean = statistics;
  n.statistic = statistics == nullptr ? nullptr : statistics + n.outer * n.inner;
  check_launch(layer_norm_permuted(n, stream_of(input)));
  return out;
}

}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("l1_norm_dim", TORCH_BOX(&normswap::l1_norm_dim_cuda));
  m.impl("l1_norm_dim_backward", TORCH_BOX(&normswap::l1_norm_dim_backward_cuda));
  m.impl("l2_norm_dim", TORCH_BOX(&normswap::l2_norm_dim_cuda));
  m.impl("l2_norm_or_none", TORCH_BOX(&normswap::l2_norm_or_none));
  m.impl("layer_norm_dim", TORCH_BOX(&normswap::layer_norm_dim_cuda));
  m.impl("layer_norm_dim_or_none", TORCH_BOX(&normswap::layer_norm_dim_or_none));
  m.impl("rms_norm_dim", TORCH_BOX(&normswap::rms_norm_dim_cuda));
  m.impl("rms_norm_dim_backward", TORCH_BOX(&normswap::rms_norm_dim_backward_cuda));
}
