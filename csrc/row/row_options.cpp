// layer_norm and rms_norm with what may stand before and behind them, and l2_norm, on CUDA tensors: checks and launch.
#include <tuple>

#include "row/row_launch.h"

namespace normswap {
namespace {

using torch::headeronly::ScalarType;

constexpr RowLaunches kNormWithOptions{norm_with_options_f32, norm_with_options_f16, norm_with_options_bf16};

// What a call may be given besides the norm's own; see RowOptions.
struct Options {
  OptionalTensor residual, scale, shift;
  int64_t activation;
  double low, high;
  ScalarType dtype;  // of the output
};

// Whether the trailing `dims` dims of `t` are those of `input`, dense, the first is the input's or 1, and all others are 1.
bool is_per_sample(const Tensor& t, const Tensor& input, int64_t dims) {
  const int64_t leading = input.dim() - dims;
  if (t.dim() != input.dim()) return false;
  int64_t stride = 1;
  for (int64_t i = input.dim() - 1; i >= 0; --i) {
    const bool normalised = i >= leading;
    if (t.size(i) != (normalised ? input.size(i) : 1) && !(i == 0 && t.size(0) == input.size(0))) return false;
    if (normalised && t.size(i) != 1 && t.stride(i) != stride) return false;
    stride *= t.size(i);
  }
  return true;
}

// Elements from one sample's values to the next's; 0 where all samples have the same.
int64_t stride_of_samples(const Tensor& t, int64_t dims) { return t.dim() > dims && t.size(0) > 1 ? t.stride(0) : 0; }

bool is_on_device_of(const Tensor& input, const Tensor& t) {
  return t.is_cuda() && t.get_device_index() == input.get_device_index();
}

// Whether these options are what kernels take.
bool fits(const Options& o, const Tensor& input, int64_t dims) {
  if (o.residual.has_value()) {
    const Tensor& r = *o.residual;
    const bool same = r.dim() == input.dim() && std::equal(r.sizes().begin(), r.sizes().end(), input.sizes().begin());
    if (!same || r.scalar_type() != input.scalar_type() || !r.is_contiguous() || !is_on_device_of(input, r)) return false;
  }
  if (o.scale.has_value() != o.shift.has_value()) return false;
  for (const OptionalTensor* t : {&o.scale, &o.shift}) {
    if (!t->has_value()) continue;
    const auto dtype = (*t)->scalar_type();
    if (!is_per_sample(**t, input, dims) || !is_on_device_of(input, **t)) return false;
    if (dtype != input.scalar_type() && dtype != ScalarType::Float) return false;
    if (dtype != o.scale->scalar_type() || stride_of_samples(**t, dims) != stride_of_samples(*o.scale, dims)) return false;
  }
  return true;
}

RowOptions row_options_of(const char* op, const Options& o, const Tensor& input, int64_t dims, int64_t rows,
                          const OptionalTensor& sum) {
  STD_TORCH_CHECK(fits(o, input, dims), op,
                  ": residual must be contiguous and like the input; scale and shift, both or neither and of one dtype and "
                  "layout, must have the input's rank and normalized dims, its first size or 1, and 1 elsewhere");
  STD_TORCH_CHECK(o.residual.has_value() == sum.has_value(), op, ": sum must be given where residual is");
  RowOptions options{};
  options.residual = data_or_null(o.residual);
  if (sum.has_value()) {
    check_out(op, *sum, input);
    options.sum = sum->mutable_data_ptr();
  }
  options.rows_per_sample = rows;
  if (o.scale.has_value()) {
    options.scale = o.scale->const_data_ptr();
    options.shift = o.shift->const_data_ptr();
    options.scale_dtype = dtype_of(*o.scale, op);
    options.sample_stride = stride_of_samples(*o.scale, dims);
    if (options.sample_stride > 0) options.rows_per_sample = rows / input.size(0);
  }
  options.activation = activation_of(op, o.activation, o.low, o.high);
  return options;
}

// The norm of rows of the trailing `dims` dims, but for the affine parameters and the statistics.
RowNorm norm_of(const char* op, NormKind kind, const Tensor& input, int64_t dims, double eps, const Options& options,
                const Tensor& out, const OptionalTensor& sum) {
  STD_TORCH_CHECK(dims >= 1 && dims <= input.dim() && input.is_contiguous() && out.is_contiguous(), op,
                  ": input and output must be contiguous, with at least ", dims, " dims");
  check_beside(op, "out", out, input);
  RowNorm n = rows_of(op, input, trailing_elements(input, dims), eps);
  STD_TORCH_CHECK(out.numel() == input.numel() && out.scalar_type() == options.dtype, op,
                  ": out must have the input's size, and its dtype unless another is asked for");
  n.kind = kind;
  n.out_dtype = dtype_of(out, op);
  n.y = out.mutable_data_ptr();
  n.options = row_options_of(op, options, input, dims, n.rows, sum);
  return n;
}

// The rows of an input whose last `dims` are normalised.
int64_t rows_over(const Tensor& input, int64_t dims) {
  int64_t rows = 1;
  for (int64_t d = 0; d < input.dim() - dims; ++d) rows *= input.size(d);
  return rows;
}

void layer_norm_of(const Tensor& input, int64_t dims, const OptionalTensor& weight_, const OptionalTensor& bias_, double eps,
                   const Options& options, const Tensor& out, const OptionalTensor& sum, float* mean, float* rstd,
                   int64_t regime) {
  constexpr const char* op = "layer_norm_with_options";
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const OptionalTensor weight = on_boundary(weight_), bias = on_boundary(bias_);
  RowNorm n = norm_of(op, NormKind::layer, input, dims, eps, options, out, sum);
  set_affine(op, n, input, weight, bias, n.cols);
  n.weight_offset = -0.0;  // -0 + w is w, -0 too
  n.mean = mean;
  n.rstd = rstd;
  if (itemsize(n.out_dtype) < itemsize(n.dtype)) return run(op, kLayerNorm, 2, n, input, out, regime);
  run(op, kNormWithOptions, 0, n, input, out, regime, true);
}

void rms_norm_of(const Tensor& input, int64_t dims, const OptionalTensor& weight_, double eps, double weight_offset,
                 bool cast_before_weight, const Options& options, const Tensor& out, const OptionalTensor& sum,
                 float* rstd, int64_t regime) {
  constexpr const char* op = "rms_norm_with_options";
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const OptionalTensor weight = on_boundary(weight_);
  RowNorm n = norm_of(op, NormKind::rms, input, dims, eps, options, out, sum);
  set_affine(op, n, input, weight, std::nullopt, n.cols);
  n.weight_offset = weight.has_value() ? weight_offset : 0.0;
  n.cast_before_weight = cast_before_weight;
  n.rstd = rstd;
  run(op, kNormWithOptions, 0, n, input, out, regime, true);
}

void layer_norm_cuda(const Tensor& input, int64_t dims, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                     const OptionalTensor& residual, const OptionalTensor& scale, const OptionalTensor& shift,
                     int64_t activation, double low, double high, Tensor out, OptionalTensor sum, OptionalTensor mean,
                     OptionalTensor rstd, int64_t regime) {
  const Options options{residual, scale, shift, activation, low, high, input.scalar_type()};
  const int64_t rows = rows_over(input, dims);
  layer_norm_of(input, dims, weight, bias, eps, options, out, sum,
                floats_or_null("layer_norm_with_options", mean, input, rows),
                floats_or_null("layer_norm_with_options", rstd, input, rows), regime);
}

void rms_norm_cuda(const Tensor& input, int64_t dims, const OptionalTensor& weight, double eps, double weight_offset,
                   bool cast_before_weight, const OptionalTensor& residual, const OptionalTensor& scale,
                   const OptionalTensor& shift, int64_t activation, double low, double high, Tensor out,
                   OptionalTensor sum, OptionalTensor rstd, int64_t regime) {
  const Options options{residual, scale, shift, activation, low, high, input.scalar_type()};
  rms_norm_of(input, dims, weight, eps, weight_offset, cast_before_weight, options, out, sum,
              floats_or_null("rms_norm_with_options", rstd, input, rows_over(input, dims)), regime);
}

// The input's memory as rows of `cols` elements, whatever its dims.
void l2_norm_cuda(const Tensor& input, int64_t cols, double eps, Tensor out, OptionalTensor norm, int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  STD_TORCH_CHECK(eps >= 0.0, "l2_norm: eps must not be negative, got ", eps);
  RowNorm n = row_norm_of("l2_norm", input, out, cols, eps);
  n.kind = NormKind::l2;
  n.weight_dtype = n.dtype;
  n.mean = floats_or_null("l2_norm", norm, input, n.rows);
  run("l2_norm", kNormWithOptions, 0, n, input, out, regime, true);
}

}  // namespace

void l2_norm_rows(const Tensor& input, int64_t cols, double eps, const Tensor& out) {
  l2_norm_cuda(input, cols, eps, out, std::nullopt, 0);
}

namespace {

// --- calls that record no gradient: see row_norm.cpp ---------------------------------------------------------------

using Result = std::tuple<OptionalTensor, OptionalTensor>;  // and the sum, where there is a residual

// Whether rows of 16-bit elements, and what belongs to them, begin and end at multiples of 16 bytes.
bool is_at_vectors(const Tensor& input, int64_t dims, const Options& o) {
  uintptr_t all = reinterpret_cast<uintptr_t>(input.const_data_ptr()) | (trailing_elements(input, dims) * 2);
  for (const OptionalTensor* t : {&o.residual, &o.scale, &o.shift}) {
    if (t->has_value()) all |= reinterpret_cast<uintptr_t>((*t)->const_data_ptr());
  }
  if (o.scale.has_value()) all |= stride_of_samples(*o.scale, dims) * o.scale->element_size();
  return all % 16 == 0;
}

// Whether kernels store the output in its dtype: the input's, float32 of 16 bits, 16 bits of the float32 norm alone.
bool has_stored_dtype(const Tensor& input, int64_t dims, const Options& o) {
  const auto is_float = [](ScalarType dtype) { return dtype == ScalarType::Float; };
  if (o.dtype == input.scalar_type()) return true;
  if (is_float(o.dtype)) return is_at_vectors(input, dims, o);
  const bool alone = !o.residual.has_value() && !o.scale.has_value() && o.activation == 0;
  const bool narrow = o.dtype == ScalarType::Half || o.dtype == ScalarType::BFloat16;
  return is_float(input.scalar_type()) && narrow && alone && is_at_vectors(input, dims, o);
}

// Calls `launch` with an output and a sum, where there are memory for them and kernels.
template <class RunNorm>
Result norm_or_none(const Tensor& input, int64_t dims, const OptionalTensor& weight, const OptionalTensor& bias,
                    const Options& options, RunNorm run_norm) {
  if (!input.is_contiguous() || !is_plain(input, input.dim() - dims, dims, weight, bias)) return {};
  if (!fits(options, input, dims) || !has_stored_dtype(input, dims, options)) return {};
  const OptionalTensor out = unfilled_like(input, options.dtype);
  const OptionalTensor sum = options.residual.has_value() ? unfilled_like(input) : std::nullopt;
  if (!out.has_value() || options.residual.has_value() != sum.has_value()) return {};
  run_norm(*out, sum);
  return {out, sum};
}

Result layer_norm_or_none(const Tensor& input, int64_t dims, const OptionalTensor& weight, const OptionalTensor& bias,
                          double eps, const OptionalTensor& residual, const OptionalTensor& scale,
                          const OptionalTensor& shift, int64_t activation, double low, double high,
                          OptionalDtype dtype) {
  const Options options{residual, scale, shift, activation, low, high, dtype.value_or(input.scalar_type())};
  return norm_or_none(input, dims, weight, bias, options, [&](const Tensor& out, const OptionalTensor& sum) {
    layer_norm_of(input, dims, weight, bias, eps, options, out, sum, nullptr, nullptr, 0);
  });
}

Result rms_norm_or_none(const Tensor& input, int64_t dims, const OptionalTensor& weight, double eps, double weight_offset,
                        bool cast_before_weight, const OptionalTensor& residual, const OptionalTensor& scale,
                        const OptionalTensor& shift, int64_t activation, double low, double high) {
  const Options options{residual, scale, shift, activation, low, high, input.scalar_type()};
  return norm_or_none(input, dims, weight, std::nullopt, options, [&](const Tensor& out, const OptionalTensor& sum) {
    rms_norm_of(input, dims, weight, eps, weight_offset, cast_before_weight, options, out, sum, nullptr, 0);
  });
}

// --- calls that record a gradient: see row_norm.cpp ----------------------------------------------------------------

using Recorded = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor>;  // output, sum, statistics

// As norm_or_none; `run_norm` also takes where to store so many floats a row.
template <class RunNorm>
Recorded norm_recorded(const Tensor& input, int64_t dims, const OptionalTensor& weight, const OptionalTensor& bias,
                       const Options& options, int64_t floats, RunNorm run_norm) {
  OptionalTensor statistics;
  const auto [out, sum] = norm_or_none(
      input, dims, weight, bias, options, [&](const Tensor& y, const OptionalTensor& total) {
        statistics = unfilled_floats(input, floats * (input.numel() / trailing_elements(input, dims)));
        if (statistics.has_value()) run_norm(y, total, static_cast<float*>(statistics->mutable_data_ptr()));
      });
  return statistics.has_value() ? Recorded{out, sum, statistics} : Recorded{};
}

Recorded layer_norm_recorded(const Tensor& input, int64_t dims, const OptionalTensor& weight, const OptionalTensor& bias,
                             double eps, const OptionalTensor& residual, const OptionalTensor& scale,
                             const OptionalTensor& shift, int64_t activation, double low, double high,
                             OptionalDtype dtype) {
  const Options options{residual, scale, shift, activation, low, high, dtype.value_or(input.scalar_type())};
  return norm_recorded(
      input, dims, weight, bias, options, 2, [&](const Tensor& out, const OptionalTensor& sum, float* mean) {
        float* rstd = mean + input.numel() / trailing_elements(input, dims);
        layer_norm_of(input, dims, weight, bias, eps, options, out, sum, mean, rstd, 0);
      });
}

Recorded rms_norm_recorded(const Tensor& input, int64_t dims, const OptionalTensor& weight, double eps,
                           double weight_offset, bool cast_before_weight, const OptionalTensor& residual,
                           const OptionalTensor& scale, const OptionalTensor& shift, int64_t activation, double low,
                           double high) {
  const Options options{residual, scale, shift, activation, low, high, input.scalar_type()};
  return norm_recorded(
      input, dims, weight, std::nullopt, options, 1, [&](const Tensor& out, const OptionalTensor& sum, float* rstd) {
        rms_norm_of(input, dims, weight, eps, weight_offset, cast_before_weight, options, out, sum, rstd, 0);
      });
}

OptionalTensor frobenius_norm_or_none(const Tensor& input) {
  if (!input.is_contiguous() || !has_served_dtype(input) || input.numel() == 0) return std::nullopt;
  const OptionalTensor out = unfilled_like(input);
  if (out.has_value()) l2_norm_cuda(input, input.numel(), 0.0, *out, std::nullopt, 0);
  return out;
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("layer_norm_with_options", TORCH_BOX(&normswap::layer_norm_cuda));
  m.impl("rms_norm_with_options", TORCH_BOX(&normswap::rms_norm_cuda));
  m.impl("l2_norm", TORCH_BOX(&normswap::l2_norm_cuda));
  m.impl("layer_norm_with_options_or_none", TORCH_BOX(&normswap::layer_norm_or_none));
  m.impl("rms_norm_with_options_or_none", TORCH_BOX(&normswap::rms_norm_or_none));
  m.impl("layer_norm_with_options_recorded", TORCH_BOX(&normswap::layer_norm_recorded));
  m.impl("rms_norm_with_options_recorded", TORCH_BOX(&normswap::rms_norm_recorded));
  m.impl("frobenius_norm_or_none", TORCH_BOX(&normswap::frobenius_norm_or_none));
}
