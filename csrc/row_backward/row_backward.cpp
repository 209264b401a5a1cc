// The backward of layer_norm, rms_norm and l1_norm on CUDA tensors: checks, plan, allocation, launches.
#include "row_backward/row_backward.h"

#include <tuple>

#include "abi/tensors.h"

namespace normswap {
namespace {

using Gradients = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor>;  // of input, weight and bias
using Launch = cudaError_t (*)(const RowBackward&, const BackwardPlan&, cudaStream_t);

// Which gradients are asked for.
struct Wanted {
  bool input, weight, bias;
};

// Kernels read 16 bytes at a time of what is contiguous; gradients of .sum() and of slices are not.
Tensor plain(const Tensor& t) { return on_boundary(t.is_contiguous() ? t : torch::stable::contiguous(t)); }
OptionalTensor plain(const OptionalTensor& t) { return t.has_value() ? OptionalTensor(plain(*t)) : std::nullopt; }

void check_columns(const char* op, const OptionalTensor& vector, int64_t cols, DType dtype) {
  if (!vector.has_value()) return;
  const DType of = dtype_of(*vector, op);
  STD_TORCH_CHECK(vector->numel() == cols && (of == dtype || of == DType::f32), op, ": weight and bias must have ", cols,
                  " elements of the input's dtype or float32, got ", vector->numel());
}

ChannelVector columns_of(const char* op, const OptionalTensor& vector) {
  return vector.has_value() ? ChannelVector{vector->const_data_ptr(), dtype_of(*vector, op)} : ChannelVector{};
}

// Fills in what all kinds have in common, allocates, launches; nothing of it where there is no memory for it.
Gradients run(const char* op, Launch launch, RowBackward n, const Tensor& grad_, const Tensor& input_,
              const OptionalTensor& weight_, const OptionalTensor& bias_, const OptionalTensor& sum_grad_, int64_t cols,
              Wanted wanted, int64_t passes, bool lean) {
  const Tensor grad = plain(grad_), input = plain(input_);
  const OptionalTensor weight = plain(weight_), bias = plain(bias_), sum_grad = plain(sum_grad_);
  n.cols = cols;
  n.rows = input.numel() / cols;
  n.dtype = dtype_of(input, op);
  n.grad_dtype = dtype_of(grad, op);
  const bool with = n.activation.code != Activation::none || sum_grad.has_value();
  const int itemsizes[] = {static_cast<int>(itemsize(n.dtype)), static_cast<int>(itemsize(n.grad_dtype))};
  const BackwardRows of{n.rows, cols, itemsizes[0], itemsizes[1], with, lean};
  const bool narrow = of.grad_itemsize < of.itemsize;
  STD_TORCH_CHECK(cols > 0 && n.rows * cols == input.numel() && grad.numel() == input.numel() &&
                      (n.grad_dtype == n.dtype || n.grad_dtype == DType::f32 || (narrow && takes_narrow_grad(of))),
                  op, ": grad must have the input's size and its dtype or float32, in rows of ", cols,
                  "; or 16 bits, in layer_norm's plain rows of multiples of 8");
  STD_TORCH_CHECK(!sum_grad.has_value() ||
                      (sum_grad->numel() == input.numel() && sum_grad->scalar_type() == input.scalar_type()),
                  op, ": the gradient of the sum must be like the input");
  STD_TORCH_CHECK((weight.has_value() || !wanted.weight) && (bias.has_value() || !wanted.bias), op,
                  ": an absent weight or bias has no gradient");
  check_columns(op, weight, cols, n.dtype);
  check_columns(op, bias, cols, n.dtype);
  BackwardPlan plan;
  STD_TORCH_CHECK(make_backward_plan(of, gpu_of(input.get_device_index()), static_cast<int>(passes), &plan),
                  op, ": rows of ", cols, " elements cannot be done in passes: ", passes);
  const bool columns = wanted.weight || wanted.bias;
  const int64_t partials = columns && plan.pieces > 1 ? backward_partials(plan, of) : 0;
  const int64_t room = partials + backward_sums(plan, of);
  const Gradients made{wanted.input ? unfilled_like(input) : std::nullopt,
                       wanted.weight ? unfilled_like(*weight) : std::nullopt,
                       wanted.bias ? unfilled_like(*bias) : std::nullopt};
  const OptionalTensor workspace = room > 0 ? unfilled_floats(input, room) : std::nullopt;
  const auto& [dx, dweight, dbias] = made;
  if (dx.has_value() != wanted.input || dweight.has_value() != wanted.weight || dbias.has_value() != wanted.bias ||
      workspace.has_value() != (room > 0)) {
    return {};
  }
  n.x = input.const_data_ptr();
  n.dy = grad.const_data_ptr();
  n.sum_grad = data_or_null(sum_grad);
  n.weight = columns_of(op, weight);
  n.bias = columns_of(op, bias);
  n.dx = dx.has_value() ? dx->mutable_data_ptr() : nullptr;
  n.dweight = columns_of(op, dweight);
  n.dbias = columns_of(op, dbias);
  n.sums = room > 0 ? static_cast<float*>(workspace->mutable_data_ptr()) : nullptr;
  n.partials = n.sums + backward_sums(plan, of);
  const cudaStream_t stream = stream_of(input);
  check_launch(launch(n, plan, stream));
  if (columns && plan.pieces > 1) check_launch(add_column_sums(n, plan, stream));
  return made;
}

const float* statistic_of(const char* op, const Tensor& statistics, int64_t count) {
  STD_TORCH_CHECK(statistics.scalar_type() == torch::headeronly::ScalarType::Float && statistics.is_contiguous() &&
                      statistics.numel() == count,
                  op, ": statistics must be contiguous float32 with ", count, " elements, got ", statistics.numel());
  return static_cast<const float*>(statistics.const_data_ptr());
}

// The kernels of a kind by the input's dtype, or that of a gradient of 16 bits.
Launch launch_of(const Tensor& input, const Tensor& grad, Launch f32, Launch f16, Launch bf16) {
  const DType dtype = dtype_of(input, "backward");
  switch (dtype == DType::f32 ? dtype_of(grad, "backward") : dtype) {
    case DType::f32: return f32;
    case DType::f16: return f16;
    default: return bf16;
  }
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
  const Launch launch =
      launch_of(input, grad, layer_norm_backward_f32, layer_norm_backward_f16, layer_norm_backward_bf16);
  return run("layer_norm_backward", launch, n, grad, input, weight, bias, sum_grad, cols, {of_input, of_weight, of_bias},
             passes, false);
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
  const Launch launch = launch_of(input, grad, rms_norm_backward_f32, rms_norm_backward_f16, rms_norm_backward_bf16);
  return run("rms_norm_backward", launch, n, grad, input, weight, std::nullopt, sum_grad, cols,
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
  return std::get<0>(run("l1_norm_backward", l1_norm_backward, n, grad, input, std::nullopt, std::nullopt, std::nullopt,
                         cols, {true, false, false}, passes, true));
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("layer_norm_backward", TORCH_BOX(&normswap::layer_norm_backward_cuda));
  m.impl("rms_norm_backward", TORCH_BOX(&normswap::rms_norm_backward_cuda));
  m.impl("l1_norm_backward", TORCH_BOX(&normswap::l1_norm_backward_cuda));
}

// The plan, for tests that have no GPU, of the GPU described: (lanes, chunk_len, chunks, blocks_a_row, block_chunks, teams,
// warps, rows_a_piece, pieces, one_pass, slots, lag, slot_bytes, shared, grid) into out. Returns 0 where there is none.
extern "C" __attribute__((visibility("default"))) int normswap_row_backward_plan(int64_t rows, int64_t cols, int itemsize,
                                                                                 int grad_itemsize, int lean,
                                                                                 int clusters, int shared, int passes,
                                                                                 int64_t* out) {
  const normswap::Gpu gpu{clusters != 0, clusters != 0, shared, 132, true};
  normswap::BackwardPlan p;
  if (!normswap::make_backward_plan({rows, cols, itemsize, grad_itemsize, false, lean != 0}, gpu, passes, &p)) return 0;
  const int64_t values[] = {p.lanes,  p.chunk_len,    p.chunks,  p.blocks_a_row, p.block_chunks,
                            p.teams,  p.warps,        p.rows_a_piece, p.pieces,  p.one_pass,
                            p.slots,  p.lag,          p.slot_bytes,   p.shared,  p.grid};
  for (const int64_t value : values) *out++ = value;
  return 1;
}
