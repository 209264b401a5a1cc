// l1_norm and rms_norm along a dimension that is not the last, on CUDA tensors: checks, workspace, launch.
#include "tensors.h"

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

void set_weight(const char* op, DimNorm& n, const OptionalTensor& weight, const Tensor& input) {
  if (!weight.has_value()) return;
  check_beside(op, "weight", *weight, input);
  STD_TORCH_CHECK(weight->numel() == n.n && weight->is_contiguous(), op, ": weight must be contiguous with ", n.n,
                  " elements, got ", weight->numel());
  n.weight = {weight->const_data_ptr(), dtype_of(*weight, op)};
}

void set_grad(const char* op, DimNorm& n, const Tensor& grad, const Tensor& input) {
  check_beside(op, "grad", grad, input);
  STD_TORCH_CHECK(grad.is_contiguous() && grad.scalar_type() == input.scalar_type() && grad.numel() == input.numel(),
                  op, ": grad must be contiguous, of the input's dtype and size");
  STD_TORCH_CHECK(n.n <= kMaxDimBackward, op, ": the dimension must have at most ", kMaxDimBackward, " elements, got ",
                  n.n);
  n.dy = grad.const_data_ptr();
}

void forward(DimNorm n, const Tensor& input, cudaError_t (*launch)(const DimNorm&, cudaStream_t)) {
  const int64_t bytes = dim_workspace_bytes(n);
  const OptionalTensor workspace = bytes > 0 ? OptionalTensor(scratch(input, bytes)) : std::nullopt;
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

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("l1_norm_dim", TORCH_BOX(&normswap::l1_norm_dim_cuda));
  m.impl("l1_norm_dim_backward", TORCH_BOX(&normswap::l1_norm_dim_backward_cuda));
  m.impl("rms_norm_dim", TORCH_BOX(&normswap::rms_norm_dim_cuda));
  m.impl("rms_norm_dim_backward", TORCH_BOX(&normswap::rms_norm_dim_backward_cuda));
}
