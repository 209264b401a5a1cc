// The backward of group_norm on CUDA tensors: checks, plan, memory, launch.
#include "abi/views.h"
#include "group_backward/group_backward.h"
#include "plan/make_group_backward_plan.h"

namespace normswap {
namespace {

constexpr const char* kOp = "group_norm_backward";

// By the input's dtype.
template <class Plan>
struct Launches {
  cudaError_t (*f32)(const GroupBackward&, const Plan&, bool, cudaStream_t);
  cudaError_t (*f16)(const GroupBackward&, const Plan&, bool, cudaStream_t);
  cudaError_t (*bf16)(const GroupBackward&, const Plan&, bool, cudaStream_t);
};
constexpr Launches<GroupBackwardPlan> kLines{group_backward_f32, group_backward_f16, group_backward_bf16};
constexpr Launches<GroupColumnsPlan> kColumns{group_columns_f32, group_columns_f16, group_columns_bf16};

const Launches<GroupBackwardPlan>& launches_by(const GroupBackwardPlan&) { return kLines; }
const Launches<GroupColumnsPlan>& launches_by(const GroupColumnsPlan&) { return kColumns; }

// What calls give (abi/calls.h).
template <class Plan>
int32_t launched_by(const Plan& plan, GroupBackward n, int64_t workspace_bytes, const Gpu& gpu, Memory& memory,
                    int32_t device) {
  cudaStream_t stream{};
  if (!set_stream(device, stream) || !set_workspace(memory, workspace_bytes, n.workspace)) return kDeclined;
  const Launches<Plan>& by = launches_by(plan);
  const auto launch = n.dtype == DType::f32 ? by.f32 : n.dtype == DType::f16 ? by.f16 : by.bf16;
  return told(launch(n, plan, gpu.overlap, stream));
}

// With all that it is given, and writes; kTooWide of groups that cannot be done so (in `regime`).
int32_t launched(const GroupBackward& n, bool channels_last, Regime regime, Memory& memory, int32_t device) {
  const Gpu gpu = gpu_of(device);
  if (channels_last) {
    GroupColumnsPlan plan;
    if (!make_group_columns_plan(n.sizes, gpu, regime, &plan)) return kTooWide;
    return launched_by(plan, n, group_columns_workspace(plan, n.sizes), gpu, memory, device);
  }
  GroupBackwardPlan plan;
  if (!make_group_backward_plan(n.sizes, gpu, regime, &plan)) return kTooWide;
  return launched_by(plan, n, group_backward_workspace(plan, n.sizes), gpu, memory, device);
}

// The sizes; false where the kernels do not count so far.
bool set_sizes(GroupBackward& n, int64_t batch, int64_t channels, int64_t count, int64_t num_groups) {
  const int itemsizes[] = {static_cast<int>(itemsize(n.dtype)), static_cast<int>(itemsize(n.grad_dtype))};
  const bool as_dy = n.activation.code == Activation::none || n.activation.code == Activation::relu;
  n.sizes = {batch, channels, count / (batch * channels), num_groups, itemsizes[0], itemsizes[1], as_dy ? itemsizes[1] : 4};
  return n.sizes.spatial < (int64_t{1} << 31) && channels < (int64_t{1} << 31);
}

// What the kernels are given but for what they write; false where they do not take it.
bool set_group_backward(const GroupBackwardCall& call, GroupBackward& n, bool& channels_last) {
  const View &input = call.input, &grad = call.grad, &residual = call.residual;
  const int64_t groups = call.num_groups, count = numel(input);
  if (input.dtype < 0 || input.dims < 2 || count == 0 || is_absent(grad)) return false;
  if (groups < 1 || input.sizes[1] % groups != 0) return false;
  channels_last = !is_contiguous(input);
  if (channels_last && !is_channels_last(input)) return false;
  if (grad.dtype != input.dtype && grad.dtype != static_cast<int32_t>(DType::f32)) return false;
  for (const View* t : {&input, &grad, &residual}) {
    if (!is_absent(*t) && !(same_layout(*t, input) && starts_at_vector(*t))) return false;
  }
  const int64_t channels = input.sizes[1], batch = input.sizes[0];
  for (const View* t : {&call.weight, &call.bias}) {
    if (!is_absent(*t) && (t->dtype < 0 || !is_vector(*t, channels, t->dtype))) return false;
  }
  if ((call.of_weight && is_absent(call.weight)) || (call.of_bias && is_absent(call.bias))) return false;
  if (!is_absent(residual) && residual.dtype != grad.dtype) return false;
  if (!is_activation(call.activation) || !is_statistics(call.statistics, 2 * batch * groups)) return false;
  n.dtype = static_cast<DType>(input.dtype);
  n.grad_dtype = static_cast<DType>(grad.dtype);
  n.x = input.data;
  n.dy = grad.data;
  n.residual = residual.data;
  n.weight = vector_of(call.weight);
  n.bias = vector_of(call.bias);
  n.mean = static_cast<const float*>(call.statistics.data);
  n.rstd = n.mean + batch * groups;
  n.activation = {static_cast<Activation>(call.activation), call.low, call.high};
  return set_sizes(n, batch, channels, count, groups);
}

// --- native ops -------------------------------------------------------------------------------------------------------

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

void run(GroupBackward n, const Elements& e, bool channels_last, Regime regime) {
  e.put_into(n);
  TensorMemory memory(e.input);
  const int32_t error = launched(n, channels_last, regime, memory, e.input.get_device_index());
  STD_TORCH_CHECK(error != kDeclined, kOp, ": no memory for the sums of the groups");
  if (error != kTooWide) return check_launch(static_cast<cudaError_t>(error));
  STD_TORCH_CHECK(channels_last, kOp, ": these groups cannot be done in regime ", static_cast<int>(regime));
  // By way of the other layout.
  const Elements other = e.contiguous();
  run(n, other, false, Regime::automatic);
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
  STD_TORCH_CHECK(set_sizes(n, batch, channels, input.numel(), num_groups), kOp,
                  ": there must be fewer than 2^31 channels, of fewer than 2^31 elements each");
  const Elements elements{on_boundary(grad), on_boundary(input), on_boundary(residual), grad_input, grad_residual};
  run(n, elements, channels_last, static_cast<Regime>(regime));
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
Gradients group_norm_backward_or_none(const Tensor& grad_, const Tensor& input_, const OptionalTensor& weight,
                                      const OptionalTensor& bias, const OptionalTensor& residual_, const Tensor& statistics,
                                      int64_t num_groups, int64_t activation, double low, double high, bool of_input,
                                      bool of_weight, bool of_bias, bool of_residual) {
  if (!all_beside(input_, {&weight, &bias, &residual_})) return {};
  if (!is_beside(grad_, input_) || !is_beside(statistics, input_)) return {};
  const Tensor grad = on_boundary(grad_), input = on_boundary(input_);
  const OptionalTensor residual = on_boundary(residual_);
  const ActivationArgs acts = activation_of(kOp, activation, low, high);
  const GroupBackwardCall call{view_of(grad), view_of(input), view_of(weight), view_of(bias), view_of(residual),
                               view_of(statistics), num_groups, static_cast<int32_t>(acts.code), acts.low, acts.high,
                               of_input, of_weight, of_bias, of_residual};
  TensorMemory memory(input);
  const auto& made = memory.parts;
  const OptionalTensor &dx = made[Memory::kOut], &dresidual = made[Memory::kSum];
  const OptionalTensor &dweight = made[Memory::kWeight], &dbias = made[Memory::kBias];
  if (!is_launched(normswap_group_backward, call, input, memory)) {
    if (!memory.too_wide) return {};
    const int64_t groups = input.size(0) * num_groups;
    const float* mean = floats_of(kOp, statistics, input, 2 * groups);
    run_backward(grad, input, weight, bias, residual, mean, mean + groups, num_groups, true, acts, dx, dweight, dbias,
                 dresidual, 0);
  }
  return {dx, dweight, dbias, dresidual};
}

}  // namespace
}  // namespace normswap

extern "C" NORMSWAP_EXPORT int32_t normswap_group_backward(const normswap::GroupBackwardCall* call, normswap::Memory* memory,
                                                           int32_t device) {
  using namespace normswap;
  GroupBackward n{};
  bool channels_last = false;
  if (!set_group_backward(*call, n, channels_last)) return kDeclined;
  void *dweight = nullptr, *dbias = nullptr;
  if (!set_room(*memory, call->of_input, Memory::kOut, call->input, n.dx) ||
      !set_room(*memory, call->of_weight, Memory::kWeight, call->weight, dweight) ||
      !set_room(*memory, call->of_bias, Memory::kBias, call->bias, dbias) ||
      !set_room(*memory, call->of_residual, Memory::kSum, call->grad, n.dresidual)) {
    return kDeclined;
  }
  n.dweight = {dweight, n.weight.dtype};
  n.dbias = {dbias, n.bias.dtype};
  return launched(n, channels_last, Regime::automatic, *memory, device);
}

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
