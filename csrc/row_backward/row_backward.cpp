// The backward of layer_norm, rms_norm and l1_norm on CUDA tensors: checks, plan, memory, launches.
#include "row_backward/row_backward.h"

#include <tuple>

#include "abi/views.h"
#include "device/slope.h"

namespace normswap {
namespace {

using Launch = cudaError_t (*)(const RowBackward&, const BackwardPlan&, cudaStream_t);

// The kernels of a kind by the input's dtype, or that of a gradient of 16 bits.
struct Launches {
  Launch f32, f16, bf16;
  Launch of(const RowBackward& n) const {
    switch (n.dtype == DType::f32 ? n.grad_dtype : n.dtype) {
      case DType::f32: return f32;
      case DType::f16: return f16;
      default: return bf16;
    }
  }
};
constexpr Launches kLayerNorm{layer_norm_backward_f32, layer_norm_backward_f16, layer_norm_backward_bf16};
constexpr Launches kRmsNorm{rms_norm_backward_f32, rms_norm_backward_f16, rms_norm_backward_bf16};
constexpr Launches kL1Norm{l1_norm_backward, l1_norm_backward, l1_norm_backward};

const Launches& launches_of(NormKind kind) { return kind == NormKind::layer ? kLayerNorm : kRmsNorm; }

// Whether the residual has a gradient of its own.
bool has_apart(const RowBackward& n) { return n.residual_dtype != DType::f32; }

// `lean`: without a bias.
BackwardRows rows_of(const RowBackward& n, bool lean) {
  const bool active = n.activation.code != Activation::none;
  const bool slopes = active && !passes_or_stops(n.activation.code), sums = n.sum_grad != nullptr;
  const int of_x = static_cast<int>(itemsize(n.dtype)), of_dy = static_cast<int>(itemsize(n.grad_dtype));
  return {n.rows, n.cols, of_x, of_dy, active || sums || has_apart(n), lean, slopes, sums};
}

bool takes_grad(const RowBackward& n, const BackwardRows& of) {
  const bool narrow = of.grad_itemsize < of.itemsize && n.activation.code == Activation::none;
  return n.grad_dtype == n.dtype || n.grad_dtype == DType::f32 || (narrow && takes_narrow_grad(of));
}

// Which gradients are wanted.
struct Wanted {
  bool input, weight, bias;
};

// Makes room for those that are wanted, like what they are of, and launches; what calls give (abi/calls.h).
int32_t launched(const Launches& launches, RowBackward n, const BackwardRows& of, const BackwardPlan& plan, const View& input,
                 const View& weight, const View& bias, Wanted wanted, Memory& memory, int32_t device) {
  cudaStream_t stream{};
  void *dweight = nullptr, *dbias = nullptr;
  View apart = input;
  apart.dtype = static_cast<int32_t>(n.residual_dtype);
  if (!set_stream(device, stream) || !set_room(memory, wanted.input, Memory::kOut, input, n.dx) ||
      !set_room(memory, has_apart(n), Memory::kSum, apart, n.dresidual) ||
      !set_room(memory, wanted.weight, Memory::kWeight, weight, dweight) ||
      !set_room(memory, wanted.bias, Memory::kBias, bias, dbias)) {
    return kDeclined;
  }
  n.dweight = {dweight, n.weight.dtype};
  n.dbias = {dbias, n.bias.dtype};
  const bool columns = wanted.weight || wanted.bias;
  const int64_t sums = backward_sums(plan, of), partials = columns && plan.pieces > 1 ? backward_partials(plan, of) : 0;
  void* workspace = nullptr;
  if (!set_workspace(memory, 4 * (sums + partials), workspace)) return kDeclined;
  n.sums = static_cast<float*>(workspace);
  n.partials = n.sums + sums;
  cudaError_t error = launches.of(n)(n, plan, stream);
  if (error == cudaSuccess && columns && plan.pieces > 1) error = add_column_sums(n, plan, stream);
  return told(error);
}

// What the kernels are given but for what they write; false where they do not take it.
bool set_row_backward(const RowBackwardCall& call, RowBackward& n) {
  const View &input = call.input, &grad = call.grad, &sum_grad = call.sum_grad;
  const int64_t count = numel(input);
  if (input.dtype < 0 || grad.dtype < 0 || is_absent(grad)) return false;
  if (call.cols < 1 || count == 0 || count % call.cols != 0) return false;
  for (const View* t : {&input, &grad, &sum_grad}) {
    if (!is_absent(*t) && (numel(*t) != count || !is_contiguous(*t) || !starts_at_vector(*t))) return false;
  }
  if (!is_absent(sum_grad) && sum_grad.dtype != input.dtype) return false;
  for (const View* t : {&call.weight, &call.bias}) {
    const bool fits = is_absent(*t) || t->dtype == input.dtype || t->dtype == static_cast<int32_t>(DType::f32);
    if (!fits || !is_vector(*t, call.cols, t->dtype) || !starts_at_vector(*t)) return false;
  }
  if ((call.of_weight && is_absent(call.weight)) || (call.of_bias && is_absent(call.bias))) return false;
  n.rows = count / call.cols;
  const int each = call.kind == static_cast<int32_t>(NormKind::layer) ? 2 : 1;
  if (!is_activation(call.activation) || !is_statistics(call.statistics, each * n.rows)) return false;
  const float* statistics = static_cast<const float*>(call.statistics.data);
  n.mean = each == 2 ? statistics : nullptr;
  n.rstd = statistics + (each - 1) * n.rows;
  n.cols = call.cols;
  n.x = input.data;
  n.dy = grad.data;
  n.sum_grad = sum_grad.data;
  n.weight = vector_of(call.weight);
  n.bias = vector_of(call.bias);
  n.weight_offset = call.weight_offset;
  n.cast_before_weight = call.cast_before_weight;
  n.activation = {static_cast<Activation>(call.activation), call.low, call.high};
  n.dtype = static_cast<DType>(input.dtype);
  n.grad_dtype = static_cast<DType>(grad.dtype);
  const bool apart = n.dtype == DType::f32 && call.of_input && n.cols * static_cast<int64_t>(sizeof(float)) % 16 == 0;
  n.residual_dtype = apart ? static_cast<DType>(call.residual_dtype) : DType::f32;
  return true;
}

// --- native ops -------------------------------------------------------------------------------------------------------

using Gradients = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor>;  // of input, weight and bias

// Kernels read 16 bytes at a time of what is contiguous; gradients of .sum() and of slices are not.
Tensor plain(const Tensor& t) { return on_boundary(t.is_contiguous() ? t : torch::stable::contiguous(t)); }
OptionalTensor plain(const OptionalTensor& t) { return t.has_value() ? OptionalTensor(plain(*t)) : std::nullopt; }

void check_columns(const char* op, const OptionalTensor& vector, int64_t cols, DType dtype) {
  if (!vector.has_value()) return;
  const DType of = dtype_of(*vector, op);
  STD_TORCH_CHECK(vector->numel() == cols && (of == dtype || of == DType::f32), op, ": weight and bias must have ", cols,
                  " elements of the input's dtype or float32, got ", vector->numel());
}

ChannelVector columns_of(const OptionalTensor& vector) { return vector_of(view_of(vector)); }

// Fills in what all kinds have in common and launches; nothing where there is no memory for it.
Gradients run(const char* op, const Launches& launches, RowBackward n, const Tensor& grad_, const Tensor& input_,
              const OptionalTensor& weight_, const OptionalTensor& bias_, const OptionalTensor& sum_grad_, int64_t cols,
              Wanted wanted, int64_t passes, bool lean) {
  const Tensor grad = plain(grad_), input = plain(input_);
  const OptionalTensor weight = plain(weight_), bias = plain(bias_), sum_grad = plain(sum_grad_);
  n.cols = cols;
  n.rows = input.numel() / cols;
  n.dtype = dtype_of(input, op);
  n.grad_dtype = dtype_of(grad, op);
  n.x = input.const_data_ptr();
  n.dy = grad.const_data_ptr();
  n.sum_grad = data_or_null(sum_grad);
  const BackwardRows of = rows_of(n, lean);
  STD_TORCH_CHECK(cols > 0 && n.rows * cols == input.numel() && grad.numel() == input.numel() && takes_grad(n, of), op,
                  ": grad must have the input's size and its dtype or float32, in rows of ", cols,
                  "; or 16 bits, in layer_norm's plain rows of multiples of 8");
  STD_TORCH_CHECK(!sum_grad.has_value() ||
                      (sum_grad->numel() == input.numel() && sum_grad->scalar_type() == input.scalar_type()),
                  op, ": the gradient of the sum must be like the input");
  STD_TORCH_CHECK((weight.has_value() || !wanted.weight) && (bias.has_value() || !wanted.bias), op,
                  ": an absent weight or bias has no gradient");
  check_columns(op, weight, cols, n.dtype);
  check_columns(op, bias, cols, n.dtype);
  n.weight = columns_of(weight);
  n.bias = columns_of(bias);
  const int32_t device = input.get_device_index();
  BackwardPlan plan;
  STD_TORCH_CHECK(make_backward_plan(of, gpu_of(device), static_cast<int>(passes), &plan), op, ": rows of ", cols,
                  " elements cannot be done in passes: ", passes);
  TensorMemory memory(input);
  const int32_t error =
      launched(launches, n, of, plan, view_of(input), view_of(weight), view_of(bias), wanted, memory, device);
  if (error == kDeclined) return {};
  check_launch(static_cast<cudaError_t>(error));
  return {memory.parts[Memory::kOut], memory.parts[Memory::kWeight], memory.parts[Memory::kBias]};
}

const float* statistic_of(const char* op, const Tensor& statistics, int64_t count) {
  STD_TORCH_CHECK(statistics.scalar_type() == torch::headeronly::ScalarType::Float && statistics.is_contiguous() &&
                      statistics.numel() == count,
                  op, ": statistics must be contiguous float32 with ", count, " elements, got ", statistics.numel());
  return static_cast<const float*>(statistics.const_data_ptr());
}

Gradients layer_norm_backward_cuda(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                   const OptionalTensor& bias, const Tensor& statistics, const OptionalTensor& sum_grad,
                                   int64_t cols, int64_t activation, double low, double high, bool of_input,
                                   bool of_weight, bool of_bias, int64_t passes) {
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const int64_t rows = input.numel() / cols;
  RowBackward n{};
  n.mean = statistic_of("layer_norm_backward", statistics, 2 * rows);
  n.rstd = n.mean + rows;
  n.activation = activation_of("row_backward", activation, low, high);
  return run("layer_norm_backward", kLayerNorm, n, grad, input, weight, bias, sum_grad, cols,
             {of_input, of_weight, of_bias}, passes, false);
}

Gradients rms_norm_backward_cuda(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                 const Tensor& statistics, const OptionalTensor& sum_grad, int64_t cols,
                                 double weight_offset, bool cast_before_weight, int64_t activation, double low,
                                 double high, bool of_input, bool of_weight, int64_t passes) {
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  RowBackward n{};
  n.rstd = statistic_of("rms_norm_backward", statistics, input.numel() / cols);
  n.weight_offset = weight_offset;
  n.cast_before_weight = cast_before_weight;
  n.activation = activation_of("row_backward", activation, low, high);
  return run("rms_norm_backward", kRmsNorm, n, grad, input, weight, std::nullopt, sum_grad, cols,
             {of_input, of_weight, false}, passes, true);
}

OptionalTensor l1_norm_backward_cuda(const Tensor& grad, const Tensor& input, const Tensor& statistics, int64_t cols,
                                     double eps, double minimum, int64_t passes) {
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  STD_TORCH_CHECK(grad.scalar_type() == input.scalar_type(), "l1_norm_backward: grad must have the input's dtype");
  RowBackward n{};
  n.mean = statistic_of("l1_norm_backward", statistics, input.numel() / cols);
  n.eps = eps;
  n.minimum = minimum;
  return std::get<0>(run("l1_norm_backward", kL1Norm, n, grad, input, std::nullopt, std::nullopt, std::nullopt, cols,
                         {true, false, false}, passes, true));
}

}  // namespace
}  // namespace normswap

extern "C" NORMSWAP_EXPORT int32_t normswap_row_backward(const normswap::RowBackwardCall* call, normswap::Memory* memory,
                                                         int32_t device) {
  using namespace normswap;
  RowBackward n{};
  if (!set_row_backward(*call, n)) return kDeclined;
  const auto kind = static_cast<NormKind>(call->kind);
  const BackwardRows of = rows_of(n, kind != NormKind::layer);
  BackwardPlan plan;
  if (!takes_grad(n, of) || !make_backward_plan(of, gpu_of(device), 0, &plan)) return kDeclined;
  const Wanted wanted{call->of_input != 0, call->of_weight != 0, call->of_bias != 0};
  return launched(launches_of(kind), n, of, plan, call->input, call->weight, call->bias, wanted, *memory, device);
}

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("layer_norm_backward", TORCH_BOX(&normswap::layer_norm_backward_cuda));
  m.impl("rms_norm_backward", TORCH_BOX(&normswap::rms_norm_backward_cuda));
  m.impl("l1_norm_backward", TORCH_BOX(&normswap::l1_norm_backward_cuda));
}

// The plan, for tests that have no GPU, of the GPU described: (lanes, chunk_len, chunks, blocks_a_row, block_chunks, teams,
// warps, rows_a_piece, pieces, one_pass, slots, lag, keeps, wide, slot_bytes, shared, grid) into out. Returns 0 where
// there is none.
extern "C" __attribute__((visibility("default"))) int normswap_row_backward_plan(
    int64_t rows, int64_t cols, int itemsize, int grad_itemsize, int lean, int with, int slopes, int sums, int clusters,
    int shared, int passes, int64_t* out) {
  const normswap::Gpu gpu{clusters != 0, clusters != 0, shared, 132, true};
  const normswap::BackwardRows of{rows, cols, itemsize, grad_itemsize, with != 0, lean != 0, slopes != 0, sums != 0};
  normswap::BackwardPlan p;
  if (!normswap::make_backward_plan(of, gpu, passes, &p)) return 0;
  const int64_t values[] = {p.lanes, p.chunk_len, p.chunks, p.blocks_a_row, p.block_chunks, p.teams,
                            p.warps, p.rows_a_piece, p.pieces, p.one_pass, p.slots, p.lag,
                            p.keeps, p.wide, p.slot_bytes, p.shared, p.grid};
  for (const int64_t value : values) *out++ = value;
  return 1;
}
