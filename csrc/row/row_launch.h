// Norms of rows on CUDA tensors: checks, plan, workspace, launch.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>

#include "abi/tensors.h"
#include "abi/views.h"
#include "plan/make_row_plan.h"
#include "row/only_adds.h"

namespace normswap {

struct RowLaunches {
  RowLaunch *f32, *f16, *bf16;
  RowLaunch* of(DType dtype) const { return dtype == DType::f32 ? f32 : dtype == DType::f16 ? f16 : bf16; }
};

constexpr RowLaunches kLayerNorm{layer_norm_f32, layer_norm_f16, layer_norm_bf16};
constexpr RowLaunches kRmsNorm{rms_norm_f32, rms_norm_f16, rms_norm_bf16};
constexpr RowLaunches kNormWithOptions{norm_with_options_f32, norm_with_options_f16, norm_with_options_bf16};

// `weights`: that an element may have of its own. `options`: `launches` are norm_with_options. Where the plan's blocks, which
// must all run at once, cannot do so here (few multiprocessors, in a green context or under MPS), the split kernels do the
// rows: to the same bits. Gives what calls give (abi/calls.h): kDeclined also of rows that cannot be done in `regime`.
inline int32_t launched(const RowLaunches& launches, int weights, RowNorm n, Memory& memory, int32_t device, Regime regime,
                        bool options = false) {
  const int bytes = static_cast<int>(itemsize(n.dtype));
  const Rows rows{n.rows, n.cols, bytes, weights, is_ragged(n, bytes), options, options && only_adds(n)};
  const Gpu gpu = gpu_of(device);
  cudaStream_t stream{};
  cudaError_t error = cudaErrorUnknown;
  if (!set_stream(device, stream)) return kDeclined;
  for (const Regime one : {regime, Regime::split}) {
    RowPlan plan;
    if (!make_row_plan(rows, gpu, one, &plan) || !set_workspace(memory, row_workspace_bytes(plan, n.rows), n.workspace)) {
      return one == regime ? kDeclined : error;
    }
    // With options rows that are split have other kernels, which do not store 16 bits of float32.
    if (options && plan.regime == Regime::split && itemsize(n.out_dtype) < bytes) return kDeclined;
    if (n.options.residual != nullptr && n.options.residual_dtype != n.dtype && !adds_mixed(plan.regime)) return kDeclined;
    error = launches.of(n.dtype)(n, plan, stream);
    told(error);
    if (regime != Regime::automatic || !cannot_be_resident(error)) break;
  }
  return error;
}

// Raises unless rows were launched.
inline void check_rows(const char* op, const RowNorm& n, int64_t regime, int32_t error) {
  STD_TORCH_CHECK(error != kDeclined, op, ": rows of ", n.cols, " elements cannot be done in regime ", regime,
                  ", or there is no memory for their statistics");
  check_launch(static_cast<cudaError_t>(error));
}

inline void run(const char* op, const RowLaunches& launches, int weights, RowNorm n, const Tensor& input, const Tensor& out,
                int64_t regime, bool options = false) {
  TensorMemory memory(input);
  n.y = out.mutable_data_ptr();
  check_rows(op, n, regime,
             launched(launches, weights, n, memory, input.get_device_index(), static_cast<Regime>(regime), options));
}

// But for what they are read from and written to.
inline RowNorm rows_of(int64_t rows, int64_t cols, DType dtype, double eps) {
  RowNorm n{};
  n.rows = rows;
  n.cols = cols;
  n.eps = eps;
  n.num_groups = n.channels_per_group = n.spatial = n.options.rows_per_sample = 1;
  n.dtype = n.out_dtype = n.weight_dtype = dtype;
  return n;
}

// But for `out`.
inline RowNorm rows_of(const char* op, const Tensor& input, int64_t cols, double eps) {
  STD_TORCH_CHECK(cols > 0 && input.numel() % cols == 0, op, ": rows of ", cols, " elements do not divide ",
                  input.numel());
  RowNorm n = rows_of(input.numel() / cols, cols, dtype_of(input, op), eps);
  n.x = input.const_data_ptr();
  return n;
}

inline RowNorm row_norm_of(const char* op, const Tensor& input, const Tensor& out, int64_t cols, double eps) {
  check_out(op, out, input);
  return rows_of(op, input, cols, eps);
}

// layer_norm over the last dimension of what is contiguous but for that dimension, which lies elsewhere in memory: an image
// as permuted. `statistics`, optional: of all rows the mean, then the rstd. nullopt where it declines.
OptionalTensor layer_norm_of_permuted(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                      double eps, float* statistics);

// l2_norm of rows of `cols` elements of the input's memory.
void l2_norm_rows(const Tensor& input, int64_t cols, double eps, const Tensor& out);

// --- what calls ask first ----------------------------------------------------------------------------------------------

// Sets weight and bias, contiguous, of the sizes that the input has from `first` on; false where the kernels do not take them.
inline bool set_parameters(RowNorm& n, const View& input, int64_t first, int64_t dims, const View& weight, const View& bias) {
  if (first < 0 || dims < 1 || first + dims > input.dims || !affine_dtypes_fit(input, weight, bias)) return false;
  for (const View* t : {&weight, &bias}) {
    if (is_absent(*t)) continue;
    if (t->dims != dims || !std::equal(t->sizes, t->sizes + dims, input.sizes + first)) return false;
    if (!is_contiguous(*t) || !starts_at_vector(*t)) return false;
    n.weight_dtype = static_cast<DType>(t->dtype);
  }
  n.weight = weight.data;
  n.bias = bias.data;
  return true;
}

inline bool has_served_dtype(const Tensor& t) { return view_of(t).dtype >= 0; }

// Whether the kernels can take these, if the input's layout allows; weight and bias have `dims` sizes of the input's, from
// `first` on. They may start anywhere.
inline bool is_plain(const Tensor& input, int64_t first, int64_t dims, const OptionalTensor& weight,
                     const OptionalTensor& bias) {
  RowNorm n{};
  View w = view_of(weight), b = view_of(bias);
  w.data = b.data = nullptr;
  return has_served_dtype(input) && input.numel() > 0 && all_beside(input, {&weight, &bias}) &&
         set_parameters(n, view_of(input), first, dims, w, b);
}

inline int64_t trailing_elements(const Tensor& input, int64_t dims) {
  const auto sizes = input.sizes();
  return std::accumulate(sizes.end() - dims, sizes.end(), int64_t{1}, std::multiplies<int64_t>());
}

}  // namespace normswap
