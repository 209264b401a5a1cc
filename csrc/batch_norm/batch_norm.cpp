// batch_norm_eval on CUDA tensors: checks and launch.
#include "batch_norm/batch_norm.h"

#include "abi/views.h"

namespace normswap {
namespace {

// What the kernel is given but for the output; false where it does not take it.
bool batch_norm_of(const BatchNormCall& call, BatchNormEval& n) {
  const View& input = call.input;
  if (input.dims < 2 || input.dtype < 0 || numel(input) == 0 || input.sizes[1] > kMaxBatchNormChannels) return false;
  const bool contiguous = is_contiguous(input);
  if (!contiguous && !is_channels_last(input)) return false;
  if (!is_absent(call.residual) && (call.residual.dtype != input.dtype || !same_layout(call.residual, input))) return false;
  if (is_absent(call.running_mean) || is_absent(call.running_var) || !is_activation(call.activation)) return false;
  const int32_t kept = call.running_mean.dtype;  // as PyTorch takes them together
  if (kept != input.dtype && kept != static_cast<int32_t>(DType::f32)) return false;
  for (const View* t : {&call.running_mean, &call.running_var, &call.weight, &call.bias}) {
    if (!is_vector(*t, input.sizes[1], kept)) return false;
  }
  n.x = input.data;
  n.residual = call.residual.data;
  n.running_mean = vector_of(call.running_mean);
  n.running_var = vector_of(call.running_var);
  n.weight = vector_of(call.weight);
  n.bias = vector_of(call.bias);
  n.elements = numel(input);
  n.channels = input.sizes[1];
  n.inner = contiguous ? n.elements / (input.sizes[0] * n.channels) : 1;
  n.eps = call.eps;
  n.activation = {static_cast<Activation>(call.activation), call.low, call.high};
  n.dtype = static_cast<DType>(input.dtype);
  return true;
}

OptionalTensor batch_norm_eval_or_none(const Tensor& input, const Tensor& running_mean, const Tensor& running_var,
                                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                       const OptionalTensor& residual, int64_t activation, double low, double high) {
  if (!is_beside(running_mean, input) || !is_beside(running_var, input) || !all_beside(input, {&weight, &bias, &residual})) {
    return std::nullopt;
  }
  const ActivationArgs acts = activation_of("batch_norm_eval", activation, low, high);
  const BatchNormCall call{view_of(input), view_of(residual), view_of(running_mean), view_of(running_var), view_of(weight),
                           view_of(bias), eps, static_cast<int32_t>(acts.code), acts.low, acts.high};
  TensorMemory memory(input);
  return is_launched(normswap_batch_norm, call, input, memory) ? memory.parts[Memory::kOut] : std::nullopt;
}

}  // namespace
}  // namespace normswap

extern "C" NORMSWAP_EXPORT int32_t normswap_batch_norm(const normswap::BatchNormCall* call, normswap::Memory* memory,
                                                       int32_t device) {
  using namespace normswap;
  BatchNormEval n{};
  cudaStream_t stream{};
  if (!batch_norm_of(*call, n) || !set_stream(device, stream)) return kDeclined;
  n.y = room_like(*memory, Memory::kOut, call->input, call->input.dtype);
  return n.y == nullptr ? kDeclined : told(batch_norm_eval(n, gpu_of(device).multiprocessors, stream));
}

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("batch_norm_eval_or_none", TORCH_BOX(&normswap::batch_norm_eval_or_none));
}

// No gradient is recorded, and the dispatcher's own way past this key costs more than the call.
STABLE_TORCH_LIBRARY_IMPL(normswap, AutogradCUDA, m) {
  m.impl("batch_norm_eval_or_none", TORCH_BOX(&normswap::batch_norm_eval_or_none));
}
