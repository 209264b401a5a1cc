// batch_norm and its backward on CUDA tensors: checks, plan, memory, launch.
#include "batch_norm/batch_norm_train.h"

#include <tuple>

#include "abi/views.h"

namespace normswap {
namespace {

constexpr const char* kOp = "batch_norm";

using Launch = cudaError_t(const BatchNormTrain&, const BatchNormPlan&, bool, cudaStream_t);

int32_t launched(const BatchNormTrain& n, const BatchNormPlan& plan, int32_t device, Launch* launch) {
  cudaStream_t stream{};
  if (!set_stream(device, stream)) return kDeclined;
  return told(launch(n, plan, gpu_of(device).overlap, stream));
}

// One value a channel, or absent, of any dtype that is served.
bool fits(const View& t, int64_t channels) { return t.dtype >= 0 && is_vector(t, channels, t.dtype); }

// The vectors, of one dtype, which is the input's or float32.
bool are_channels_of(const View& input, std::initializer_list<const View*> vectors) {
  const View* first = nullptr;
  for (const View* t : vectors) {
    if (is_absent(*t)) continue;
    if (!fits(*t, input.sizes[1]) || (first != nullptr && t->dtype != first->dtype)) return false;
    first = t;
  }
  return first == nullptr || first->dtype == input.dtype || first->dtype == static_cast<int32_t>(DType::f32);
}

bool is_one(const View& scale, const View& input) {
  return !is_absent(scale) && numel(scale) == 1 && input.sizes[1] > 1;
}

// One value a channel or, of a scale, one; of the input's dtype.
bool is_of_input(const View& t, const View& input, bool scale) {
  return is_absent(t) || (t.dtype == input.dtype && (fits(t, input.sizes[1]) || (scale && numel(t) == 1)));
}

bool is_alike(const View& other, const View& input) {
  return is_absent(other) || (other.dtype == input.dtype && same_layout(other, input) && starts_at_vector(other));
}

// Elements between one of a channel and the next: of a dense (N, C, *) that is contiguous or channels last; 0 of others.
int64_t inner_of(const View& t) {
  return is_contiguous(t) ? numel(t) / (t.sizes[0] * t.sizes[1]) : is_channels_last(t) ? 1 : 0;
}

// False where the kernels do not take such an input.
bool set_sizes(const View& input, BatchNormTrain& n) {
  const int64_t count = numel(input), inner = input.dims < 2 || count == 0 ? 0 : inner_of(input);
  if (input.dtype < 0 || inner == 0 || !starts_at_vector(input)) return false;
  const int64_t channels = input.sizes[1];
  n.dtype = static_cast<DType>(input.dtype);
  n.sizes = {count / (channels * inner), channels, inner, static_cast<int>(itemsize(n.dtype))};
  return true;
}

// Where so many tensors are read twice, but by frozen statistics; false where there are too many rows or columns.
bool set_plan(const BatchNormTrain& n, int tensors, int32_t device, BatchNormPlan& plan) {
  const Gpu gpu = gpu_of(device);
  return make_batch_norm_plan(n.sizes, {n.frozen ? 0 : tensors, gpu.clusters, gpu.shared}, &plan);
}

template <class Call>
void set_common(const Call& call, BatchNormTrain& n) {
  n.x = call.input.data;
  n.residual = call.residual.data;
  n.weight = vector_of(call.weight);
  n.running_mean = vector_of(call.running_mean);
  n.running_var = vector_of(call.running_var);
  n.scale = vector_of(call.scale);
  n.one_scale = is_one(call.scale, call.input);
  n.eps = call.eps;
  n.activation = {static_cast<Activation>(call.activation), call.low, call.high};
  n.frozen = !call.training;
}

// What the kernels are given but for what they write; false where they do not take it.
bool set_batch_norm(const BatchNormTrainCall& call, BatchNormTrain& n) {
  const View& input = call.input;
  const bool has_statistics = !is_absent(call.running_mean) && !is_absent(call.running_var);
  if (!set_sizes(input, n) || !is_activation(call.activation)) return false;
  if (!are_channels_of(input, {&call.running_mean, &call.running_var, &call.weight, &call.bias})) return false;
  if (call.training ? n.sizes.samples * n.sizes.inner < 2 : !has_statistics || !is_absent(call.input_bias)) return false;
  if (!is_of_input(call.scale, input, true) || !is_of_input(call.input_bias, input, false)) return false;
  if (!is_alike(call.residual, input)) return false;
  set_common(call, n);
  n.bias = vector_of(call.bias);
  n.input_bias = vector_of(call.input_bias);
  n.batches = call.training ? call.batches : nullptr;
  n.momentum = call.momentum;
  return true;
}

bool set_batch_norm_backward(const BatchNormBackwardCall& call, BatchNormTrain& n) {
  const View& input = call.input;
  if (!set_sizes(input, n) || is_absent(call.grad) || !is_alike(call.grad, input)) return false;
  if (!is_alike(call.residual, input) || !is_activation(call.activation)) return false;
  if (!are_channels_of(input, {&call.running_mean, &call.running_var, &call.weight, &call.bias})) return false;
  if (!is_of_input(call.scale, input, true) || !is_of_input(call.input_bias, input, false)) return false;
  if ((call.of_weight && is_absent(call.weight)) || (call.of_bias && is_absent(call.bias))) return false;
  if (!is_statistics(call.coefficients, 4 * n.sizes.channels)) return false;
  set_common(call, n);
  n.dy = call.grad.data;
  n.signs = static_cast<unsigned char*>(const_cast<void*>(call.signs));
  n.coefficients = static_cast<ChannelCoefficients*>(const_cast<void*>(call.coefficients.data));
  return true;
}

// --- native ops -------------------------------------------------------------------------------------------------------

// Output, coefficients of the channels (channels, 4), signs; all absent, and nothing done, where the kernels cannot.
using Recorded = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor>;

bool is_count(const Tensor& t) {
  return t.scalar_type() == torch::headeronly::ScalarType::Long && t.numel() == 1;
}

Recorded forward(const Tensor& input_, const OptionalTensor& running_mean, const OptionalTensor& running_var,
                 const OptionalTensor& batches, const OptionalTensor& weight, const OptionalTensor& bias, bool training,
                 double momentum, double eps, const OptionalTensor& residual_, int64_t activation, double low, double high,
                 const OptionalTensor& scale, const OptionalTensor& input_bias, bool statistics) {
  if (!all_beside(input_, {&running_mean, &running_var, &batches, &weight, &bias, &residual_, &scale, &input_bias})) return {};
  if (batches.has_value() && !is_count(*batches)) return {};
  const Tensor input = on_boundary(input_);
  const OptionalTensor residual = on_boundary(residual_);
  const ActivationArgs acts = activation_of(kOp, activation, low, high);
  int64_t* const counted = batches.has_value() ? static_cast<int64_t*>(batches->mutable_data_ptr()) : nullptr;
  const BatchNormTrainCall call{view_of(input), view_of(running_mean), view_of(running_var), view_of(weight), view_of(bias),
                                view_of(residual), view_of(scale), view_of(input_bias), counted, momentum, eps, training,
                                static_cast<int32_t>(acts.code), acts.low, acts.high, statistics};
  TensorMemory memory(input);
  if (!is_launched(normswap_batch_norm_train, call, input, memory)) return {};
  return {memory.parts[Memory::kOut], memory.parts[Memory::kStatistics], memory.parts[Memory::kSigns]};
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
  if (!all_beside(input_, {&signs, &residual_, &weight, &bias, &scale, &input_bias, &running_mean, &running_var})) return {};
  if (!is_beside(grad_, input_) || !is_beside(coefficients, input_)) return {};
  const Tensor input = on_boundary(input_), grad = on_boundary(grad_);
  const OptionalTensor residual = on_boundary(residual_);
  const ActivationArgs acts = activation_of(kOp, activation, low, high);
  const BatchNormBackwardCall call{view_of(grad), view_of(input), view_of(coefficients), view_of(residual), view_of(weight),
                                   view_of(bias), view_of(scale), view_of(input_bias), view_of(running_mean),
                                   view_of(running_var), data_or_null(signs), eps, training, static_cast<int32_t>(acts.code),
                                   acts.low, acts.high, of_input, of_weight, of_bias, of_residual, of_scale, of_input_bias};
  TensorMemory memory(input);
  if (!is_launched(normswap_batch_norm_backward, call, input, memory)) return {};
  const auto& p = memory.parts;
  return {p[Memory::kOut], p[Memory::kWeight], p[Memory::kBias], p[Memory::kSum], p[Memory::kScale], p[Memory::kInputBias]};
}

}  // namespace
}  // namespace normswap

extern "C" NORMSWAP_EXPORT int32_t normswap_batch_norm_train(const normswap::BatchNormTrainCall* call,
                                                             normswap::Memory* memory, int32_t device) {
  using namespace normswap;
  BatchNormTrain n{};
  BatchNormPlan plan;
  if (!set_batch_norm(*call, n) || !set_plan(n, 1, device, plan)) return kDeclined;
  const View& input = call->input;
  n.y = room_like(*memory, Memory::kOut, input, input.dtype);
  float* coefficients = room_for_floats(*memory, Memory::kStatistics, 4 * n.sizes.channels);
  void* workspace = nullptr;
  const int64_t bytes = call->training ? 4 * batch_norm_workspace(plan, n.sizes) : 0;
  if (n.y == nullptr || coefficients == nullptr || !set_workspace(*memory, bytes, workspace)) return kDeclined;
  if (call->statistics && n.residual != nullptr && n.activation.code == Activation::relu) {
    n.signs = room_for_bytes(*memory, Memory::kSigns, numel(input) / plan.vec);
    if (n.signs == nullptr) return kDeclined;
  }
  n.coefficients = reinterpret_cast<ChannelCoefficients*>(coefficients);
  n.workspace = static_cast<float*>(workspace);
  return launched(n, plan, device, batch_norm_train_forward);
}

extern "C" NORMSWAP_EXPORT int32_t normswap_batch_norm_backward(const normswap::BatchNormBackwardCall* call,
                                                                normswap::Memory* memory, int32_t device) {
  using namespace normswap;
  BatchNormTrain n{};
  BatchNormPlan plan;
  if (!set_batch_norm_backward(*call, n) || !set_plan(n, 2, device, plan)) return kDeclined;
  const int64_t each = 1;
  const View floats{nullptr, &n.sizes.channels, &each, 1, static_cast<int32_t>(DType::f32)};
  const auto set_vector = [&](int32_t wanted, Memory::Part part, const View& like, ChannelVector& vector) {
    void* room = nullptr;
    const bool is_there = set_room(*memory, wanted, part, like, room);
    vector = {room, vector_of(like).dtype};
    return is_there;
  };
  const bool all = set_room(*memory, call->of_input, Memory::kOut, call->input, n.dx) &&
                   set_room(*memory, call->of_residual, Memory::kSum, call->grad, n.dresidual) &&
                   set_vector(call->of_weight, Memory::kWeight, call->weight, n.dweight) &&
                   set_vector(call->of_bias, Memory::kBias, call->bias, n.dbias) &&
                   set_vector(call->of_scale, Memory::kScale, n.one_scale ? floats : call->scale, n.dscale) &&
                   set_vector(call->of_input_bias, Memory::kInputBias, call->input_bias, n.dinput_bias);
  void* workspace = nullptr;
  if (!all || !set_workspace(*memory, 4 * batch_norm_workspace(plan, n.sizes), workspace)) return kDeclined;
  n.workspace = static_cast<float*>(workspace);
  return launched(n, plan, device, batch_norm_train_backward);
}

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("batch_norm_or_none", TORCH_BOX(&normswap::batch_norm_or_none));
  m.impl("batch_norm_recorded", TORCH_BOX(&normswap::batch_norm_recorded));
  m.impl("batch_norm_backward", TORCH_BOX(&normswap::batch_norm_backward));
}

// The plan, for tests that have no GPU: (vec, lanes, side, threads, values, width, last_width, group, last_group, across,
// log_run, line, strips, rows, piece_rows, pieces, items, held, floats of workspace) into out. Returns 0 where there is none.
extern "C" __attribute__((visibility("default"))) int normswap_batch_norm_plan(int64_t samples, int64_t channels,
                                                                               int64_t inner, int itemsize, int tensors,
                                                                               int clusters, int shared, int64_t* out) {
  const normswap::BatchNormSizes s{samples, channels, inner, itemsize};
  normswap::BatchNormPlan p;
  if (!normswap::make_batch_norm_plan(s, {tensors, clusters != 0, shared}, &p)) return 0;
  const int64_t values[] = {p.vec,    p.lanes,   p.side, p.threads, p.values, p.width,      p.last_width, p.group, p.last_group,
                            p.across, p.log_run, p.line, p.strips,  p.rows,   p.piece_rows, p.pieces,     p.items, p.held,
                            normswap::batch_norm_workspace(p, s)};
  for (const int64_t value : values) *out++ = value;
  return 1;
}
