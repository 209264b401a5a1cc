// batch_norm and its backward on CUDA tensors: checks, plan, workspace, launch.
#include "batch_norm/batch_norm_train.h"

#include <tuple>

#include "batch_norm/batch_norm_tensors.h"

namespace normswap {
namespace {

constexpr const char* kOp = "batch_norm";

using Launch = cudaError_t (*)(const BatchNormTrain&, const BatchNormPlan&, bool, cudaStream_t);

void launch(const BatchNormTrain& n, const BatchNormPlan& plan, const Tensor& input, Launch f32, Launch f16, Launch bf16) {
  const Launch run = n.dtype == DType::f32 ? f32 : n.dtype == DType::f16 ? f16 : bf16;
  check_launch(run(n, plan, gpu_of(input.get_device_index()).overlap, stream_of(input)));
}

bool is_float(const Tensor& t) {
  const auto type = t.scalar_type();
  return type == torch::headeronly::ScalarType::Float || type == torch::headeronly::ScalarType::Half ||
         type == torch::headeronly::ScalarType::BFloat16;
}

// The vectors, of one dtype, which is the input's or float32.
bool are_channels_of(const Tensor& input, std::initializer_list<OptionalTensor> vectors) {
  const OptionalTensor* first = nullptr;
  for (const OptionalTensor& t : vectors) {
    if (!t.has_value()) continue;
    if (!fits(t, input) || (first != nullptr && t->scalar_type() != (*first)->scalar_type())) return false;
    first = &t;
  }
  if (first == nullptr) return true;
  return (*first)->scalar_type() == input.scalar_type() ||
         (*first)->scalar_type() == torch::headeronly::ScalarType::Float;
}

// One value a channel or, of a scale, one; of the input's dtype.
bool is_of_input(const OptionalTensor& t, const Tensor& input, bool scale) {
  if (!t.has_value()) return true;
  if (t->scalar_type() != input.scalar_type()) return false;
  return fits(t, input) || (scale && t->numel() == 1 && t->is_cuda() &&
                            t->get_device_index() == input.get_device_index());
}

bool is_one(const OptionalTensor& scale, const Tensor& input) {
  return scale.has_value() && scale->numel() == 1 && input.size(1) > 1;
}

// Sizes and the plan for them; false where there is none.
bool plan_of(const Tensor& input, BatchNormSizes* sizes, BatchNormPlan* plan) {
  if (input.dim() < 2 || input.numel() == 0 || !is_float(input)) return false;
  const int64_t inner = inner_of(input);
  if (inner == 0) return false;
  const int64_t channels = input.size(1);
  *sizes = {input.numel() / (channels * inner), channels, inner, static_cast<int>(itemsize(dtype_of(input, kOp)))};
  return make_batch_norm_plan(*sizes, plan);
}

unsigned char* bytes_of(const OptionalTensor& t) {
  return t.has_value() ? static_cast<unsigned char*>(t->mutable_data_ptr()) : nullptr;
}

// Output, coefficients of the channels (channels, 4), signs; all absent, and nothing done, where the kernels cannot.
using Recorded = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor>;

Recorded forward(const Tensor& input_, const OptionalTensor& running_mean, const OptionalTensor& running_var,
                 const OptionalTensor& batches, const OptionalTensor& weight, const OptionalTensor& bias, bool training,
                 double momentum, double eps, const OptionalTensor& residual_, int64_t activation, double low, double high,
                 const OptionalTensor& scale, const OptionalTensor& input_bias, bool keeps_signs) {
  BatchNormTrain n{};
  BatchNormPlan plan;
  if (!plan_of(input_, &n.sizes, &plan)) return {};
  if (!are_channels_of(input_, {running_mean, running_var, weight, bias})) return {};
  if (training ? n.sizes.samples * n.sizes.inner < 2 : !running_mean.has_value() || !running_var.has_value()) return {};
  if (!is_of_input(scale, input_, true) || !is_of_input(input_bias, input_, false)) return {};
  if (!training && input_bias.has_value()) return {};
  if (residual_.has_value() && !is_alike(*residual_, input_)) return {};
  if (batches.has_value() && (!batches->is_cuda() || batches->get_device_index() != input_.get_device_index() ||
                              batches->scalar_type() != torch::headeronly::ScalarType::Long || batches->numel() != 1)) {
    return {};
  }
  const torch::stable::accelerator::DeviceGuard guard(input_.get_device_index());
  const Tensor input = on_boundary(input_);
  const OptionalTensor residual = on_boundary(residual_);
  n.activation = activation_of(kOp, activation, low, high);
  const OptionalTensor out = unfilled_like(input), coefficients = unfilled_floats(input, 4 * n.sizes.channels);
  const OptionalTensor workspace = unfilled_floats(input, training ? batch_norm_workspace(plan, n.sizes) : 1);
  if (!out.has_value() || !coefficients.has_value() || !workspace.has_value()) return {};
  OptionalTensor signs;
  if (keeps_signs && residual.has_value() && n.activation.code == Activation::relu) {
    signs = scratch(input, input.numel() / plan.vec);
  }
  n.x = input.const_data_ptr();
  n.residual = data_or_null(residual);
  n.y = out->mutable_data_ptr();
  n.signs = bytes_of(signs);
  n.weight = channels_of(weight, kOp);
  n.bias = channels_of(bias, kOp);
  n.running_mean = channels_of(running_mean, kOp);
  n.running_var = channels_of(running_var, kOp);
  n.scale = channels_of(scale, kOp);
  n.one_scale = is_one(scale, input);
  n.input_bias = channels_of(input_bias, kOp);
  n.batches = training && batches.has_value() ? static_cast<int64_t*>(batches->mutable_data_ptr()) : nullptr;
  n.coefficients = static_cast<ChannelCoefficients*>(coefficients->mutable_data_ptr());
  n.workspace = static_cast<float*>(workspace->mutable_data_ptr());
  n.eps = eps;
  n.momentum = momentum;
  n.frozen = !training;
  n.dtype = dtype_of(input, kOp);
  launch(n, plan, input, batch_norm_forward_f32, batch_norm_forward_f16, batch_norm_forward_bf16);
  return {out, coefficients, signs};
}

Recorded batch_norm_recorded(const Tensor& input, const OptionalTensor& running_mean, const OptionalTensor& running_var,
                             const OptionalTensor& batches, const OptionalTensor& weight, const OptionalTensor& bias,
                             bool training, double momentum, double eps, const OptionalTensor& residual,
                             int64_t activation, double low, double high, const OptionalTensor& scale,
                             const OptionalTensor& input_bias) {
  return forward(input, running_mean, running_var, batches, weight, bias, training, momentum, eps, residual, activation,
                 low, high, scale, input_bias, true);
}

OptionalTensor batch_norm_or_none(const Tensor& input, const OptionalTensor& running_mean,
                                  const OptionalTensor& running_var, const OptionalTensor& batches,
                                  const OptionalTensor& weight, const OptionalTensor& bias, bool training,
                                  double momentum, double eps, const OptionalTensor& residual, int64_t activation,
                                  double low, double high, const OptionalTensor& scale,
                                  const OptionalTensor& input_bias) {
  return std::get<0>(forward(input, running_mean, running_var, batches, weight, bias, training, momentum, eps, residual,
                             activation, low, high, scale, input_bias, false));
}

OptionalTensor room_for(bool wanted, const OptionalTensor& like) {
  return wanted && like.has_value() ? unfilled_like(*like) : std::nullopt;
}

// Gradients of input, weight, bias, residual, scale and the input's bias: those asked for, or none at all where the kernels
// cannot.
using Gradients =
    std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

Gradients batch_norm_backward(const Tensor& grad_, const Tensor& input_, const Tensor& coefficients,
                              const OptionalTensor& signs, const OptionalTensor& residual_, const OptionalTensor& weight,
                              const OptionalTensor& bias, bool training, int64_t activation, double low, double high,
                              bool of_input, bool of_weight, bool of_bias, bool of_residual, const OptionalTensor& scale,
                              const OptionalTensor& input_bias, double eps, bool of_scale, bool of_input_bias,
                              const OptionalTensor& running_mean, const OptionalTensor& running_var) {
  BatchNormTrain n{};
  BatchNormPlan plan;
  if (!plan_of(input_, &n.sizes, &plan) || !is_alike(grad_, input_)) return {};
  STD_TORCH_CHECK(coefficients.numel() == 4 * n.sizes.channels && coefficients.is_contiguous(), kOp,
                  "_backward: four coefficients a channel");
  const torch::stable::accelerator::DeviceGuard guard(input_.get_device_index());
  const Tensor input = on_boundary(input_), grad = on_boundary(grad_);
  const OptionalTensor residual = on_boundary(residual_);
  const OptionalTensor dx = room_for(of_input, input), dresidual = room_for(of_residual, grad);
  const OptionalTensor dw = room_for(of_weight, weight), db = room_for(of_bias, bias);
  n.one_scale = is_one(scale, input);
  const OptionalTensor ds =
      of_scale && n.one_scale ? unfilled_floats(input, n.sizes.channels) : room_for(of_scale, scale);
  const OptionalTensor dc = room_for(of_input_bias, input_bias);
  const OptionalTensor workspace = unfilled_floats(input, batch_norm_workspace(plan, n.sizes));
  const bool made = workspace.has_value() && dx.has_value() == of_input && dresidual.has_value() == of_residual &&
                    dw.has_value() == of_weight && db.has_value() == of_bias && ds.has_value() == of_scale &&
                    dc.has_value() == of_input_bias;
  if (!made) return {};
  n.x = input.const_data_ptr();
  n.dy = grad.const_data_ptr();
  n.residual = data_or_null(residual);
  n.signs = bytes_of(signs);
  n.dx = const_cast<void*>(data_or_null(dx));
  n.dresidual = const_cast<void*>(data_or_null(dresidual));
  n.dweight = channels_of(dw, kOp);
  n.dbias = channels_of(db, kOp);
  n.dscale = channels_of(ds, kOp);
  n.dinput_bias = channels_of(dc, kOp);
  n.scale = channels_of(scale, kOp);
  n.weight = channels_of(weight, kOp);
  n.running_mean = channels_of(running_mean, kOp);
  n.running_var = channels_of(running_var, kOp);
  n.eps = eps;
  n.coefficients = static_cast<ChannelCoefficients*>(coefficients.mutable_data_ptr());
  n.workspace = static_cast<float*>(workspace->mutable_data_ptr());
  n.activation = activation_of(kOp, activation, low, high);
  n.frozen = !training;
  n.dtype = dtype_of(input, kOp);
  launch(n, plan, input, batch_norm_backward_f32, batch_norm_backward_f16, batch_norm_backward_bf16);
  return {dx, dw, db, dresidual, ds, dc};
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("batch_norm_or_none", TORCH_BOX(&normswap::batch_norm_or_none));
  m.impl("batch_norm_recorded", TORCH_BOX(&normswap::batch_norm_recorded));
  m.impl("batch_norm_backward", TORCH_BOX(&normswap::batch_norm_backward));
}

// The plan, for tests that have no GPU: (vec, lanes, side, threads, values, width, last_width, group, last_group, across,
// log_run, line, strips, rows, piece_rows, pieces, items, floats of workspace) into out. Returns 0 where there is none.
extern "C" __attribute__((visibility("default"))) int normswap_batch_norm_plan(int64_t samples, int64_t channels,
                                                                               int64_t inner, int itemsize,
                                                                               int64_t* out) {
  const normswap::BatchNormSizes s{samples, channels, inner, itemsize};
  normswap::BatchNormPlan p;
  if (!normswap::make_batch_norm_plan(s, &p)) return 0;
  const int64_t values[] = {p.vec,    p.lanes,   p.side,  p.threads, p.values,     p.width,  p.last_width, p.group, p.last_group,
                            p.across, p.log_run, p.line, p.strips,  p.rows,       p.piece_rows, p.pieces,  p.items,
                            normswap::batch_norm_workspace(p, s)};
  for (const int64_t value : values) *out++ = value;
  return 1;
}
