// layer_norm and rms_norm with what may stand before and behind them, and calls that do all of one: checks, memory, launch.
// Those decline what is not plain enough for that, or too large for the memory: the caller then goes the general way, which
// copies, converts or raises.
#include <tuple>

#include "row/row_launch.h"

namespace normswap {
namespace {

// Elements from one sample's values to the next's; 0 where all samples have the same.
int64_t stride_of_samples(const View& t, int64_t dims) { return t.dims > dims && t.sizes[0] > 1 ? t.strides[0] : 0; }

// Whether the trailing `dims` dims are the input's, dense, the first is the input's or 1, and all others are 1.
bool is_per_sample(const View& t, const View& input, int64_t dims) {
  int64_t stride = 1;
  if (t.dims != input.dims) return false;
  for (int64_t d = input.dims - 1; d >= 0; --d) {
    const bool normalised = d >= input.dims - dims;
    if (t.sizes[d] != (normalised ? input.sizes[d] : 1) && !(d == 0 && t.sizes[0] == input.sizes[0])) return false;
    if (normalised && t.sizes[d] != 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

// Residual, scale and shift, and the activation; false where the kernels do not take them.
bool set_options(const RowNormCall& call, RowNorm& n) {
  RowOptions& o = n.options;
  const View &input = call.input, &residual = call.residual, &scale = call.scale, &shift = call.shift;
  o.residual_dtype = n.dtype;
  if (!is_absent(residual)) {
    const bool alike = residual.dtype == input.dtype || (residual.dtype > 0 && n.dtype == DType::f32);
    if (!alike || !same_sizes(residual, input) || !is_contiguous(residual)) return false;
    o.residual_dtype = static_cast<DType>(residual.dtype);
  }
  if (is_absent(scale) != is_absent(shift) || !is_activation(call.activation)) return false;
  if (!is_absent(scale)) {
    const bool alike = affine_dtypes_fit(input, scale, shift) && is_per_sample(scale, input, call.dims) &&
                       is_per_sample(shift, input, call.dims);
    o.sample_stride = stride_of_samples(scale, call.dims);
    if (!alike || stride_of_samples(shift, call.dims) != o.sample_stride) return false;
    o.scale_dtype = static_cast<DType>(scale.dtype);
  }
  o.residual = residual.data;
  o.scale = scale.data;
  o.shift = shift.data;
  o.rows_per_sample = o.sample_stride > 0 ? n.rows / input.sizes[0] : n.rows;
  o.activation = {static_cast<Activation>(call.activation), call.low, call.high};
  return true;
}

// Whether nothing stands before or behind the norm.
bool is_alone(const RowNorm& n) {
  const RowOptions& o = n.options;
  return o.residual == nullptr && o.scale == nullptr && o.activation.code == Activation::none;
}

// Whether kernels store the output so: as the input, as float32 of 16 bits, as 16 bits of the float32 layer_norm alone or
// behind a residual; the last two of rows that begin and end, and all that belongs to them, at multiples of 16 bytes.
bool set_out_dtype(const RowNormCall& call, RowNorm& n) {
  if (call.dtype < 0) return false;
  n.out_dtype = static_cast<DType>(call.dtype);
  if (n.out_dtype == n.dtype) return true;
  const bool narrow = n.dtype == DType::f32 && n.kind == NormKind::layer && (is_alone(n) || only_adds(n));
  return (n.out_dtype == DType::f32 || narrow) && n.cols * 2 % 16 == 0 && !is_ragged(n, static_cast<int>(itemsize(n.dtype)));
}

// What the kernels are given but for what they write; false where they do not take it.
bool set_row_norm(const RowNormCall& call, RowNorm& n) {
  const View& input = call.input;
  if (input.dtype < 0 || call.dims < 1 || call.dims > input.dims || !is_contiguous(input)) return false;
  int64_t rows = 1, cols = 1;
  for (int64_t d = 0; d < input.dims; ++d) (d < input.dims - call.dims ? rows : cols) *= input.sizes[d];
  if (rows == 0 || cols == 0) return false;
  n = rows_of(rows, cols, static_cast<DType>(input.dtype), call.eps);
  n.x = input.data;
  n.kind = static_cast<NormKind>(call.kind);
  const bool rms = n.kind == NormKind::rms;
  n.weight_offset = !rms ? -0.0 : is_absent(call.weight) ? 0.0 : call.weight_offset;  // -0 + w is w, -0 too
  n.cast_before_weight = call.cast_before_weight;
  if (!set_parameters(n, input, input.dims - call.dims, call.dims, call.weight, call.bias) || !set_options(call, n)) return false;
  const bool mixed = n.options.residual_dtype != n.dtype;
  return !(mixed && is_ragged(n, static_cast<int>(itemsize(n.dtype)))) && set_out_dtype(call, n);
}

// With all that it is given, and writes.
int32_t launched(const RowNorm& n, Memory& memory, int32_t device, Regime regime) {
  if (is_alone(n) && itemsize(n.out_dtype) <= itemsize(n.dtype)) {
    const bool layer = n.kind == NormKind::layer;
    return launched(layer ? kLayerNorm : kRmsNorm, layer ? 2 : 1, n, memory, device, regime);
  }
  return launched(kNormWithOptions, 0, n, memory, device, regime, true);
}

// --- native ops -------------------------------------------------------------------------------------------------------

// What stands before and behind the norm.
struct Options {
  OptionalTensor residual, scale, shift;
  int64_t activation;
  double low, high;
  OptionalDtype dtype;  // of the output
};

RowNormCall call_of(NormKind kind, const Tensor& input, int64_t dims, const OptionalTensor& weight, const OptionalTensor& bias,
                    double eps, double weight_offset, bool cast_before_weight, const Options& o, bool statistics) {
  const auto [code, low, high] = activation_of(kind == NormKind::rms ? "rms_norm" : "layer_norm", o.activation, o.low, o.high);
  const View x = view_of(input);
  const int32_t dtype = o.dtype.has_value() ? code_of(*o.dtype) : x.dtype;
  return {x, view_of(weight), view_of(bias), view_of(o.residual), view_of(o.scale), view_of(o.shift), dims, eps, weight_offset,
          static_cast<int32_t>(kind), cast_before_weight, static_cast<int32_t>(code), low, high, dtype, statistics};
}

// The output and the sum, given.
void fill(const char* op, const RowNormCall& call, const Tensor& input, std::initializer_list<const OptionalTensor*> others,
          const Tensor& out, const OptionalTensor& sum, float* mean, float* rstd, int64_t regime) {
  RowNorm n{};
  STD_TORCH_CHECK(all_beside(input, others), op, ": all tensors must be on the input's device, cuda:",
                  input.get_device_index());
  const bool alike = is_absent(call.residual) || call.residual.dtype == call.input.dtype;
  STD_TORCH_CHECK(alike && set_row_norm(call, n), op,
                  ": input and residual must be contiguous and alike, weight and bias must have the normalized dims, scale "
                  "and shift, both or neither and of one layout, too, the input's first size or 1, and 1 elsewhere; all but "
                  "residual of the input's dtype or float32");
  STD_TORCH_CHECK((n.options.residual != nullptr) == sum.has_value(), op, ": sum must be given where residual is");
  check_out(op, out, input);
  STD_TORCH_CHECK(out.is_contiguous(), op, ": out must be contiguous");
  if (sum.has_value()) {
    check_out(op, *sum, input);
    n.options.sum = sum->mutable_data_ptr();
  }
  n.y = out.mutable_data_ptr();
  n.mean = mean;
  n.rstd = rstd;
  TensorMemory memory(input);
  const int32_t error = launched(n, memory, input.get_device_index(), static_cast<Regime>(regime));
  check_rows(op, n, regime, error);
}

// The rows of an input whose last `dims` are normalised.
int64_t rows_over(const Tensor& input, int64_t dims) {
  int64_t rows = 1;
  for (int64_t d = 0; d < input.dim() - dims; ++d) rows *= input.size(d);
  return rows;
}

void layer_norm_cuda(const Tensor& input, int64_t dims, const OptionalTensor& weight_, const OptionalTensor& bias_, double eps,
                     const OptionalTensor& residual, const OptionalTensor& scale, const OptionalTensor& shift,
                     int64_t activation, double low, double high, Tensor out, OptionalTensor sum, OptionalTensor mean,
                     OptionalTensor rstd, int64_t regime) {
  constexpr const char* op = "layer_norm";
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const OptionalTensor weight = on_boundary(weight_), bias = on_boundary(bias_);
  const Options options{residual, scale, shift, activation, low, high, std::nullopt};
  const RowNormCall call = call_of(NormKind::layer, input, dims, weight, bias, eps, 0.0, false, options, false);
  const int64_t rows = rows_over(input, dims);
  fill(op, call, input, {&weight, &bias, &residual, &scale, &shift}, out, sum, floats_or_null(op, mean, input, rows),
       floats_or_null(op, rstd, input, rows), regime);
}

void rms_norm_cuda(const Tensor& input, int64_t dims, const OptionalTensor& weight_, double eps, double weight_offset,
                   bool cast_before_weight, const OptionalTensor& residual, const OptionalTensor& scale,
                   const OptionalTensor& shift, int64_t activation, double low, double high, Tensor out,
                   OptionalTensor sum, OptionalTensor rstd, int64_t regime) {
  constexpr const char* op = "rms_norm";
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const OptionalTensor weight = on_boundary(weight_);
  const Options options{residual, scale, shift, activation, low, high, std::nullopt};
  const RowNormCall call =
      call_of(NormKind::rms, input, dims, weight, std::nullopt, eps, weight_offset, cast_before_weight, options, false);
  fill(op, call, input, {&weight, &residual, &scale, &shift}, out, sum, nullptr,
       floats_or_null(op, rstd, input, rows_over(input, dims)), regime);
}

// --- calls that do all of it ------------------------------------------------------------------------------------------

// Output, sum and statistics, those that there are to be, or nothing.
using Result = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor>;

Result row_norm(NormKind kind, const Tensor& input, int64_t dims, const OptionalTensor& weight_, const OptionalTensor& bias_,
                double eps, double weight_offset, bool cast_before_weight, const Options& o, bool statistics) {
  if (!all_beside(input, {&weight_, &bias_, &o.residual, &o.scale, &o.shift})) return {};
  const OptionalTensor weight = on_boundary(weight_), bias = on_boundary(bias_);
  const RowNormCall call = call_of(kind, input, dims, weight, bias, eps, weight_offset, cast_before_weight, o, statistics);
  TensorMemory memory(input);
  if (!is_launched(normswap_row_norm, call, input, memory)) return {};
  return {memory.parts[Memory::kOut], memory.parts[Memory::kSum], memory.parts[Memory::kStatistics]};
}

// An input that is contiguous but for its last dim is another kernel's.
Result layer_norm(const Tensor& input, int64_t dims, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  const Options& o, bool statistics) {
  const bool alone = !o.residual.has_value() && !o.scale.has_value() && o.activation == 0 && !o.dtype.has_value();
  if (input.is_contiguous() || dims != 1 || !alone) {
    return row_norm(NormKind::layer, input, dims, weight, bias, eps, 0.0, false, o, statistics);
  }
  if (!is_plain(input, input.dim() - 1, 1, weight, bias)) return {};
  OptionalTensor kept;
  if (statistics) {
    kept = unfilled_floats(input, 2 * (input.numel() / input.size(-1)));
    if (!kept.has_value()) return {};
  }
  float* floats = statistics ? static_cast<float*>(kept->mutable_data_ptr()) : nullptr;
  const OptionalTensor out = layer_norm_of_permuted(input, weight, bias, eps, floats);
  return out.has_value() ? Result{out, std::nullopt, kept} : Result{};
}

using WithSum = std::tuple<OptionalTensor, OptionalTensor>;  // output and, with a residual, the sum

WithSum without_statistics(const Result& made) { return {std::get<0>(made), std::get<1>(made)}; }

Result layer_norm_recorded(const Tensor& input, int64_t dims, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps, const OptionalTensor& residual, const OptionalTensor& scale,
                           const OptionalTensor& shift, int64_t activation, double low, double high, OptionalDtype dtype) {
  return layer_norm(input, dims, weight, bias, eps, {residual, scale, shift, activation, low, high, dtype}, true);
}

WithSum layer_norm_or_none(const Tensor& input, int64_t dims, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps, const OptionalTensor& residual, const OptionalTensor& scale,
                           const OptionalTensor& shift, int64_t activation, double low, double high, OptionalDtype dtype) {
  const Options options{residual, scale, shift, activation, low, high, dtype};
  return without_statistics(layer_norm(input, dims, weight, bias, eps, options, false));
}

Result rms_norm_recorded(const Tensor& input, int64_t dims, const OptionalTensor& weight, double eps, double weight_offset,
                         bool cast, const OptionalTensor& residual, const OptionalTensor& scale,
                         const OptionalTensor& shift, int64_t activation, double low, double high) {
  const Options options{residual, scale, shift, activation, low, high, std::nullopt};
  return row_norm(NormKind::rms, input, dims, weight, {}, eps, weight_offset, cast, options, true);
}

WithSum rms_norm_or_none(const Tensor& input, int64_t dims, const OptionalTensor& weight, double eps, double weight_offset,
                         bool cast, const OptionalTensor& residual, const OptionalTensor& scale,
                         const OptionalTensor& shift, int64_t activation, double low, double high) {
  const Options options{residual, scale, shift, activation, low, high, std::nullopt};
  return without_statistics(row_norm(NormKind::rms, input, dims, weight, {}, eps, weight_offset, cast, options, false));
}

}  // namespace
}  // namespace normswap

extern "C" NORMSWAP_EXPORT int32_t normswap_row_norm(const normswap::RowNormCall* call, normswap::Memory* memory,
                                                     int32_t device) {
  using namespace normswap;
  RowNorm n{};
  if (!set_row_norm(*call, n)) return kDeclined;
  n.y = dense_room(*memory, Memory::kOut, call->input, call->dtype);
  if (n.y == nullptr) return kDeclined;
  if (n.options.residual != nullptr) {
    n.options.sum = dense_room(*memory, Memory::kSum, call->input, call->input.dtype);
    if (n.options.sum == nullptr) return kDeclined;
  }
  if (call->statistics) {
    const bool layer = n.kind == NormKind::layer;
    float* floats = room_for_floats(*memory, Memory::kStatistics, n.rows * (layer ? 2 : 1));
    if (floats == nullptr) return kDeclined;
    n.mean = layer ? floats : nullptr;
    n.rstd = layer ? floats + n.rows : floats;
  }
  return launched(n, *memory, device, Regime::automatic);
}

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("layer_norm", TORCH_BOX(&normswap::layer_norm_cuda));
  m.impl("layer_norm_or_none", TORCH_BOX(&normswap::layer_norm_or_none));
  m.impl("layer_norm_recorded", TORCH_BOX(&normswap::layer_norm_recorded));
  m.impl("rms_norm", TORCH_BOX(&normswap::rms_norm_cuda));
  m.impl("rms_norm_or_none", TORCH_BOX(&normswap::rms_norm_or_none));
  m.impl("rms_norm_recorded", TORCH_BOX(&normswap::rms_norm_recorded));
}

// The launch plan, for tests that have no GPU, of the GPU described: (regime, vec, lanes, chunk_len, chunks, warps, held,
// block_chunks, blocks_a_row, slots, grid, shared) into out. Returns 0 when the row cannot be done in that regime.
extern "C" __attribute__((visibility("default"))) int normswap_row_plan(
    int64_t rows, int64_t cols, int itemsize, int weights, int ragged, int options, int adds, int clusters, int shared,
    int multiprocessors, int regime, int64_t* out) {
  const normswap::Gpu gpu{clusters != 0, clusters != 0, shared, multiprocessors, multiprocessors > 0};
  const normswap::Rows of{rows, cols, itemsize, weights, ragged != 0, options != 0, adds != 0};
  normswap::RowPlan p;
  if (!normswap::make_row_plan(of, gpu, static_cast<normswap::Regime>(regime), &p)) return 0;
  const int64_t values[] = {static_cast<int64_t>(p.regime), p.vec, p.lanes, p.chunk_len, p.chunks, p.warps,
                            static_cast<int64_t>(p.held), p.block_chunks, p.blocks_a_row, p.slots, p.grid, p.shared};
  for (const int64_t value : values) *out++ = value;
  return 1;
}
