// The backward of group_norm on CUDA tensors: checks, plan, workspace, launch.
#include "abi/views.h"
#include "plan/make_group_backward_plan.h"

namespace normswap {
namespace {

constexpr const char* kOp = "group_norm_backward";

ChannelVector channels_of(const OptionalTensor& t, int64_t channels) {
  if (!t.has_value()) return {nullptr, DType::f32};
  STD_TORCH_CHECK(t->numel() == channels && t->is_contiguous(), kOp,
                  ": tensors of channels must be contiguous, with one value each of ", channels);
  return {t->const_data_ptr(), dtype_of(*t, kOp)};
}

void* like(const OptionalTensor& t, const Tensor& other) {
  if (!t.has_value()) return nullptr;
  STD_TORCH_CHECK(t->numel() == other.numel() && t->scalar_type() == other.scalar_type(), kOp,
                  ": gradients must have the size and dtype of what they are of");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t->const_data_ptr()) % 16 == 0, kOp,
                  ": gradients must start at multiples of 16 bytes");
  return const_cast<void*>(t->const_data_ptr());
}

// By the input's dtype.
template <class Plan>
struct Launches {
  cudaError_t (*f32)(const GroupBackward&, const Plan&, bool, cudaStream_t);
  cudaError_t (*f16)(const GroupBackward&, const Plan&, bool, cudaStream_t);
  cudaError_t (*bf16)(const GroupBackward&, const Plan&, bool, cudaStream_t);
};
constexpr Launches<GroupBackwardPlan> kLines{group_backward_f32, group_backward_f16, group_backward_bf16};
constexpr Launches<GroupColumnsPlan> kColumns{group_columns_f32, group_columns_f16, group_columns_bf16};

// What lies over all elements, in one layout.
struct Elements {
  Tensor grad, input;
  OptionalTensor residual, grad_input, grad_residual;

  void put_into(GroupBackward& n) const {
    n.x = input.const_data_ptr();
    n.dy = grad.const_data_ptr();
    n.residual = like(residual, grad);
    n.dx = like(grad_input, input);
    n.dresidual = like(grad_residual, grad);
  }
  // The same in the contiguous layout; gradients uninitialised.
  Elements contiguous() const {
    const auto dense = [](const Tensor& t) { return torch::stable::contiguous(t); };
    const auto room = [&](const OptionalTensor& t) {
      return t.has_value() ? OptionalTensor(torch::stable::empty_like(dense(*t))) : std::nullopt;
    };
    return {dense(grad), dense(input), residual.has_value() ? OptionalTensor(dense(*residual)) : std::nullopt,
            room(grad_input), room(grad_residual)};
  }
};

template <class Plan>
cudaError_t launched(const Launches<Plan>& by, GroupBackward n, const Plan& plan, int64_t workspace_bytes,
                     const Elements& e, const Gpu& gpu) {
  e.put_into(n);
  const Tensor workspace = scratch(e.input, workspace_bytes);
  n.workspace = workspace.mutable_data_ptr();
  const auto launch = n.dtype == DType::f32 ? by.f32 : n.dtype == DType::f16 ? by.f16 : by.bf16;
  return launch(n, plan, gpu.overlap, stream_of(e.input));
}

void run_lines(const GroupBackward& n, const Elements& e, Regime regime) {
  const Gpu gpu = gpu_of(e.input.get_device_index());
  GroupBackwardPlan plan;
  STD_TORCH_CHECK(make_group_backward_plan(n.sizes, gpu, regime, &plan), kOp, ": these groups cannot be done in regime ",
                  static_cast<int>(regime));
  check_launch(launched(kLines, n, plan, group_backward_workspace(plan, n.sizes), e, gpu));
}

void run_channels_last(const GroupBackward& n, const Elements& e, Regime regime) {
  const Gpu gpu = gpu_of(e.input.get_device_index());
  GroupColumnsPlan plan;
  if (make_group_columns_plan(n.sizes, gpu, regime, &plan)) {
    return check_launch(launched(kColumns, n, plan, group_columns_workspace(plan, n.sizes), e, gpu));
  }
  // Groups too wide for a block: by way of the other layout.
  const Elements other = e.contiguous();
  run_lines(n, other, Regime::automatic);
  if (e.grad_input.has_value()) torch::stable::copy_(const_cast<Tensor&>(*e.grad_input), *other.grad_input);
  if (e.grad_residual.has_value()) torch::stable::copy_(const_cast<Tensor&>(*e.grad_residual), *other.grad_residual);
}

// `mean` and `rstd`: a value a group.
void run_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& residual, const float* mean, const float* rstd, int64_t num_groups,
                  bool channels_last, const ActivationArgs& activation, const OptionalTensor& grad_input,
                  const OptionalTensor& grad_weight, const OptionalTensor& grad_bias, const OptionalTensor& grad_residual,
                  int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const int64_t batch = input.size(0), channels = input.size(1);
  STD_TORCH_CHECK(num_groups > 0 && channels % num_groups == 0, kOp, ": ", num_groups, " groups do not divide ", channels,
                  " channels");
  STD_TORCH_CHECK(grad.numel() == input.numel(), kOp, ": grad must have the input's size");
  GroupBackward n{};
  n.dtype = dtype_of(input, kOp);
  n.grad_dtype = dtype_of(grad, kOp);
  STD_TORCH_CHECK(n.grad_dtype == n.dtype || n.grad_dtype == DType::f32, kOp,
                  ": grad must have the input's dtype or float32");
  n.activation = activation;
  n.weight = channels_of(weight, channels);
  n.bias = channels_of(bias, channels);
  n.dweight = channels_of(grad_weight, channels);
  n.dbias = channels_of(grad_bias, channels);
  n.mean = mean;
  n.rstd = rstd;
  const int grad_itemsize = static_cast<int>(itemsize(n.grad_dtype));
  const bool as_dy = activation.code == Activation::none || activation.code == Activation::relu;
  n.sizes = {batch, channels, input.numel() / (batch * channels), num_groups, static_cast<int>(itemsize(n.dtype)),
             grad_itemsize, as_dy ? grad_itemsize : 4};
  STD_TORCH_CHECK(n.sizes.spatial < (int64_t{1} << 31) && channels < (int64_t{1} << 31), kOp,
                  ": there must be fewer than 2^31 channels, of fewer than 2^31 elements each");
  const Elements elements{on_boundary(grad), on_boundary(input), on_boundary(residual), grad_input, grad_residual};
  if (channels_last) return run_channels_last(n, elements, static_cast<Regime>(regime));
  run_lines(n, elements, static_cast<Regime>(regime));
}

void group_norm_backward_cuda(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                              const OptionalTensor& bias, const OptionalTensor& residual, const Tensor& mean,
                              const Tensor& rstd, int64_t num_groups, bool channels_last, int64_t activation, double low,
                              double high, OptionalTensor grad_input, OptionalTensor grad_weight,
                              OptionalTensor grad_bias, OptionalTensor grad_residual, int64_t regime) {
  if (input.numel() == 0) return;
  const int64_t groups = input.size(0) * num_groups;
  run_backward(grad, input, weight, bias, residual, floats_of(kOp, mean, input, groups),
               floats_of(kOp, rstd, input, groups), num_groups, channels_last, activation_of(kOp, activation, low, high),
               grad_input, grad_weight, grad_bias, grad_residual, regime);
}

using Gradients = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

// Those that are asked for, or none at all where tensors lie otherwise than the kernels take them, or there is no memory.
Gradients group_norm_backward_or_none(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                      const OptionalTensor& bias, const OptionalTensor& residual, const Tensor& statistics,
                                      int64_t num_groups, int64_t activation, double low, double high, bool of_input,
                                      bool of_weight, bool of_bias, bool of_residual) {
  const View x = view_of(input);
  const bool channels_last = !input.is_contiguous();
  if (input.numel() == 0 || (channels_last && !is_channels_last(x))) return {};
  for (const OptionalTensor& t : {OptionalTensor(grad), residual}) {
    if (t.has_value() && !(is_beside(*t, input) && same_layout(view_of(t), x))) return {};
  }
  for (const OptionalTensor* t : {&weight, &bias}) {
    if (t->has_value() && !(*t)->is_contiguous()) return {};
  }
  const auto room = [](bool wanted, const OptionalTensor& like) { return wanted ? unfilled_like(*like) : std::nullopt; };
  const Gradients made{room(of_input, input), room(of_weight, weight), room(of_bias, bias), room(of_residual, grad)};
  const auto& [dx, dw, db, dr] = made;
  if (dx.has_value() != of_input || dw.has_value() != of_weight || db.has_value() != of_bias) return {};
  if (dr.has_value() != of_residual) return {};
  const int64_t groups = input.size(0) * num_groups;
  const float* mean = floats_of(kOp, statistics, input, 2 * groups);
  run_backward(grad, input, weight, bias, residual, mean, mean + groups, num_groups, channels_last,
               activation_of(kOp, activation, low, high), dx, dw, db, dr, 0);
  return made;
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("group_norm_backward", TORCH_BOX(&normswap::group_norm_backward_cuda));
  m.impl("group_norm_backward_or_none", TORCH_BOX(&normswap::group_norm_backward_or_none));
}

// The plan, for tests that have no GPU, of the GPU described: (held, vec, lanes, each, units, piece_lines, piece_units,
// line_pieces, group_pieces, groups, block_pieces, cluster, block_lines, block_elements, threads, shared, lag, grid,
// workspace bytes) into out. Returns 0 when it cannot be done in that regime.
extern "C" __attribute__((visibility("default"))) int normswap_group_backward_plan(
    int64_t batch, int64_t channels, int64_t spatial, int64_t num_groups, int itemsize, int grad_itemsize, int kept_itemsize,
    int clusters, int shared, int multiprocessors, int regime, int64_t* out) {
  const normswap::Gpu gpu{clusters != 0, clusters != 0, shared, multiprocessors, multiprocessors > 0};
  const normswap::GroupSizes s{batch, channels, spatial, num_groups, itemsize, grad_itemsize, kept_itemsize};
  normswap::GroupBackwardPlan p;
  if (!normswap::make_group_backward_plan(s, gpu, static_cast<normswap::Regime>(regime), &p)) return 0;
  const int64_t values[] = {p.held,         p.vec,    p.lanes,       p.each,           p.units,   p.piece_lines, p.piece_units,
                            p.line_pieces,  p.group_pieces, p.groups, p.block_pieces,  p.cluster, p.block_lines,
                            p.block_elements, p.threads, p.shared,   p.lag,            p.grid,
                            normswap::group_backward_workspace(p, s)};
  for (const int64_t value : values) *out++ = value;
  return 1;
}

// The same of a channels_last one: (vec, width, lanes, side, half_rows, sum_rows, thread_rows, piece_rows, strips, slabs,
// pieces, bunches, held_bytes, lag, shared, blocks, workspace bytes, threads).
extern "C" __attribute__((visibility("default"))) int normswap_group_columns_plan(
    int64_t batch, int64_t channels, int64_t spatial, int64_t num_groups, int itemsize, int grad_itemsize, int kept_itemsize,
    int clusters, int shared, int multiprocessors, int regime, int64_t* out) {
  const normswap::Gpu gpu{clusters != 0, clusters != 0, shared, multiprocessors, multiprocessors > 0};
  const normswap::GroupSizes s{batch, channels, spatial, num_groups, itemsize, grad_itemsize, kept_itemsize};
  normswap::GroupColumnsPlan p;
  if (!normswap::make_group_columns_plan(s, gpu, static_cast<normswap::Regime>(regime), &p)) return 0;
  const int64_t values[] = {p.vec,     p.width,   p.lanes,      p.side, p.half_rows, p.sum_rows, p.thread_rows, p.piece_rows,
                            p.strips,  p.slabs,   p.pieces,     p.bunches, p.held_bytes, p.lag,  p.shared,      p.blocks,
                            normswap::group_columns_workspace(p, s), p.threads};
  for (const int64_t value : values) *out++ = value;
  return 1;
}
