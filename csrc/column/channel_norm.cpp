// affine and fold_linear on CUDA tensors: checks, workspace, launch.
#include "column/column_launch.h"
#include "plan/make_column_plan.h"

namespace normswap {
namespace {

ChannelVector vector_of(const char* op, const OptionalTensor& t, const Tensor& input, int64_t channels) {
  if (!t.has_value()) return {nullptr, DType::f32};
  check_beside(op, "per-channel tensors", *t, input);
  STD_TORCH_CHECK(t->numel() == channels && t->is_contiguous(), op,
                  ": per-channel tensors must be contiguous with one value a channel (", channels, "), got ",
                  t->numel());
  return {t->const_data_ptr(), dtype_of(*t, op)};
}

ChannelNorm channel_norm_of(const char* op, const Tensor& input, const OptionalTensor& scale,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps, Tensor& out) {
  STD_TORCH_CHECK(input.dim() == 2 && input.is_contiguous(), op, ": input must be contiguous (rows, channels)");
  check_out(op, out, input);
  STD_TORCH_CHECK(out.is_contiguous(), op, ": out must be contiguous");
  ChannelNorm n{};
  n.x = input.const_data_ptr();
  n.y = out.mutable_data_ptr();
  n.batch = 1;
  n.rows = input.size(0);
  n.channels = n.num_groups = input.size(1);
  n.scale = vector_of(op, scale, input, n.channels);
  n.weight = vector_of(op, weight, input, n.channels);
  n.bias = vector_of(op, bias, input, n.channels);
  n.eps = eps;
  n.dtype = dtype_of(input, op);
  return n;
}

void affine_cuda(const Tensor& input_, const OptionalTensor& scale, const Tensor& running_mean,
                 const Tensor& running_var, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                 Tensor out) {
  if (input_.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input_.get_device_index());
  const Tensor input = on_boundary(input_);
  ChannelNorm n = channel_norm_of("affine", input, scale, weight, bias, eps, out);
  n.running_mean = vector_of("affine", running_mean, input, n.channels);
  n.running_var = vector_of("affine", running_var, input, n.channels);
  check_launch(affine(n, stream_of(input)));
}

void fold_linear_cuda(const Tensor& linear_weight_, const OptionalTensor& linear_bias, const OptionalTensor& scale,
                      const Tensor& running_mean, const Tensor& running_var, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps, Tensor out_weight, Tensor out_bias) {
  if (linear_weight_.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(linear_weight_.get_device_index());
  const Tensor linear_weight = on_boundary(linear_weight_);
  STD_TORCH_CHECK(linear_weight.dim() == 2 && linear_weight.is_contiguous(),
                  "fold_linear: linear_weight must be contiguous (out_features, in_features)");
  check_out("fold_linear", out_weight, linear_weight);
  check_beside("fold_linear", "out_bias", out_bias, linear_weight);
  STD_TORCH_CHECK(out_weight.is_contiguous() && out_bias.is_contiguous() &&
                      out_bias.scalar_type() == linear_weight.scalar_type() &&
                      out_bias.numel() == linear_weight.size(0),
                  "fold_linear: out_weight and out_bias must be contiguous, of linear_weight's dtype, with a bias for ",
                  linear_weight.size(0), " channels");
  FoldLinear f{};
  f.linear_weight = linear_weight.const_data_ptr();
  f.out_weight = out_weight.mutable_data_ptr();
  f.out_bias = out_bias.mutable_data_ptr();
  f.channels = linear_weight.size(0);
  f.in_features = linear_weight.size(1);
  f.linear_bias = vector_of("fold_linear", linear_bias, linear_weight, f.channels);
  f.scale = vector_of("fold_linear", scale, linear_weight, f.channels);
  f.weight = vector_of("fold_linear", weight, linear_weight, f.channels);
  f.bias = vector_of("fold_linear", bias, linear_weight, f.channels);
  f.running_mean = vector_of("fold_linear", running_mean, linear_weight, f.channels);
  f.running_var = vector_of("fold_linear", running_var, linear_weight, f.channels);
  f.eps = eps;
  f.dtype = dtype_of(linear_weight, "fold_linear");
  check_launch(fold_linear(f, stream_of(linear_weight)));
}

}  // namespace

int32_t launched(ColumnLaunch* launch, ChannelNorm n, Memory& memory, int32_t device, Regime regime) {
  ColumnPlan plan;
  cudaStream_t stream{};
  const int bytes = static_cast<int>(itemsize(n.dtype));
  if (!make_column_plan(n.batch, n.rows, n.channels, n.num_groups, bytes, gpu_of(device), regime, &plan) ||
      !set_stream(device, stream) || !set_workspace(memory, column_workspace_bytes(plan), n.workspace)) {
    return kDeclined;
  }
  return told(launch(n, plan, stream));
}

}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("affine", TORCH_BOX(&normswap::affine_cuda));
  m.impl("fold_linear", TORCH_BOX(&normswap::fold_linear_cuda));
}

// The plan of column statistics, for tests that have no GPU, of the GPU described: (regime, vec, width, groups, lanes,
// parts, slots, strips, piece_rows, pieces, items, grid, shared, workspace bytes) into out. Returns 0 when such columns
// cannot be done in that regime.
extern "C" __attribute__((visibility("default"))) int normswap_column_plan(int64_t batch, int64_t rows, int64_t channels,
                                                                           int64_t num_groups, int itemsize,
                                                                           int clusters, int shared,
                                                                           int multiprocessors, int regime,
                                                                           int64_t* out) {
  normswap::ColumnPlan p;
  const normswap::Gpu gpu{clusters != 0, clusters != 0, shared, multiprocessors, multiprocessors > 0};
  if (!normswap::make_column_plan(batch, rows, channels, num_groups, itemsize, gpu,
                                  static_cast<normswap::Regime>(regime), &p)) {
    return 0;
  }
  const int64_t values[] = {static_cast<int64_t>(p.regime), p.vec, p.width, p.groups, p.lanes, p.parts, p.slots,
                            p.strips, p.piece_rows, p.pieces, p.items, p.grid, p.shared,
                            normswap::column_workspace_bytes(p)};
  for (const int64_t value : values) *out++ = value;
  return 1;
}
